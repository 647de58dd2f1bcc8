"""How a run is asked to stop: SIGTERM and the first Ctrl-C set a reason that the trainer reads after each step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

INTERRUPTED_TWICE = 130


class StopSignals:
    """While entered, SIGTERM and the first SIGINT only leave a `reason`; the second SIGINT ends the process.

    Handlers can only be set in the main thread; the earlier ones come back on leaving.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._interrupts = 0
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

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                # not SystemExit: a trainer's clean-up, or an `except BaseException` in it, would keep us here
                os._exit(INTERRUPTED_TWICE)
        self.reason = self.reason or f"received {signal.Signals(number).name}"
