"""What a replica writes, as whole lines: none twice, none left out, over a service that may fail in between.

A service gives bytes from an offset; only here is it known how far a reader has read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from composer_core.errors import ComposerError, RunFailed
from composer_core.jobs import JobHandle
from composer_executors.service import Service

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
LONGEST_RETRY_S = 30.0


class Lines:
    """Reads on where it stopped."""

    def __init__(self, service: Service, handle: JobHandle) -> None:
        self._service = service
        self._handle = handle
        self._offset = 0
        self._ready: list[str] = []
        self._rest = b""

    def new(self) -> list[str]:
        """Whole lines since the last call.

        Raises:
            ComposerError, OSError: the service failed; the next call gives what was read by then too.
        """
        while chunk := self._service.log(self._handle, self._offset):
            self._offset += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._ready += [_text(line) for line in lines]
        found, self._ready = self._ready, []
        return found

    def rest(self) -> list[str]:
        """The last line where no line break ends it; for when nothing more comes."""
        left, self._rest = self._rest, b""
        return [_text(left)] if left else []


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r")


def stream(
    lines: Lines,
    over: Callable[[], bool],
    *,
    follow: bool,
    last: int | None,
    patience_s: float,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """The last lines so far, then new ones until `over`.

    Args:
        lines: a reader that has read nothing.
        over: whether the replica writes no more; asked before each look, so that what came last is still read.
        follow: whether to wait for new ones.
        last: how many of those so far; None: all.
        patience_s: how long the service may fail at a stretch.
        sleep: waits for so many seconds.

    Raises:
        RunFailed: it failed for longer.
    """
    ended = over()
    so_far = [*_patient(lines, patience_s, sleep), *(lines.rest() if ended else [])]
    yield from so_far if last is None else deque(so_far, maxlen=last)
    pause = FIRST_PAUSE_S
    while follow and not ended:
        sleep(pause)
        ended = over()
        found = _patient(lines, patience_s, sleep)
        yield from found
        pause = FIRST_PAUSE_S if found else min(2 * pause, LONGEST_PAUSE_S)
        if ended:
            yield from lines.rest()


def _patient(lines: Lines, patience_s: float, sleep: Callable[[float], object]) -> list[str]:
    """New lines, asked for again while the service fails."""
    waited, pause = 0.0, 1.0
    while True:
        try:
            return lines.new()
        except (ComposerError, OSError) as error:
            if waited >= patience_s:
                raise RunFailed(f"the log cannot be read any more: {error}") from error
        sleep(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_RETRY_S)
