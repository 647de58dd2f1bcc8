"""Time and live memory of loss plus backward, against what others do and against the plainest torch code.

    python bench/loss.py [--quick] [--json]

Vocabulary-sized losses (`loss_vocabulary.py`), all in one process: `naive` projects everything and takes two full
log-softmaxes, as published; `checkpointed` does so in chunks of 256 tokens that are computed again in the backward;
`trl` is TRL 1.16's ChunkedDivergenceFunction (on a CPU its torch path); `liger` Liger's fused JSD, soft loss alone, not
compiled; `matmuls` are the products alone that loss and gradients need. A contender that is not installed is named and
left out. Policy objectives and preference forms (`loss_tokens.py`) start from packed log-probs; `plain` is the formula
in the fewest lines of torch, on the same packed tensors and with the same sums for the log.

How it is measured: `loss_measure.py`. `ratio` is ours over the peer named in the figure, `peers` holds every contender
over that same peer. --quick: a smaller vocabulary, fewer rounds, the main rows only, within a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from loss_measure import Figure, Memory, medians, memory
from loss_tokens import FORM_NAMES, PRESET_NAMES, form_case, policy_case
from loss_vocabulary import (
    DIVERGENCES,
    LOGPS,
    LOGPS_VALUES,
    PEERS,
    SPECS,
    Case,
    Inputs,
    Make,
    ours,
)

sys.path.remove(str(Path(__file__).parent))  # else bench/trl.py is what `import trl` finds

KL_TARGETS, JSD_TARGETS = (0.75, 0.15), (0.45, 0.07)


def measured(
    case: Case, contenders: dict[str, Make], *, rounds: int, missing: set[str]
) -> tuple[dict[str, float], dict[str, Memory]]:
    """Seconds and bytes of each contender that is installed."""
    inputs, runs = Inputs.make(case), {}
    for name, make in contenders.items():
        try:
            runs[name] = make(case, inputs)
        except ImportError:
            missing.add(name)
    bytes_of = {}
    for name, run in runs.items():  # also the warm-up
        inputs.clear()
        bytes_of[name] = memory(run)
    return medians(runs, rounds=rounds, reset=inputs.clear), bytes_of


def row(case: Case, rounds: int, missing: set[str], contenders: dict[str, Make]) -> Iterator[Figure]:
    """Time and memory of a case against naive, where it runs, and against each library."""
    seconds, bytes_of = measured(case, contenders, rounds=rounds, missing=missing)
    peak = {name: float(size.peak) for name, size in bytes_of.items()}
    slow, large = KL_TARGETS if case.kind == "kl" else JSD_TARGETS
    targets = {"naive": (slow, large), **dict.fromkeys(PEERS, (1.05, 1.0))}
    for peer, (time_target, memory_target) in targets.items():
        if peer in seconds:
            yield Figure.against(f"time / {peer}: {case}", seconds, peer, target=time_target, n=rounds)
            yield Figure.against(f"memory / {peer}: {case}", peak, peer, target=memory_target, n=1)


def growth(vocab: int, sizes: tuple[int, int]) -> Figure:
    """Live bytes at the larger number of tokens over those at the smaller."""
    peaks = []
    for tokens in sizes:
        case = Case("jsd", tokens, vocab)
        peaks.append(memory(ours(case, Inputs.make(case))).peak)
    return Figure(f"memory at N={sizes[1]} / N={sizes[0]}: jsd V={vocab}", peaks[1] / peaks[0], 1.10, {}, 1)


def proportional(case: Case, rounds: int) -> Figure:
    """Time per counted token with a quarter of the tokens, over that with all."""
    cases = {"part": replace(case, counted=0.25), "whole": case}
    inputs = {name: Inputs.make(some) for name, some in cases.items()}

    def clear() -> None:
        for some in inputs.values():
            some.clear()

    seconds = medians({name: ours(cases[name], inputs[name]) for name in cases}, rounds=rounds, reset=clear)
    ratio = seconds["part"] / 0.25 / seconds["whole"]
    head = "frozen head" if case.frozen else "head trained"
    name = f"time per counted token, 25% / 100%: {case.kind} N={case.tokens} V={case.vocab}, {head}"
    return Figure(name, ratio, 1.15, {}, rounds)


def logps(case: Case, rounds: int) -> Iterator[Figure]:
    """Sampled-token log-probs, alone and with their gradients, against log_softmax of all logits."""
    for what, some, contenders in (
        ("no gradient", case, LOGPS_VALUES),
        ("frozen head", replace(case, frozen=True), LOGPS),
        ("head trained", case, LOGPS),
    ):
        seconds, bytes_of = measured(some, contenders, rounds=rounds, missing=set())
        name = f"logps N={case.tokens} V={case.vocab}, {what}"
        yield Figure.against(f"time / plain: {name}", seconds, "plain", target=1.1, n=rounds)
        peak = {who: float(size.peak) for who, size in bytes_of.items()}
        yield Figure.against(f"memory / plain: {name}", peak, "plain", target=1.0, n=1)
        square = case.tokens * case.vocab * 4
        yield Figure(f"largest tensor / (N, V): {name}", bytes_of["ours"].largest / square, 0.99, {}, 1)


def tokens(rounds: int) -> Iterator[Figure]:
    """Losses on packed log-probs, each against its plain form; the values were compared when the case was made."""
    cases = [policy_case(preset, kl=kl) for preset in PRESET_NAMES for kl in (False, True)]
    cases += [form_case(form) for form in FORM_NAMES]
    for case in cases:
        seconds = medians(case.runs, rounds=rounds, repeats=20)
        yield Figure.against(f"time / plain: {case.name}", seconds, "plain", target=1.1, n=rounds)


def figures(quick: bool, missing: set[str]) -> Iterator[Figure]:
    """Everything, in the order it is measured."""
    rounds, vocab = (3, 8000) if quick else (9, 32000)
    contenders = {name: make for name, make in DIVERGENCES.items() if not (quick and name == "checkpointed")}
    yield from tokens(5 if quick else 25)
    for kind in SPECS:
        yield from row(Case(kind, vocab=vocab), rounds, missing, contenders)
    yield from logps(Case("kl", vocab=vocab), rounds)
    if quick:
        yield growth(16000, (512, 2048))
        return
    for kind in SPECS:
        for case in (
            Case(kind, frozen=True),
            Case(kind, counted=0.75),
            Case(kind, frozen=True, counted=0.75),
            Case(kind, dtype=torch.bfloat16),
            Case(kind, dtype=torch.bfloat16, frozen=True),
        ):
            yield from row(case, 5, missing, DIVERGENCES)
        # naive and checkpointed chunks would need some 10 GB and minutes a run here
        lean = {name: DIVERGENCES[name] for name in ("ours", *PEERS)}
        yield from row(Case(kind, vocab=151936), 3, missing, lean)
        yield proportional(Case(kind), rounds)
        yield proportional(Case(kind, frozen=True), rounds)
    yield growth(151936, (512, 2048))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="V=8000 instead of 32000, 3 rounds, the main rows only")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    missing: set[str] = set()
    for figure in figures(options.quick, missing):
        print(figure.line(options.json), flush=True)
    if missing and not options.json:
        print(f"left out, not installed: {', '.join(sorted(missing))} (pip install --no-deps liger-kernel trl)")


if __name__ == "__main__":
    main()
