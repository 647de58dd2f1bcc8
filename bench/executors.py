"""What the shared executor adds to a bare service: time to the first line of user code, and a round of questions.

    python bench/executors.py [--quick] [--json]

`local`: seconds from `launch` of four replicas to the first line of the last one, minus the same for four bare
`Popen`. `slurm`: seconds from the call until `squeue` says RUNNING, over a bare `sbatch` of the same array; on a
cluster of its own, and left out where Slurm is not installed. `round`: one `poll_all` of 256 replicas of a service
that answers at once, ledger read; with one replica that changed, the ledger is written too. `sandbox`: see
`sandbox_figures.py`; left out without bubblewrap. Contenders are interleaved, and medians taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandbox_figures import batch_ratio, start_seconds

from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_executors.executor import ServiceExecutor
from composer_executors.local import LocalService
from composer_executors.sandbox.bubblewrap import BubblewrapSandbox
from composer_executors.service import Replica
from composer_executors.settings import JobSettings, LocalSettings, SlurmSettings
from composer_executors.slurm import SlurmService

REPLICAS, MANY, ROUNDS = 4, 256, 7
SERVICES = Path(__file__).parents[1] / "plugins/composer-executors/tests/services"
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


def in_turn(contenders: Sequence[Callable[[Path], float]], rounds: int) -> list[float]:
    """Median seconds of each, in a new folder every time."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, seconds in zip(contenders, times, strict=True):
            with tempfile.TemporaryDirectory() as name:
                seconds.append(contender(Path(name)))
    return [statistics.median(seconds) for seconds in times]


def by_sbatch(folder: Path) -> float:
    """A bare array of two tasks until both run."""
    script = folder / "job.sh"
    script.write_text("#!/bin/sh\nsleep 30\n")
    began = time.perf_counter()
    command = ["sbatch", "--parsable", "--array=0-1", f"--output={folder}/%a.out", str(script)]
    identity = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    asked = ["squeue", "-h", "-r", "-j", identity, "-o", "%T"]
    while subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split() != ["RUNNING", "RUNNING"]:
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    subprocess.run(["scancel", identity], check=True)
    return seconds


def by_slurm_executor(folder: Path) -> float:
    """The same by the executor."""
    settings = SlurmSettings(stop_seconds=1)
    executor = ServiceExecutor(SlurmService(settings), settings)
    job = Job(f"b-{folder.name}", ("-c", "import time; time.sleep(30)"), folder, replicas=2)
    began = time.perf_counter()
    handles = executor.launch(job)
    while any(status.state is not JobState.RUNNING for status in executor.poll_all(handles)):
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    executor.end(handles, at_once=True)
    return seconds


def slurm(rounds: int) -> float | None:
    """What the executor takes over a bare sbatch; None where Slurm is not installed."""
    if shutil.which("slurmctld") is None and not Path("/usr/sbin/slurmctld").exists():
        return None
    sys.path.insert(0, str(SERVICES))
    from slurm_service import cluster

    with cluster() as running:
        os.environ["SLURM_CONF"] = str(running.conf)
        mine, bare_one = in_turn((by_slurm_executor, by_sbatch), rounds)
    return mine / bare_one


def looks() -> tuple[float, float]:
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


def figures(*, quick: bool) -> Iterator[dict[str, object]]:
    """Each with what was measured and what must be reached."""
    turns = 3 if quick else ROUNDS
    mine, popen = in_turn((ours, bare), turns)
    yield _figure("local: 4 replicas to their first line, seconds over Popen", mine - popen, 0.150, turns)
    quiet, changed = looks()
    yield _figure(f"a round of {MANY} replicas, seconds", quiet, 0.050, 3 * ROUNDS)
    yield _figure(f"a round of {MANY} replicas, one changed, seconds", changed, 0.050, 3 * ROUNDS)
    if (ratio := slurm(turns)) is not None:
        yield _figure("slurm: submitted to running, over sbatch", ratio, 1.1, turns)
    if shutil.which("bwrap") is not None:
        sandbox = BubblewrapSandbox(SandboxSettings(use="bubblewrap"))
        inside, _ = start_seconds(sandbox, rounds=2 * turns)
        yield _figure("bubblewrap: start, seconds", inside, 0.2, 2 * turns)
        candidates = 20 if quick else 100
        ratio = batch_ratio(sandbox, candidates=candidates)
        yield _figure(f"bubblewrap: {candidates} candidates over their own times / processors", ratio, 1.3, 1)


def _figure(name: str, measured: float, target: float, rounds: int) -> dict[str, object]:
    return {"figure": name, "ratio": round(measured, 4), "target": target, "met": measured <= target, "n": rounds}


def main() -> int:
    """Measure, show, compare with what must be reached."""
    parser = argparse.ArgumentParser(description="What the executors add to a bare service.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    for figure in figures(quick=arguments.quick):
        sign = "ok" if figure["met"] else "MISSED"
        line = f"{figure['ratio']:>8}  (at most {figure['target']})  {sign:6}  {figure['figure']}"
        print(json.dumps(figure) if arguments.json else line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
