"""Runs a program that may not end by itself: with a deadline, a cap on its output, and the end of its process group.

What it may see and touch is not decided here; sandboxes start their own programs with this, and `Unconfined` starts
anything.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

_CHUNK = 65536
_LOOK_SECONDS = 0.05
"""How soon an end is seen of a program whose output something else keeps open."""
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Start:
    """How to start a program."""

    argv: Sequence[str]
    stdin: bytes = b""
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    fds: tuple[int, ...] = ()
    """Descriptors that it inherits."""


@dataclass(frozen=True)
class Ended:
    """How it ended."""

    code: int
    """As a shell gives it: 128 + n after signal n."""
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    seconds: float


def _as_it_is(process: subprocess.Popen[bytes]) -> None:
    """Nothing more to do once it is started."""


def run_bounded(
    start: Start,
    *,
    seconds: float,
    output_bytes: int,
    started: Callable[[subprocess.Popen[bytes]], None] = _as_it_is,
) -> Ended:
    """Run it to its end, or end it: after `seconds`, or when it wrote more than `output_bytes`.

    Its process group is killed when it is over, whatever is left in it. Of the output no more than `output_bytes` is
    kept. `started` is called with the process before anything is read.

    Raises:
        OSError: it cannot be started.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        start.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=start.env,
        cwd=start.cwd,
        pass_fds=start.fds,
        start_new_session=True,
    )
    with process:
        try:
            started(process)
            pump = _Pump(process, start.stdin, output_bytes)
            timed_out = not pump.until_over(begin + seconds)
        finally:
            _kill_group(process)
        code = process.wait()
    return Ended(
        code if code >= 0 else 128 - code,
        bytes(pump.read[1]),
        bytes(pump.read[2]),
        timed_out,
        pump.truncated,
        time.monotonic() - begin,
    )


def in_parallel(function: Callable[[T], U], items: Sequence[T], *, workers: int | None) -> list[U]:
    """`function` of each item, in their order, `workers` threads at a time; one per processor where it is None."""
    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), workers or os.cpu_count() or 1)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:  # also Ctrl-C: what has not begun need not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Its id is its group's, which may outlive it; ids are handed out in a circle, so it is nobody else's this soon.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS says so of a group that holds zombies alone
        process.kill()


class _Pump:
    """Feeds stdin and reads both outputs, so that none of the three pipes can block the program."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, cap: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin = memoryview(stdin)
        self._cap = cap
        self._pipes = {0: process.stdin, 1: process.stdout, 2: process.stderr}
        self.read = {1: bytearray(), 2: bytearray()}
        self.truncated = False

    def until_over(self, deadline: float) -> bool:
        """Whether it ended, or wrote too much, before the deadline."""
        with selectors.DefaultSelector() as selector:
            for number, pipe in self._pipes.items():
                os.set_blocking(pipe.fileno(), False)
                event = selectors.EVENT_WRITE if number == 0 else selectors.EVENT_READ
                selector.register(pipe, event, number)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # asked before the look at the pipes, so that what it wrote last is in them by then
                over = self._process.poll() is not None
                ready = selector.select(0 if over else min(left, _LOOK_SECONDS))
                for key, _ in ready:
                    if not self._move(key.data):
                        selector.unregister(key.fileobj)
                        self._pipes[key.data].close()
                if self.truncated or (over and not ready):
                    return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _move(self, number: int) -> bool:
        """Move what a pipe takes or gives; whether it may take or give more."""
        pipe = self._pipes[number]
        if number == 0:
            try:
                self._stdin = self._stdin[os.write(pipe.fileno(), self._stdin[:_CHUNK]) :]
            except BrokenPipeError:  # it does not want to know the rest
                return False
            return bool(self._stdin)
        data = os.read(pipe.fileno(), _CHUNK)
        room = self._cap - len(self.read[1]) - len(self.read[2])
        self.read[number] += data[:room]
        self.truncated = self.truncated or len(data) > room
        return bool(data)
