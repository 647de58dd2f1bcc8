"""Where the records of each step stand in a JSONL file, so that a session of any size needs little memory.

A reader goes through the file once and keeps, per record, its offset (8 bytes); a step's body is read and built when
somebody looks at it. Iterating reads the file in order, one step in memory at a time.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

from composer_core.errors import UsageError
from composer_core.traces.decode import loads
from composer_core.traces.model import Step

Record = dict[str, Any]
Build = Callable[[int, list[Record], bool], Step]
"""From a step's kind (the reader's own number), its records and `copied` to the step."""
_BUFFER = 1 << 18


class StepIndex:
    """Offsets of records, grouped into steps."""

    def __init__(self) -> None:
        self.kinds = bytearray()
        self._offsets = array("Q")
        self._starts = array("Q")
        self._late: dict[int, list[int]] = {}
        """Records that belong to an earlier step but stand behind later ones: a slow parallel call's result."""

    def __len__(self) -> int:
        return len(self.kinds)

    def begin(self, kind: int, offset: int) -> None:
        """A new step, with its first record."""
        self._starts.append(len(self._offsets))
        self._offsets.append(offset)
        self.kinds.append(kind)

    def add(self, offset: int, step: int | None = None) -> None:
        """One more record of a step, by default the last."""
        if step is None or step == len(self.kinds) - 1:
            self._offsets.append(offset)
        else:
            self._late.setdefault(step, []).append(offset)

    def offsets(self, step: int) -> list[int]:
        """Where the records of a step stand, in the file's order."""
        end = self._starts[step + 1] if step + 1 < len(self) else len(self._offsets)
        return [*self._offsets[self._starts[step] : end], *self._late.get(step, ())]

    def head(self, steps: int) -> StepIndex:
        """A copy of the first steps: what a branch shares with its origin."""
        copy = StepIndex()
        copy.kinds = self.kinds[:steps]
        copy._starts = self._starts[:steps]
        end = self._starts[steps] if steps < len(self) else len(self._offsets)
        copy._offsets = self._offsets[:end]
        copy._late = {step: list(late) for step, late in self._late.items() if step < steps}
        return copy


class LazySteps(Sequence[Step]):
    """The steps of an index, built on access."""

    def __init__(self, path: Path, index: StepIndex, build: Build, *, copied: int = 0) -> None:
        self._path, self._index, self._build, self._copied = path, index, build, copied

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> list[Step]: ...

    def __getitem__(self, at: int | slice) -> Step | list[Step]:
        """One step, or several; a slice reads them in one go."""
        numbers = range(len(self))[at]
        with self._path.open("rb") as file:
            if isinstance(numbers, range):
                return [self._step(file, number) for number in numbers]
            return self._step(file, numbers)

    def __iter__(self) -> Iterator[Step]:
        with self._path.open("rb", buffering=_BUFFER) as file:
            for number in range(len(self)):
                yield self._step(file, number)

    def _step(self, file: IO[bytes], number: int) -> Step:
        records = [self._record(file, offset) for offset in self._index.offsets(number)]
        return self._build(self._index.kinds[number], records, number < self._copied)

    def _record(self, file: IO[bytes], offset: int) -> Record:
        file.seek(offset)
        line = file.readline()
        try:
            record = loads(line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UsageError("this file changed while it was being read", at=str(self._path), fix="read it again")
        return record
