"""The processes of one worker on one machine: how they start, meet, and end together.

    rank 0    what the executor started. It starts the others, writes the run directory and speaks for all.
    rank r    the same program with RANK=r; all that it says goes to logs/worker-<r>.log.

Rank 0 goes: the kernel ends the others (Linux). Another one goes: rank 0 fails, with that rank's reason, and ends the
rest. A wish to stop is agreed upon at a step boundary (`control.agree`), so Ctrl-C is for rank 0 alone. Where a
launcher such as torchrun has started the processes already, none is started here and their ends are its business.
Numbers that ranks exchange stand in `collectives.py`, their parts of a checkpoint in `session.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.errors import ComposerError, MissingError, RunFailed, Stopped, UsageError
from composer_core.run.control import PARENT_VARIABLE
from composer_core.run.directory import RunDirectory
from composer_core.run.files import read_json, write_json
from composer_core.run.processes import death

RENDEZVOUS_VARIABLE = "COMPOSER_RENDEZVOUS"
"""The file by which the ranks of one worker find each other; set for those that rank 0 started."""
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""Between the end of another rank and that of rank 0, if it does not come to its own: it may wait for the dead."""
LEAVE_SECONDS = 60.0
"""For the others to end by themselves after rank 0 is done."""
SILENCE_MINUTES = 30
"""A rank that lets the others wait longer for it in a collective has failed."""
logger = logging.getLogger(__name__)


def rank() -> int:
    """The number of this process among those of the worker; 0 writes."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """Processes of the worker. Without a number of its own, a process is alone."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def started_by_rank_0() -> bool:
    """Whether this process is one of those that `Ranks.start` starts."""
    return RENDEZVOUS_VARIABLE in os.environ


