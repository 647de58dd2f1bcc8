"""What three channels cost in verl's engine, in time and in memory.

    python bench/verl.py [--quick] [--json]

    all channels    grpo (verl's own) + sdpo (jsd, full vocabulary, frozen teacher) + replay (dpo, stored reference),
                    over verl's engine without them and the forwards that these need, bare (`verl_contenders.py`)
    memory          of sdpo with a live teacher above that of verl's engine, in fp32 tensors of N x V

Engines take whole optimiser steps in turn, there and back again, in one process and one thread. `ratio` is the median
over steps of the processor time, step by step; `peers` holds the same by the clock on the wall, which other programs
disturb, and the medians. Memory is the most tensor bytes alive during a step beyond those before it.

The whole takes about three minutes on a quiet machine. --quick: the tiny model alone, within one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.append(sys.path.pop(0))  # last, else this file is what `import verl` finds
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

from loss_measure import Figure, memory

if TYPE_CHECKING:
    from verl_contenders import Contender
    from verl_tasks import Task

ALL = ("full", "replay")
WARM_UP = 2
"""Steps that are not counted; the optimiser makes its state in the first."""


@dataclass(frozen=True)
class Seconds:
    """Of one optimiser step."""

    wall: float
    cpu: float


def figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Everything, in the order it is measured."""
    from verl_tasks import small, tiny, wide

    yield all_channels(tiny(folder), "tiny model", steps=40 if quick else 100)
    if quick:
        return
    yield all_channels(small(folder), "36M parameters, V=32,000, 4 x 160 tokens", steps=7)
    yield from memories(wide(folder))


def all_channels(task: Task, what: str, *, steps: int) -> Figure:
    """Time with three channels over that of a bare step with their forwards."""
    from verl_contenders import Bare, Contender

    from composer_verl.engine import ComposerEngine

    ours, peer = "all channels", "stock + bare"
    taken = in_turn({ours: Contender(ComposerEngine, task, ALL), peer: Contender(Bare, task)}, steps)
    return slower(f"{ours} / ({peer}), {what}", taken, ours, peer, target=1.2)


def memories(task: Task) -> Iterator[Figure]:
    """What a step needs above verl's own, in tensors of N x V."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl_contenders import Contender

    from composer_verl.engine import ComposerEngine

    def above(channels: Sequence[str], teacher: str) -> float:
        return (peak(Contender(ComposerEngine, task, channels, teacher=teacher)) - stock) / one

    stock, one = peak(Contender(FSDPEngineWithLMHead, task)), 4 * task.tokens * task.vocabulary
    what = f"N={task.tokens}, K={task.hinted}, V={task.vocabulary:,}, in N x V"
    beside = {"verl's engine": stock / one, "all channels, above it": above(ALL, "self-frozen")}
    for support, target in (("full", 2.2), ("topk", 0.5)):
        found = above((support,), "self-live")
        yield Figure(f"memory above stock, sdpo {support}, {what}", found, target, beside, 1)


def in_turn(contenders: Mapping[str, Contender], steps: int) -> dict[str, list[Seconds]]:
    """What the steps of each took."""
    taken: dict[str, list[Seconds]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(WARM_UP + steps):
        # there and back again: whoever comes second finds the caches of the first
        for name in names if number % 2 == 0 else reversed(names):
            contenders[name].get_ready()
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name].step()
            if number >= WARM_UP:
                taken[name].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    for contender in contenders.values():
        contender.check()
    return taken


def slower(figure: str, taken: Mapping[str, Sequence[Seconds]], ours: str, peer: str, *, target: float) -> Figure:
    """Time of a step over the peer's."""
    pairs = list(zip(taken[ours], taken[peer], strict=True))
    ratios = {clock: median(getattr(a, clock) / getattr(b, clock) for a, b in pairs) for clock in ("cpu", "wall")}
    medians = {f"{name} (cpu ms)": 1000 * median(seconds.cpu for seconds in of) for name, of in taken.items()}
    return Figure(figure, ratios["cpu"], target, {"by the wall clock": ratios["wall"]} | medians, len(pairs))


def peak(contender: Contender) -> int:
    """Most tensor bytes alive in a step, once the optimiser has its state."""
    contender.get_ready()
    contender.step()
    contender.get_ready()
    found = memory(contender.step).peak
    contender.check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    found = sys.stdout
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:  # verl prints what it builds
        from verl_contenders import alone

        with alone():
            for figure in figures(Path(folder), quick=options.quick):
                print(figure.line(options.json), file=found, flush=True)


if __name__ == "__main__":
    main()
