"""The log files of a run as lines: the last ones, and new ones as they come.

Every process of the worker writes one file under `logs/` (`worker.log`, `worker-1.log`, ...); where there are
several, a header says whose lines follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from composer_core.run.directory import RunDirectory
from composer_core.run.status import UNFINISHED

POLL_SECONDS = 0.3


class LogReader:
    """Reads what was added to a run's log files since the last look."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._shown: Path | None = None

    def files(self) -> list[Path]:
        """The log files there are, by name."""
        return sorted(path for path in self._directory.logs.rglob("*") if path.is_file())

    def last(self, count: int) -> Iterator[str]:
        """The last `count` lines of each file."""
        for path in self.files():
            lines = self._new_lines(path, whole=not self._over())
            yield from self._headed(path, lines[-count:] if count else [])

    def follow(self) -> Iterator[str]:
        """New lines until the run is over; what it wrote last is still read."""
        while True:
            over = self._over()  # asked before reading, or the end would be lost
            for path in self.files():
                yield from self._headed(path, self._new_lines(path, whole=not over))
            if over:
                return
            time.sleep(POLL_SECONDS)

    def _over(self) -> bool:
        return self._directory.state().state not in UNFINISHED

    def _new_lines(self, path: Path, *, whole: bool) -> list[str]:
        """Lines behind those read before; with `whole`, one without its line break waits for the next look."""
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            text = file.read()
        if whole:
            text = text[: text.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(text)
        return text.decode("utf-8", "replace").splitlines()

    def _headed(self, path: Path, lines: list[str]) -> Iterator[str]:
        if lines and path != self._shown and len(self.files()) > 1:
            yield f"==> {path.relative_to(self._directory.logs)} <=="
        if lines:
            self._shown = path
        yield from lines
