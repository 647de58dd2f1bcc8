"""What Composer adds to a step of TRL, and what its channels cost, in time and in memory.

    python bench/trl.py [--quick] [--json]

    added to a step        ComposerGRPOTrainer without channels, in a run that writes metrics and samples, minus
                           trl.GRPOTrainer
    all channels           dr-grpo + sdpo (jsd, full vocabulary, frozen teacher) + replay (dpo, stored reference), over
                           the stock step with the forwards that these need, bare (`trl_contenders.py`)
    objective + sdpo       dr-grpo + sdpo with a live teacher, over TRL's own SDPOTrainer

Contenders take their steps in turn, in one process and one thread (`trl_turns.py`), on the same prompts, and sample the
same completions. `ratio` is the median over steps of the trainer thread's processor time, step by step; `peers` holds
the same by the clock on the wall, which other programs disturb, and the medians. Memory is the most tensor bytes alive
during the first step beyond those before it, with completions that nobody sampled.

The whole takes about ten minutes. --quick: the tiny model alone, within one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.append(sys.path.pop(0))  # last, else this file is what `import trl` finds
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1"
)

from loss_measure import Figure

if TYPE_CHECKING:
    from trl_contenders import Run, Setting
    from trl_turns import Seconds

CLOCKS = ("cpu", "wall")
ADDED = 0.003
"""Seconds."""
LARGE = (
    "train.group_size=8",
    "train.micro_batch=8",
    "train.max_completion_tokens=256",
    "train.gradient_checkpointing=true",  # TRL's default; without it a model's own activations are most of a step
)


@dataclass(frozen=True)
class Contender:
    """A trainer and what it trains on."""

    make: Callable[[Run], Any]
    setting: Setting


def figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Everything, in the order it is measured."""
    from trl_contenders import bare, composer, sdpo, smollm2, stock, tiny

    task, steps = tiny(folder), 15 if quick else 60
    alone, full = task.alone(), task.all_channels("self-frozen", 8)
    small = {"ours": Contender(composer, alone), "stock": Contender(stock, alone)}
    small |= {"all channels": Contender(composer, full), "stock + bare": Contender(bare, full)}
    taken = seconds(small, folder, steps=steps)
    yield added(taken["ours"], taken["stock"])
    yield slower("all channels / (stock + bare), tiny model", taken, "all channels", "stock + bare", target=1.15)
    if quick:
        return
    task = smollm2(folder)
    alone, full = task.alone(), task.all_channels("self-frozen", 2)
    live = task.hinted("self-live")
    what = "SmolLM2 LoRA, 4 x 32 tokens"
    for name, make, setting, peer, their_make, their_setting, target in (
        ("no channel", composer, alone, "stock", stock, alone, 1.02),
        ("all channels", composer, full, "stock + bare", bare, full, 1.15),
        ("objective + sdpo", composer, live, "SDPOTrainer", sdpo, alone, 1.0),
    ):
        pair = {name: Contender(make, setting), peer: Contender(their_make, their_setting)}
        yield slower(f"{name} / {peer}, {what}", seconds(pair, folder, steps=8), name, peer, target=target)
    pair = {"ours": Contender(composer, full), "stock + bare": Contender(bare, full)}
    yield larger(f"memory, all channels / stock + bare, {what}", pair, folder, target=1.15)
    alone, live = (setting_of(*LARGE) for setting_of in (task.alone, partial(task.hinted, "self-live")))
    pair = {"ours": Contender(composer, live), "SDPOTrainer": Contender(sdpo, alone)}
    yield larger("memory, objective + sdpo / SDPOTrainer, SmolLM2 LoRA, 8 x 256 tokens", pair, folder, target=0.5)


def seconds(contenders: Mapping[str, Contender], folder: Path, *, steps: int) -> dict[str, list[Seconds]]:
    """What the steps of each took, in turn."""
    from trl_contenders import open_run
    from trl_turns import WARM_UP, in_turn

    with ExitStack() as stack:
        trainers = {}
        for name, contender in contenders.items():
            run = stack.enter_context(open_run(contender.setting.to(steps=steps + WARM_UP), Path(folder, "runs")))
            trainers[name] = contender.make(run)
        return in_turn(trainers, steps)


def added(ours: Sequence[Seconds], stock: Sequence[Seconds]) -> Figure:
    """Seconds more in a step, over the target."""
    pairs = list(zip(ours, stock, strict=True))
    more = {clock: median(getattr(a, clock) - getattr(b, clock) for a, b in pairs) for clock in CLOCKS}
    peers = {f"added ({clock} ms)": 1000 * value for clock, value in more.items()} | _medians(
        {"ours": ours, "stock": stock}
    )
    return Figure("added to a step, tiny model, over 3 ms", more["cpu"] / ADDED, 1.0, peers, len(ours))


def slower(figure: str, taken: Mapping[str, Sequence[Seconds]], ours: str, peer: str, *, target: float) -> Figure:
    """Time of a step over the peer's."""
    pairs = list(zip(taken[ours], taken[peer], strict=True))
    ratios = {clock: median(getattr(a, clock) / getattr(b, clock) for a, b in pairs) for clock in CLOCKS}
    peers = {"by the wall clock": ratios["wall"]} | _medians(taken)
    return Figure(figure, ratios["cpu"], target, peers, len(taken[ours]))


def larger(figure: str, contenders: Mapping[str, Contender], folder: Path, *, target: float) -> Figure:
    """Memory of a step over the peer's; ours comes first."""
    from trl_contenders import open_run, without_sampling
    from trl_turns import peak_bytes

    peaks = {}
    for name, contender in contenders.items():
        with open_run(contender.setting.to(steps=1), Path(folder, "runs")) as run:
            peaks[name] = peak_bytes(without_sampling(contender.make(run))) / 1e6
    ours, theirs = peaks.values()
    return Figure(figure, ours / theirs, target, {f"{name} (MB)": value for name, value in peaks.items()}, 1)


def _medians(taken: Mapping[str, Sequence[Seconds]]) -> dict[str, float]:
    return {f"{name} (cpu ms)": 1000 * median(seconds.cpu for seconds in of) for name, of in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="'pin_memory' argument")
    with tempfile.TemporaryDirectory() as folder:
        for figure in figures(Path(folder), quick=options.quick):
            print(figure.line(options.json), flush=True)


if __name__ == "__main__":
    main()
