"""Ctrl-C and SIGTERM while a command waits for its replicas: wishes to carry out, not the end of the command."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Wishes:
    """While entered, the first SIGINT and SIGTERM ask to stop, the second SIGINT to end at once.

    Handlers can only be set in the main thread; in another one, nothing is caught.
    """

    def __init__(self) -> None:
        self.stop = False
        self.end = False
        self._interrupts = 0
        self._changed = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Sleep; True at once when a wish arrives."""
        arrived = self._changed.wait(seconds)
        self._changed.clear()
        return arrived

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        self.stop = True
        self.end = self._interrupts >= 2
        self._changed.set()
