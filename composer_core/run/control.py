"""Why a run ends before its last step: one place that the trainer asks at each step boundary.

    a file STOP in the run directory      its text is the reason
    SIGTERM, the first Ctrl-C             the second Ctrl-C ends the process at once
    the command that started it is gone   Linux only
    limits.hours                          earlier parts of a resumed run included
    a tripwire                            a logged metric that says it is pointless to go on (`tripwires.py`)

The run finishes its step, saves, and ends with exit code 5. Several processes make one answer of theirs by `agree`.
To add a reason that can be read off metrics, write a tripwire; another kind is one more line in `Control.reason`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from composer_core.run.processes import process_start
from composer_core.run.tripwires import Tripwire

INTERRUPTED_TWICE = 130
STOP_FILE = "STOP"
PARENT_VARIABLE = "COMPOSER_PARENT"
"""Set by an executor whose workers must not outlive it: its process id."""
LONGEST_REASON = 400
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """While entered, SIGTERM and the first SIGINT only leave a `reason`; the second SIGINT ends the process.

    Handlers can only be set in the main thread; the earlier ones come back on leaving.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._interrupts = 0
        self._parent = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def follow_parent(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Get this signal when the process in COMPOSER_PARENT dies, so that nothing trains on unnoticed.

        SIGKILL is for a process that has nothing to save alone, and may wait where no handler ever runs.
        """
        wanted = os.environ.get(PARENT_VARIABLE)
        if wanted is None or sys.platform != "linux":
            return
        self._parent = os.getppid()
        # The kernel's own promise; polling would miss the hours that a single call of a trainer can take.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if not process_start(int(wanted)):  # it died before the line above
            self._parent = -1
            os.kill(os.getpid(), by)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                # not SystemExit: a trainer's clean-up, or an `except BaseException` in it, would keep us here
                os._exit(INTERRUPTED_TWICE)
        orphaned = number == signal.SIGTERM and self._parent and os.getppid() != self._parent
        said = "the command that started it is gone" if orphaned else f"received {signal.Signals(number).name}"
        self.reason = self.reason or said


class Control:
    """All reasons of one process; the first one stays."""

    def __init__(
        self,
        signals: StopSignals,
        *,
        stop_file: Path,
        hours: float | None = None,
        spent_s: float = 0.0,
        tripwires: Sequence[Tripwire] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._stop_file = stop_file
        self._hours = hours
        self._clock = clock
        self._start = clock() - spent_s
        self._tripwires = tripwires
        self._reason: str | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a logged step to the tripwires."""
        for tripwire in self._tripwires:
            tripped = tripwire.check(step, metrics)
            if tripped and self._reason is None:
                self._reason = f"{tripped} at step {step}"

    def reason(self) -> str | None:
        """Why this process wants the run to end, or None."""
        if self._reason is None:
            self._reason = self._signals.reason or self._stop_text() or self._out_of_time()
        return self._reason

    def _stop_text(self) -> str | None:
        try:
            text = self._stop_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        return " ".join(text.split())[:LONGEST_REASON] or f"there is a file {STOP_FILE}"

    def _out_of_time(self) -> str | None:
        if self._hours is None or self._clock() - self._start < self._hours * 3600:
            return None
        return f"limits.hours: {self._hours:g} h are over"


def agree(reason: str | None) -> str | None:
    """The reason that the lowest rank has, known to all ranks; None where none has one.

    A collective of all processes under torch.distributed: no rank may go on into the next one alone.
    """
    import torch
    import torch.distributed as dist

    from composer_core.run.collectives import device_of_collectives

    if not (dist.is_available() and dist.is_initialized()):
        return reason
    world, here = dist.get_world_size(), device_of_collectives()
    first = torch.tensor(world if reason is None else dist.get_rank(), device=here)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    source = int(first)
    if source == world:
        return None
    # a text of fixed size instead of an object: objects travel pickled
    size = 4 * LONGEST_REASON
    text = (reason or "").encode()[:size].ljust(size, b"\0")
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(here)
    dist.broadcast(message, src=source)
    return bytes(message.tolist()).rstrip(b"\0").decode("utf-8", "replace")