def log_name() -> str:
    """Of this process's file in `logs/`."""
    return "worker.log" if rank() == 0 else f"worker-{rank()}.log"


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, and the exit code that says so."""

    reason: str
    exit_code: int


class Ranks:
    """The other processes, from the point of view of rank 0; on any other rank it only tells rank 0 what went wrong.

    Args:
        directory: the run.
        give_up: told the failure of another rank when this process cannot come to its own end, and is ended.
    """

    def __init__(self, directory: RunDirectory, give_up: Callable[[Failure], None]) -> None:
        self._directory = directory
        self._give_up = give_up
        self._others: dict[int, subprocess.Popen[bytes]] = {}
        self._added: list[str] = []
        self._over = threading.Event()
        self._ending = threading.Lock()

    def start(self, plan_json: Any, arguments: Sequence[str]) -> None:
        """Start the other processes that the plan wants, unless a launcher has. To be called before torch comes.

        Args:
            plan_json: what plan.json holds.
            arguments: of this program; the others get the same.

        Raises:
            UsageError: a launcher started another number of them.
        """
        count = int(plan_json.get("processes", 1)) if isinstance(plan_json, dict) else 1
        if "RANK" in os.environ:
            _check_count(count)
            return
        if count == 1:
            return
        # never one of an earlier part of the run: who was in it is dead
        rendezvous = self._directory.scratch / f"rendezvous-{os.getpid()}-{time.time_ns()}"
        rendezvous.parent.mkdir(exist_ok=True)
        self._add(_place(0, count) | _machine(count) | {RENDEZVOUS_VARIABLE: str(rendezvous)})
        for number in range(1, count):
            _record(self._directory, number).unlink(missing_ok=True)  # a killed worker's
            self._others[number] = self._start_one(number, count, arguments)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _add(self, variables: Mapping[str, str]) -> None:
        self._added += variables.keys() - os.environ.keys()
        os.environ.update(variables)

    def _start_one(self, number: int, count: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **_place(number, count), PARENT_VARIABLE: str(os.getpid())}
        command = [sys.executable, "-m", "composer_core.run.worker", *arguments]
        with (self._directory.logs / f"worker-{number}.log").open("ab") as log, _without_interrupt():
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def join(self) -> None:
        """Bring the ranks together under torch.distributed: NCCL for tensors on a GPU, gloo for those on the CPU.

        Raises:
            MissingError: the machine has GPUs, and fewer than ranks.
        """
        count = rank_count()
        if count == 1:
            return
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        backend = "gloo"
        if torch.cuda.is_available():
            _take_gpu(torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        # a file and not a port: no other run can have it
        file = os.environ.get(RENDEZVOUS_VARIABLE)
        store = None if file is None else dist.FileStore(file, count)  # type: ignore[attr-defined]
        patience = timedelta(minutes=SILENCE_MINUTES)
        dist.init_process_group(backend, store=store, rank=rank(), world_size=count, timeout=patience)

    def tell(self, failure: Failure) -> None:
        """Leave the reason where rank 0 finds it."""
        if started_by_rank_0() and rank() != 0:
            write_json(_record(self._directory, rank()), {**vars(failure), "time": time.time()})

    def blame(self, error: BaseException) -> Failure | None:
        """The failure of another rank that `error` came from; None where it is this rank's own."""
        if not self._others or isinstance(error, ComposerError):
            return None  # what we raise ourselves says what is wrong; a broken collective is an error of torch's
        raised = time.time()
        for _ in range(round(GRACE_SECONDS / POLL_SECONDS)):
            if (failure := self._failure(before=raised)) is not None:
                return failure
            time.sleep(POLL_SECONDS)
        return None

    def end(self, *, failed: bool) -> None:
        """Have no other process left, and the environment as it was. Waits for them unless the run has failed."""
        with self._ending:  # nobody gives up from here on
            self._over.set()
        if not failed and rank_count() > 1:
            import torch.distributed as dist

            dist.destroy_process_group()
        for number, other in self._others.items():
            try:
                code = other.wait(0 if failed else LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                other.kill()
                code = other.wait()
            if not failed and code not in (0, Stopped.exit_code):
                logger.warning("rank %d %s after its work was done", number, death(code))
        if self._others:
            shutil.rmtree(self._directory.scratch, ignore_errors=True)  # nobody is left who uses it
        for name in self._added:
            os.environ.pop(name, None)
        self._others, self._added = {}, []

    def _watch(self) -> None:
        """Rank 0 may wait for a dead one inside a collective, where no exception and no signal handler gets at it."""
        while not self._over.wait(POLL_SECONDS):
            failure = self._failure(before=time.time())
            if failure is None or self._over.wait(GRACE_SECONDS):
                continue
            with self._ending:
                if self._over.is_set():
                    return
                for other in self._others.values():
                    other.kill()
                try:
                    self._give_up(failure)
                finally:
                    os._exit(failure.exit_code)

    def _failure(self, *, before: float) -> Failure | None:
        """The first failure of another rank: what it told, or how its process ended."""
        told = {number: read_json(_record(self._directory, number)) for number in self._others}
        early = [(record["time"], number) for number, record in told.items() if record and record["time"] <= before]
        if early:
            _, number = min(early)
            log = _log_of(self._directory, number)
            return Failure(f"rank {number}: {told[number]['reason']}{log}", told[number]["exit_code"])
        for number, other in self._others.items():
            code = other.poll()
            if code not in (None, 0, Stopped.exit_code) and told[number] is None:
                saved = f"; last complete checkpoint: {self._directory.newest_checkpoint()}"
                reason = f"rank {number} {death(code)}{saved}{_log_of(self._directory, number)}"
                return Failure(reason, RunFailed.exit_code)
        return None


def _take_gpu(found: int) -> None:
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", rank_count()))
    if found < here:
        raise MissingError(
            f"{here} processes want a GPU each, this machine shows {found}",
            fix="fewer processes; or an empty CUDA_VISIBLE_DEVICES, to train on the CPU",
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _check_count(count: int) -> None:
    if rank_count() != count:
        raise UsageError(
            f"a launcher started {rank_count()} processes (WORLD_SIZE), and the plan is for {count}",
            fix=f"let it start {count}; or start the run without a launcher, it starts its processes itself",
        )


def _place(number: int, count: int) -> dict[str, str]:
    local = {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(count)}
    return {"RANK": str(number), "WORLD_SIZE": str(count), **local}


def _machine(count: int) -> dict[str, str]:
    """What the user has not set."""
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    # torch's C++ writes its warnings over the progress display, and no log of Python's gets them
    defaults["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # nothing listens to the network
    return {name: value for name, value in defaults.items() if name not in os.environ}


@contextmanager
def _without_interrupt() -> Iterator[None]:
    """A process started in here never gets Ctrl-C, from its first instruction on: rank 0 answers for all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _record(directory: RunDirectory, number: int) -> Path:
    return directory.scratch / f"rank{number}.failed.json"


def _log_of(directory: RunDirectory, number: int) -> str:
    return f"\n  its log: {directory.logs.name}/worker-{number}.log"
