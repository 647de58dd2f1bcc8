"""Losses of the vocabulary's size: time and live memory of loss plus backward, against what others do.

    python bench/loss.py [--quick] [--json]

Contenders, all in one process, in turn, round after round: `naive` projects everything and takes two full
log-softmaxes, as published; `checkpointed` does so in chunks of 256 tokens that are computed again in the backward;
`trl` is TRL 1.16's ChunkedDivergenceFunction (on a CPU its torch path); `liger` Liger's fused JSD, soft loss alone, not
compiled; `matmuls` are the products alone that loss and gradients need. A contender that is not installed is named and
left out.

Times are medians of CPU seconds of this process, so that a busy machine distorts them less. Memory is the largest sum
of tensor bytes alive beyond the inputs, as the allocator saw them. `ratio` is ours over the peer named in the figure,
`peers` holds every contender over that same peer. --quick: a smaller vocabulary, fewer rounds, the main rows only,
within a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from composer_core.divergences import Divergence, DivergenceKind
from composer_core.loss.fused import fused_linear_divergence
from composer_core.loss.fused_logps import fused_logps

sys.path.remove(str(Path(__file__).parent))  # else bench/trl.py is what `import trl` finds

WIDTH = 512
SPECS = {"kl": Divergence(DivergenceKind.KL_TEACHER_STUDENT), "jsd": Divergence(DivergenceKind.JSD, 0.5)}
PEERS = ("trl", "liger")
Run = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One row of the comparison."""

    kind: str
    tokens: int = 2048
    vocab: int = 32000
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    """The head gets no gradient, as with LoRA."""
    counted: float = 1.0
    """Share of tokens with weight 1; the others have 0."""

    def __str__(self) -> str:
        head = "frozen head" if self.frozen else "head trained"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} N={self.tokens} V={self.vocab} {dtype}, {head}, {self.counted:.0%} counted"


@dataclass(frozen=True)
class Inputs:
    """Leaves and constants of a case."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    rows: Tensor
    """(N,) 0 or 1."""
    ids: Tensor

    @classmethod
    def make(cls, case: Case) -> Inputs:
        """Seeded normals; logits have a spread of about 2."""
        torch.manual_seed(0)
        shapes = ((case.tokens, WIDTH), (case.vocab, WIDTH)) * 2
        hidden, weight, teacher_hidden, teacher_weight = (torch.randn(shape).to(case.dtype) for shape in shapes)
        for head in (weight, teacher_weight):
            head.mul_(2 / math.sqrt(WIDTH))
        rows = (torch.arange(case.tokens) % 100 < round(100 * case.counted)).float()
        ids = torch.randint(case.vocab, (case.tokens,))
        hidden.requires_grad_()
        weight.requires_grad_(not case.frozen)
        return cls(hidden, weight, teacher_hidden, teacher_weight, rows, ids)

    def clear(self) -> None:
        """Forget gradients."""
        self.hidden.grad = self.weight.grad = None


# -- contenders --------------------------------------------------------------------------------------------------------


def published(hidden: Tensor, inputs: Inputs, teacher_hidden: Tensor, kind: str) -> Tensor:
    """Divergence per token the plain way, (N,), in the inputs' dtype."""
    student = F.log_softmax(hidden @ inputs.weight.T, dim=-1)
    teacher = F.log_softmax(teacher_hidden @ inputs.teacher_weight.T, dim=-1)
    if kind == "kl":
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    half = math.log(0.5)
    mixture = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0)
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (0.5 * to_teacher + 0.5 * to_student).sum(-1)


