"""The service `local`: each replica is a process of this machine, under a guard and a keeper (`_child.py`).

A handle's id is the guard's process id, with its start time against ids that are used again. The replica's folder holds
`output.log` and, once it is over, `exit.json`, which says how it ended; any process of this machine can read them, and
there is nothing else to ask. Secrets go into the environment of the process and nowhere else.
The command alone is asked to end (SIGTERM): it knows what its own processes need. Everything is ended by `kill`, at the
end of the command, and where launcher, guard or keeper are killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import RunFailed, UsageError
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.control import PARENT_VARIABLE
from composer_core.run.doctor import Finding
from composer_core.run.files import read_json
from composer_core.run.processes import death
from composer_executors._child import CANCELLED, END, LOG, WISHES, Orders
from composer_executors.executor import ServiceExecutor
from composer_executors.local_doctor import probe, started
from composer_executors.service import LABEL, Replica

if TYPE_CHECKING:
    from composer_executors.settings import LocalSettings

KILL_SECONDS = 10.0
"""How long `kill` waits for the kernel to be done with a replica's processes."""
POLL_SECONDS = 0.01
CHUNK_BYTES = 1 << 20
_PROGRAM = "composer_executors._child"


class LocalService:
    """Implements `Service`. Replicas that are not detached end with the process that submits them, however it ends."""

    name = "local"

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self._started: list[subprocess.Popen[bytes]] = []
        """To be buried by `poll`, and known to nobody else: a process that is over stays in the table until then."""

    def render(self, replicas: Sequence[Replica]) -> Mapping[str, str]:
        """The command line of each replica, with what is added to the environment."""
        return {f"rank-{replica.rank}": self._shown(replica) for replica in replicas}

    def submit(self, replicas: Sequence[Replica]) -> Iterator[JobHandle]:
        """Start them.

        Raises:
            UsageError: the command's program is not there.
            RunFailed: the machine can start no more processes.
        """
        for replica in replicas:
            yield self._start(replica)

    def poll(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """From the file that the keeper leaves, else from the list of processes."""
        self._started = [process for process in self._started if process.poll() is None]
        return [_status(handle) for handle in handles]

    def log(self, handle: JobHandle, offset: int) -> bytes:
        """At most a megabyte at once."""
        try:
            with (_folder(handle) / LOG).open("rb") as file:
                file.seek(int(handle.facts["log_from"]) + offset)
                return file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""

    def terminate(self, handle: JobHandle) -> None:
        """SIGTERM to the command, by way of guard and keeper."""
        _be_on_its_machine(handle)
        _send(handle, signal.SIGTERM)

    def kill(self, handle: JobHandle) -> None:
        """End all its processes; those that made sessions of their own, too."""
        _be_on_its_machine(handle)
        until = time.monotonic() + KILL_SECONDS
        while _send(handle, signal.SIGUSR1) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def remains(self, handle: JobHandle) -> str:
        """Guard or keeper, which stay until the last process is gone."""
        if not _is_here(handle):
            return f"a process on {handle.facts['host']}, which cannot be seen from {socket.gethostname()}"
        alive = _alive(handle)
        return f"process {alive[0]} on {socket.gethostname()}, with what it started" if alive else ""

    def leftovers(self, job: str | None) -> list[JobHandle]:
        """From the command lines of this user's processes."""
        found = {}
        for _, guard, name, orders in _keepers():
            if job in (None, name):
                found[guard] = _handle(guard, name, orders)
        return [found[guard] for guard in sorted(found)]

    def examine(self) -> Iterable[Finding]:
        """One replica that leaves a process behind."""
        yield probe(self, self._settings.python or sys.executable)

    def _shown(self, replica: Replica) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in {**self._threads(), **replica.env}.items()]
        secrets = [f"{name}=..." for name in replica.secrets]
        return " ".join([*variables, *secrets, shlex.join(replica.command)])

    def _threads(self) -> dict[str, str]:
        threads = self._settings.threads
        return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}

    def _start(self, replica: Replica) -> JobHandle:
        environment = {**os.environ, **self._threads(), **replica.env, **replica.secrets}
        environment.pop(PARENT_VARIABLE, None)  # of a run that started us: our replica has another parent
        if shutil.which(replica.command[0], path=environment.get("PATH")) is None:
            raise UsageError(f"cannot run {replica.command[0]}: no such program", at="executor.python")
        orders = self._orders(replica)
        (replica.folder / END).unlink(missing_ok=True)  # of an earlier part of the run
        command = [sys.executable, "-m", _PROGRAM, f"{LABEL}={replica.job}", orders.text(), *replica.command]
        with (replica.folder / LOG).open("ab") as log, _wishes_wait():
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunFailed(f"cannot start a process: {error.strerror}", at="executor local") from error
        self._started.append(process)
        return _handle(process.pid, replica.job, orders)

    def _orders(self, replica: Replica) -> Orders:
        folder = replica.folder.absolute()
        log = folder / LOG
        return Orders(
            rank=replica.rank,
            attempt=replica.attempt,
            folder=str(folder),
            log_from=log.stat().st_size if log.is_file() else 0,
            time_limit_s=replica.time_limit_s,
            grace_s=self._settings.stop_seconds,
            launcher=0 if replica.detached else os.getpid(),
            nice=self._settings.nice,
        )


