"""Figures of a sandbox, for `executors.py`: how soon a program starts in it, and how well a batch fills the processors.

Contenders are interleaved and medians taken, as other programs may load the machine meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import time
from statistics import median

from composer_core.sandbox import Candidate, Limits, Sandbox

_WORK = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
_LIMITS = Limits(seconds=60)


def start_seconds(sandbox: Sandbox, *, rounds: int = 20) -> tuple[float, float]:
    """Median seconds of a program that does nothing: in the sandbox, and bare."""
    inside, bare = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        sandbox.run_batch([Candidate(("true",))], _LIMITS)
        inside.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        subprocess.run(["true"], check=True)
        bare.append(time.perf_counter() - begin)
    return median(inside), median(bare)


def batch_ratio(sandbox: Sandbox, *, candidates: int = 100, workers: int | None = None) -> float:
    """Time of a batch over the sum of its candidates' own times, each run by itself, divided by the workers.

    Each computes for 0.1 s. Own times are taken in the sandbox, before the batch and after it, and averaged.
    """
    batch = [Candidate((sandbox.python, "-c", _WORK))] * candidates
    workers = workers or os.cpu_count() or 1

    def alone() -> float:
        return sum(result.seconds for result in sandbox.run_batch(batch, _LIMITS, workers=1))

    before = alone()
    begin = time.perf_counter()
    sandbox.run_batch(batch, _LIMITS, workers=workers)
    together = time.perf_counter() - begin
    return together / ((before + alone()) / 2 / workers)