def naive(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        values = published(inputs.hidden, inputs, inputs.teacher_hidden, case.kind)
        ((values * inputs.rows).sum() / inputs.rows.sum()).backward()

    return run


def checkpointed(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        chunks = zip(inputs.hidden.split(256), inputs.teacher_hidden.split(256), strict=True)
        values = [checkpoint(published, h, inputs, t, case.kind, use_reentrant=False) for h, t in chunks]
        ((torch.cat(values) * inputs.rows).sum() / inputs.rows.sum()).backward()

    return run


def ours(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        sides = (inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight)
        loss, _ = fused_linear_divergence(*sides, SPECS[case.kind], weight=inputs.rows)
        (loss / inputs.rows.sum()).backward()

    return run


def trl(case: Case, inputs: Inputs) -> Run:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = {"kl": 0.0, "jsd": 0.5}[case.kind]

    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        sides = (inputs.hidden[at], inputs.weight, None, inputs.teacher_hidden[at], inputs.teacher_weight, None)
        values, _ = ChunkedDivergenceFunction.apply(*sides, beta)
        (values.sum() / len(at)).backward()

    return run


def liger(case: Case, inputs: Inputs) -> Run:
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

    beta = {"kl": 0.0, "jsd": 0.5}[case.kind]
    # student and teacher biases, weights of hard and soft loss, beta, ignored label, temperature, compiled, chunk
    options = (None, None, 0.0, 1.0, beta, -100, 1.0, False, 256)

    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        sides = (inputs.hidden[at], inputs.weight, inputs.teacher_hidden[at], inputs.teacher_weight)
        loss = LigerFusedLinearJSDFunction.apply(*sides, inputs.ids[at], *options)
        (loss[0] if isinstance(loss, tuple) else loss).backward()

    return run


def matmuls(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        total = None if case.frozen else torch.zeros_like(inputs.weight)
        for rows in at.split(256):
            hidden, taught = inputs.hidden[rows], inputs.teacher_hidden[rows]
            logits, _ = hidden @ inputs.weight.T, taught @ inputs.teacher_weight.T
            _ = logits @ inputs.weight
            if total is not None:
                total.addmm_(logits.T, hidden)

    return run


def plain_logps(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        logits = inputs.hidden @ inputs.weight.T
        logps = logits.float().log_softmax(-1).gather(-1, inputs.ids[:, None]).squeeze(-1)
        (logps * inputs.rows).sum().backward()

    return run


def our_logps(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        logps, _ = fused_logps(inputs.hidden, inputs.weight, inputs.ids)
        (logps * inputs.rows).sum().backward()

    return run


def plain_values(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        (inputs.hidden @ inputs.weight.T).float().log_softmax(-1).gather(-1, inputs.ids[:, None])

    return run


def our_values(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        fused_logps(inputs.hidden, inputs.weight, inputs.ids)

    return run


Make = Callable[[Case, Inputs], Run]
DIVERGENCES: dict[str, Make] = {
    "naive": naive,
    "ours": ours,
    "liger": liger,
    "trl": trl,
    "checkpointed": checkpointed,
    "matmuls": matmuls,
}


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's library writes two lines there at every use, whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def live_peak(run: Run) -> int:
    """Largest sum of tensor bytes allocated and not yet freed during a run."""
    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events: list[Any] = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@dataclass(frozen=True)
class Measured:
    """By contender."""

    seconds: dict[str, float]
    peak: dict[str, int]
    rounds: int


def measure(case: Case, contenders: dict[str, Make], *, rounds: int, missing: set[str]) -> Measured:
    """Median CPU seconds, the contenders in turn, and one profiled run each for the memory."""
    inputs, runs, peak = Inputs.make(case), {}, {}
    for name, make in contenders.items():
        try:
            runs[name] = make(case, inputs)
        except ImportError:
            missing.add(name)
    for name, run in runs.items():  # also the warm-up
        inputs.clear()
        peak[name] = live_peak(run)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            inputs.clear()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return Measured({name: statistics.median(times) for name, times in seconds.items()}, peak, rounds)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One line of the output."""

    figure: str
    ratio: float
    target: float
    peers: dict[str, float]
    n: int

    def line(self, as_json: bool) -> str:
        """As the project's benches print it."""
        met = self.ratio <= self.target
        peers = {name: round(value, 3) for name, value in self.peers.items()}
        if as_json:
            numbers = {"ratio": round(self.ratio, 3), "target": self.target, "met": met}
            return json.dumps({"figure": self.figure, **numbers, "peers": peers, "n": self.n})
        others = ", ".join(f"{name} {value:.2f}" for name, value in peers.items() if name != "ours")
        verdict = "met" if met else "MISSED"
        return f"{self.figure}: {self.ratio:.3f}, target {self.target:g}: {verdict}" + (
            f" ({others})" if others else ""
        )


def against(values: dict[str, float], peer: str) -> tuple[float, dict[str, float]]:
    """Ours over a peer, and everyone over it."""
    return values["ours"] / values[peer], {name: value / values[peer] for name, value in values.items()}


def row(case: Case, rounds: int, missing: set[str], contenders: dict[str, Make]) -> Iterator[Figure]:
    """Time and memory of a case against naive, where it runs, and against each library."""
    measured = measure(case, contenders, rounds=rounds, missing=missing)
    peak = {name: float(size) for name, size in measured.peak.items()}
    if "naive" in measured.seconds:
        slow, large = {"kl": (0.75, 0.15), "jsd": (0.45, 0.07)}[case.kind]
        yield Figure(f"time / naive: {case}", *_at(against(measured.seconds, "naive"), slow), rounds)
        yield Figure(f"memory / naive: {case}", *_at(against(peak, "naive"), large), 1)
    for name in PEERS:
        if name in measured.seconds:
            yield Figure(f"time / {name}: {case}", *_at(against(measured.seconds, name), 1.05), rounds)
            yield Figure(f"memory / {name}: {case}", *_at(against(peak, name), 1.0), 1)


def _at(ratio: tuple[float, dict[str, float]], target: float) -> tuple[float, float, dict[str, float]]:
    return ratio[0], target, ratio[1]


def growth(vocab: int, sizes: tuple[int, int]) -> Figure:
    """Live bytes at the larger number of tokens over those at the smaller."""
    peaks = []
    for tokens in sizes:
        case = Case("jsd", tokens, vocab)
        peaks.append(live_peak(ours(case, Inputs.make(case))))
    return Figure(f"memory at N={sizes[1]} / N={sizes[0]}: jsd V={vocab}", peaks[1] / peaks[0], 1.10, {}, 1)


def proportional(case: Case, rounds: int) -> Figure:
    """Time per counted token with a quarter of the tokens, over that with all."""
    part, whole = (
        measure(some, {"ours": ours}, rounds=rounds, missing=set()).seconds["ours"] / some.counted
        for some in (replace(case, counted=0.25), case)
    )
    return Figure(
        f"time per counted token, 25% / 100%: {case.kind} N={case.tokens} V={case.vocab}",
        part / whole,
        1.15,
        {},
        rounds,
    )


def logps(case: Case, rounds: int) -> Iterator[Figure]:
    """Sampled-token log-probs, alone and with their gradients, against log_softmax of all logits."""
    pairs: dict[str, tuple[Case, dict[str, Make]]] = {
        "no gradient": (case, {"plain": plain_values, "ours": our_values}),
        "frozen head": (replace(case, frozen=True), {"plain": plain_logps, "ours": our_logps}),
        "head trained": (case, {"plain": plain_logps, "ours": our_logps}),
    }
    for what, (some, contenders) in pairs.items():
        measured = measure(some, contenders, rounds=rounds, missing=set())
        peak = {who: float(size) for who, size in measured.peak.items()}
        name = f"logps N={case.tokens} V={case.vocab}, {what}"
        yield Figure(f"time / plain: {name}", *_at(against(measured.seconds, "plain"), 1.1), rounds)
        yield Figure(f"memory / plain: {name}", *_at(against(peak, "plain"), 1.0), 1)


def figures(quick: bool, missing: set[str]) -> Iterator[Figure]:
    """Everything, in the order it is measured."""
    rounds, vocab = (3, 8000) if quick else (9, 32000)
    contenders = {name: make for name, make in DIVERGENCES.items() if not (quick and name == "checkpointed")}
    for kind in SPECS:
        yield from row(Case(kind, vocab=vocab), rounds, missing, contenders)
    yield from logps(Case("kl", vocab=vocab), rounds)
    if quick:
        yield growth(32000, (512, 2048))
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
