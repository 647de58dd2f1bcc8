"""Time, live memory and one line of output for the benches of losses.

Times are medians of CPU seconds of this process, so that a busy machine distorts them less, and contenders run in turn,
round after round. Memory is the largest sum of tensor bytes alive beyond the inputs, as the allocator saw them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]


def _nothing() -> None: ...


@contextmanager
def _quiet_stderr() -> Iterator[None]:
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


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors during a run."""

    peak: int
    """Most of them alive at once."""
    largest: int
    """The largest single one."""


def memory(run: Run) -> Memory:
    """What a run allocates and has not yet freed."""
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events: list[Any] = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most, largest = max(most, alive), max(largest, event.nbytes())
    return Memory(most, largest)


def medians(
    runs: Mapping[str, Run], *, rounds: int, repeats: int = 1, reset: Callable[[], None] = _nothing
) -> dict[str, float]:
    """CPU seconds of `repeats` runs of each, in turn; `reset` is called before each and not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            reset()
            start = time.process_time()
            for _ in range(repeats):
                run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


@dataclass(frozen=True)
class Figure:
    """One line of the output: ours over a peer, and every contender over that same peer."""

    figure: str
    ratio: float
    target: float
    peers: Mapping[str, float]
    n: int

    @classmethod
    def against(cls, figure: str, values: Mapping[str, float], peer: str, *, target: float, n: int) -> Figure:
        """From each contender's value; ours is called "ours"."""
        peers = {name: value / values[peer] for name, value in values.items()}
        return cls(figure, peers["ours"], target, peers, n)

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
