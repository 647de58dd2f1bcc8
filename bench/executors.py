"""What the shared executor adds to a bare service: time to the first line of user code, and a round of questions.

    python bench/executors.py [--json]

`local`: seconds from `launch` of four replicas to the first line of the last one, minus the same for four bare
`Popen`; contenders interleaved, medians of seven. `round`: one `poll_all` of 256 replicas of a service that answers
at once, ledger read; with one replica that changed, the ledger is written too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_executors.executor import ServiceExecutor
from composer_executors.local import LocalService
from composer_executors.service import Replica
from composer_executors.settings import JobSettings, LocalSettings

REPLICAS, MANY, ROUNDS = 4, 256, 7
LOCAL_TARGET_S, ROUND_TARGET_S = 0.150, 0.050
_FIRST_LINE = "import os, pathlib, sys; pathlib.Path(sys.argv[1], f'up-{os.getpid()}').touch()"


class Instant(LocalService):
    """Starts nothing and answers at once."""

    name = "instant"
    over = 0

    def submit(self, replicas: Sequence[Replica]) -> Iterator[JobHandle]:
        """Handles alone."""
        for one in replicas:
            yield JobHandle(self.name, one.rank, f"i{one.rank}", one.attempt, {"job": one.job})

    def poll(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """The first `over` of them have ended."""
        ended, runs = JobStatus(JobState.SUCCEEDED, 0), JobStatus(JobState.RUNNING)
        return [ended if handle.rank < self.over else runs for handle in handles]


def until_all_are_up(folder: Path, start: Callable[[], object]) -> float:
    """Seconds from `start` until every replica has run its first line."""
    began = time.perf_counter()
    start()
    while len(list(folder.glob("up-*"))) < REPLICAS:
        time.sleep(0.001)
    return time.perf_counter() - began


def ours(folder: Path) -> float:
    """By the executor."""
    settings = LocalSettings(poll_seconds=0.02)
    executor = ServiceExecutor(LocalService(settings), settings)
    job = Job("b", ("-c", _FIRST_LINE, str(folder)), folder, replicas=REPLICAS)
    seconds = until_all_are_up(folder, lambda: executor.launch(job))
    executor.collect([handle for handle, _ in executor.attach(folder)])
    return seconds


def bare(folder: Path) -> float:
    """By Popen."""
    processes: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", _FIRST_LINE, str(folder)]
    seconds = until_all_are_up(folder, lambda: processes.extend(subprocess.Popen(command) for _ in range(REPLICAS)))
    for process in processes:
        process.wait()
    return seconds


def local() -> float:
    """What the executor adds to four processes, in seconds."""
    times: dict[Callable[[Path], float], list[float]] = {ours: [], bare: []}
    for _ in range(ROUNDS):
        for contender, seconds in times.items():
            with tempfile.TemporaryDirectory() as name:
                seconds.append(contender(Path(name)))
    return statistics.median(times[ours]) - statistics.median(times[bare])


def rounds() -> tuple[float, float]:
    """Seconds of a round where nothing changed, and of one where one replica did."""
    quiet: list[float] = []
    changed: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        service = Instant(LocalSettings())
        executor = ServiceExecutor(service, JobSettings())
        handles = executor.launch(Job("b", ("-c", "pass"), Path(name), replicas=MANY))
        executor.poll_all(handles)
        for _ in range(3 * ROUNDS):
            for times, more in ((quiet, 0), (changed, 1)):
                service.over += more
                began = time.perf_counter()
                executor.poll_all(handles)
                times.append(time.perf_counter() - began)
    return statistics.median(quiet), statistics.median(changed)


def main() -> int:
    """Measure, show, compare with what must be reached."""
    parser = argparse.ArgumentParser(description="What the executor adds to a bare service.")
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    quiet, changed = rounds()
    figures = [
        {"figure": "local: 4 replicas to their first line, over Popen", "s": local(), "at_most_s": LOCAL_TARGET_S},
        {"figure": f"round of {MANY}, nothing changed", "s": quiet, "at_most_s": ROUND_TARGET_S},
        {"figure": f"round of {MANY}, one changed", "s": changed, "at_most_s": ROUND_TARGET_S},
    ]
    for figure in figures:
        print(
            json.dumps(figure)
            if as_json
            else f"{figure['figure']}: {figure['s']:.3f} s (at most {figure['at_most_s']} s)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
