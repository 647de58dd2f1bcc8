"""What `local` starts for a replica: `python -m composer_executors._child composer-run=JOB ORDERS COMMAND ...`.

    launcher ── guard ── keeper ── the command ── whatever that starts

The keeper runs the command, passes wishes on to it, keeps its time limit, ends all that it leaves behind and writes how
it ended. The guard is the keeper's parent and does nothing but wait: whichever of the two is killed, the other ends
the rest. Both adopt orphans, so a process that made a session of its own is found too. Kill both in one moment, and
only the command itself dies with them (it asked the kernel for that).

    SIGTERM, SIGINT   hand the wish on to the command, once: it knows what its own processes need
    SIGUSR1           end everything at once
    SIGHUP            the launcher is gone (the kernel says so): as SIGTERM, and after the grace as SIGUSR1

Linux has all of this. macOS adopts no orphans and says nothing of a parent's death: there the keeper ends what is left
of its session, and asks twice a second who its parent is.

Not here: who starts it and what its files mean to others (`local.py`). The command is started first and the rest is
imported then, because a user waits for the first line.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from composer_executors._family import LINUX, reaped, sweep

if sys.platform == "win32":
    raise ImportError("it needs Linux or macOS")

LOG = "output.log"
"""In the replica's folder: what it writes."""
END = "exit.json"
"""In the replica's folder: how it ended."""
TIMEOUT = "timeout"
CANCELLED = "cancelled"
LAUNCHER_GONE = "the command that started it is gone"
GUARD_KILLED = "its guard was killed"
NOT_STARTED = 127
"""Exit code of a command that could not be started, as a shell has it."""
WISHES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PARENT_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Orders:
    """What guard and keeper need to know. All users of the machine can read it: nothing secret is in it."""

    rank: int
    attempt: int
    folder: str
    log_from: int
    """Bytes that an earlier part of the run left in the log."""
    time_limit_s: float | None
    grace_s: float
    """Between the wish that the command ends and its end by force, where nobody else watches."""
    launcher: int
    """Process id of the one that they must not outlive; 0: they live on their own."""
    nice: int

    def text(self) -> str:
        """As one argument."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Orders:
        """The other way round."""
        return cls(**json.loads(text))


class _Inbox:
    """Signals since the last look. Each wakes a `wait`, so none has to be polled for."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._seen: list[signal.Signals] = []
        for number in (*WISHES, signal.SIGCHLD):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._seen.append(signal.Signals(number))

    def wait(self, until: float | None) -> list[signal.Signals]:
        """What came, at the latest at this time of the monotonic clock; a child's end wakes it with nothing."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        if not LINUX:
            timeout = PARENT_POLL_SECONDS if timeout is None else min(timeout, PARENT_POLL_SECONDS)
        select.select([self._read], [], [], timeout)
        with suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass
        seen, self._seen = self._seen, []
        return seen


def main(argv: Sequence[str]) -> int:
    """Run the command until its end; guard and keeper both come through here."""
    orders, command = Orders.of(argv[1]), list(argv[2:])
    libc = ctypes.CDLL(None, use_errno=True)
    guard = os.getpid()
    keeper = os.fork()
    inbox = _Inbox()
    # the launcher blocked them, so that none came before there was somebody to take it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)
    _prctl(libc, _PR_SET_CHILD_SUBREAPER, 1)
    if keeper:
        if orders.launcher:
            _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGHUP)
        return _guard(orders, keeper, inbox)
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGUSR1)
    os.nice(orders.nice)
    return _Keeper(orders, guard, inbox, libc).run(command)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if LINUX and libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


# -- the guard ---------------------------------------------------------------------------------------------------------


def _guard(orders: Orders, keeper: int, inbox: _Inbox) -> int:
    """Hand signals on to the keeper; end what it left where it was killed."""
    told = False
    wishes: list[signal.Signals] = []
    while (code := reaped(keeper)) is None:
        for wish in wishes:
            if wish is not signal.SIGHUP:
                os.kill(keeper, wish)
                os.kill(keeper, signal.SIGCONT)  # one that was stopped takes nothing else
        # the kernel sends SIGHUP for the end of the launcher's thread too
        if orders.launcher and os.getppid() != orders.launcher and not told:
            told = True
            os.kill(keeper, signal.SIGHUP)
        wishes = inbox.wait(None)
    sweep()
    if not Path(orders.folder, END).is_file():
        from composer_core.run.processes import death

        _write_end(orders, os.getpid(), None, f"its keeper {death(code)}")
    return 0


# -- the keeper --------------------------------------------------------------------------------------------------------


class _Keeper:
    """Runs the command."""

    def __init__(self, orders: Orders, guard: int, inbox: _Inbox, libc: ctypes.CDLL) -> None:
        self._orders = orders
        self._guard = guard
        self._inbox = inbox
        self._libc = libc
        self._child = 0
        self._reason = ""
        self._kill_at: float | None = None
        limit = orders.time_limit_s
        self._deadline = None if limit is None else time.monotonic() + limit

    def run(self, command: Sequence[str]) -> int:
        """Until nothing of it is left."""
        wishes = self._inbox.wait(time.monotonic())  # one that came before the command is a command not to start
        code = None if wishes else self._start(command)
        for wish in wishes:
            self._heed(wish)
        while self._child and (code := reaped(self._child)) is None:
            if os.getppid() != self._guard:
                self._end_all(GUARD_KILLED)
            self._keep_time()
            for wish in self._inbox.wait(self._next()):
                self._heed(wish)
        sweep()
        _write_end(self._orders, self._guard, code, self._reason)
        return 0

    def _start(self, command: Sequence[str]) -> int | None:
        """The command as a child; an exit code where it could not be started."""
        keeper = os.getpid()

        def die_with_the_keeper() -> None:
            _prctl(self._libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:  # it died before the line above
                os._exit(NOT_STARTED)

        try:
            # one thread, so that a function between fork and exec is safe here
            process = subprocess.Popen(command, preexec_fn=die_with_the_keeper)
        except OSError as error:
            print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            self._reason = f"cannot run {command[0]}: {error.strerror}"
            return NOT_STARTED
        process.returncode = 0  # it is waited for below, together with orphans
        self._child = process.pid
        return None

    def _heed(self, wish: signal.Signals) -> None:
        if wish is signal.SIGUSR1:
            self._end_all(CANCELLED if os.getppid() == self._guard else GUARD_KILLED)
        elif wish is signal.SIGHUP:
            self._ask(LAUNCHER_GONE, then_kill=True)
        else:
            self._ask(CANCELLED)

    def _ask(self, reason: str, *, then_kill: bool = False) -> None:
        """Ask the command to end, once; later reasons only tighten the time it has."""
        if not self._reason:
            self._reason = reason
            if self._child:
                os.kill(self._child, signal.SIGTERM)
        if then_kill and self._kill_at is None:
            self._kill_at = time.monotonic() + self._orders.grace_s

    def _end_all(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._child:
            os.kill(self._child, signal.SIGKILL)  # what it started dies in the sweep

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._ask(TIMEOUT, then_kill=True)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._end_all(self._reason)

    def _next(self) -> float | None:
        """When the clock has something to say."""
        return min((moment for moment in (self._deadline, self._kill_at) if moment is not None), default=None)


# -- both --------------------------------------------------------------------------------------------------------------


def _write_end(orders: Orders, guard: int, code: int | None, reason: str) -> None:
    """One atomic file: who reads it finds all or nothing.

    Raises:
        RunFailed: the disk is full; without the file nobody takes the replica for a success.
    """
    from composer_core.run.files import write_json

    killed_by = signal.Signals(-code).name if code is not None and code < 0 else None
    facts = {"id": str(guard), "exit_code": code, "signal": killed_by, "reason": reason, "ended": time.time()}
    write_json(Path(orders.folder, END), facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