def local_executor(settings: LocalSettings) -> ServiceExecutor:
    """What `plugin.py` names."""
    return ServiceExecutor(LocalService(settings), settings)


@contextmanager
def _wishes_wait() -> Iterator[None]:
    """Signals that come before the guard can take them are kept for it: a child inherits what is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- handles -----------------------------------------------------------------------------------------------------------


def _handle(guard: int, job: str, orders: Orders) -> JobHandle:
    facts = {
        "job": job,
        "start": started(guard),
        "host": socket.gethostname(),
        "folder": orders.folder,
        "log_from": str(orders.log_from),
    }
    return JobHandle(LocalService.name, orders.rank, str(guard), orders.attempt, facts)


def _folder(handle: JobHandle) -> Path:
    return Path(handle.facts["folder"])


def _is_here(handle: JobHandle) -> bool:
    return handle.facts["host"] == socket.gethostname()


def _be_on_its_machine(handle: JobHandle) -> None:
    if not _is_here(handle):
        host = handle.facts["host"]
        raise RunFailed(f"rank {handle.rank} runs on {host}, not on this machine", fix=f"give the command on {host}")


def _alive(handle: JobHandle) -> list[int]:
    """The guard; or the keeper, where the guard was killed and the keeper is not done yet."""
    guard = int(handle.id)
    start = started(guard)
    if start and start == handle.facts["start"]:
        return [guard]
    if start:
        return []  # the id is another's by now
    ours = (guard, handle.facts["folder"], handle.attempt)
    return [pid for pid, leader, _, orders in _keepers() if (leader, orders.folder, orders.attempt) == ours]


def _send(handle: JobHandle, wish: signal.Signals) -> bool:
    """To whoever minds the replica; whether there was somebody."""
    alive = _alive(handle)
    for pid in alive:
        try:
            os.kill(pid, wish)
            os.kill(pid, signal.SIGCONT)  # one that was stopped takes nothing else
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise RunFailed(f"process {pid} of rank {handle.rank} belongs to another user") from error
    return bool(alive)


# -- how it stands -----------------------------------------------------------------------------------------------------


def _status(handle: JobHandle) -> JobStatus:
    """RUNNING until guard and keeper are gone, so that nothing remains of a replica that is over."""
    here = _is_here(handle)
    if here and _alive(handle):
        return JobStatus(JobState.RUNNING)
    facts = read_json(_folder(handle) / END)
    if facts is not None and facts["id"] == handle.id:
        return _ended(facts)
    if not here:
        return JobStatus(JobState.UNKNOWN, reason=f"it was started on {handle.facts['host']}, not on this machine")
    return JobStatus(JobState.FAILED, reason="it was killed together with its guard, so nobody wrote how it ended")


def _ended(facts: Mapping[str, Any]) -> JobStatus:
    code, reason = facts["exit_code"], facts["reason"]
    if code == 0:
        return JobStatus(JobState.SUCCEEDED, 0)
    if reason == CANCELLED:
        return JobStatus(JobState.CANCELLED, code, reason)
    return JobStatus(JobState.FAILED, code, reason or (death(code) if facts["signal"] else ""))


# -- processes of this machine -----------------------------------------------------------------------------------------


def _keepers() -> Iterator[tuple[int, int, str, Orders]]:
    """Guards and keepers of this user: process id, the guard's (it leads the session of both), job and orders."""
    import psutil

    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if line[1:3] != ["-m", _PROGRAM] or process.uids().real != os.getuid():
                continue
            yield process.pid, os.getsid(process.pid), line[3].removeprefix(f"{LABEL}="), Orders.of(line[4])
        except (psutil.Error, OSError, ValueError, TypeError, IndexError):
            continue  # it is over meanwhile, or not as we start them
