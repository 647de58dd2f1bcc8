"""Chains of Claude Code records: linear sequences of steps while they are being found in the file's tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from composer_core.traces.decode import as_str
from composer_core.traces.index import StepIndex
from composer_core.traces.model import Origin
from composer_core.traces.readers.claude_steps import AGENT, KNOWN_BLOCKS, RESULTS, USER

Block = dict[str, Any]
_RECENT = 1 << 15


class Parts(NamedTuple):
    """What one message holds; found in one pass, as it is asked for every record."""

    uses: Sequence[Block] = ()
    results: Sequence[Block] = ()
    said: bool = False
    """Whether there is anything else: text, thinking, an image."""
    odd: Sequence[str] = ()
    """Types of blocks that nobody knows."""


_SAID = Parts(said=True)


def parts(content: str | list[Any]) -> Parts:
    """The content of a message, sorted."""
    if isinstance(content, str):
        return _SAID
    uses: list[Block] = []
    results: list[Block] = []
    odd: list[str] = []
    said = False
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else "text"
        if kind == "tool_use":
            uses.append(block)
        elif kind == "tool_result":
            results.append(block)
        else:
            said = True
            if not isinstance(kind, str) or kind not in KNOWN_BLOCKS:
                odd.append(kind if isinstance(kind, str) else "(no type)")
    return Parts(uses, results, said, odd)


class Chain:
    """One linear sequence of steps."""

    def __init__(self, trace: str, *, agent: str = "", sidechain: bool = False, origin: Origin | None = None) -> None:
        self.trace_id, self.agent, self.sidechain, self.origin = trace, agent, sidechain, origin
        self.index = StepIndex()
        self.copied = 0
        """Steps at the beginning that another chain holds."""
        self._turn: str | None = None
        """`message.id` of the turn that is being written; None where the last step is no turn."""
        self._open_calls: dict[str, int] = {}
        """Calls that wait for a result -> their step."""

    @property
    def last(self) -> int:
        """Number of the last step; -1 before the first."""
        return len(self.index.kinds) - 1

    def add_turn(self, turn: str, uses: Sequence[Block], offset: int) -> int:
        """An assistant record: a new turn, or more of the one being written; returns its step."""
        if turn == self._turn:
            self.index.add(offset)
        else:
            self.index.begin(AGENT, offset)
            self._turn = turn
        step = self.last
        for block in uses:
            self._open_calls[as_str(block.get("id"))] = step
        return step

    def add_user(self, found: Parts, offset: int) -> int | None:
        """A user record: results for a turn that called, and what the user says; returns the step that had called."""
        caller: int | None = None
        for block in found.results:
            step = self._open_calls.pop(as_str(block.get("tool_use_id")), None)
            caller = step if caller is None else caller
        if caller is not None:
            self.index.add(offset, caller)
        elif found.results and self._turn is not None:
            self.index.add(offset)
        elif found.results:
            self.index.begin(RESULTS, offset)
        if found.said:
            self.index.begin(USER, offset)
            self._turn = None
        return caller

    def branch(self, steps: int, trace: str) -> Chain:
        """A chain that shares the first steps with this one."""
        origin = Origin(kind="branch", trace=self.trace_id, step=steps - 1 if steps else None)
        other = Chain(trace, agent=self.agent, sidechain=self.sidechain, origin=origin)
        other.index, other.copied = self.index.head(steps), steps
        return other


class Recent:
    """Where recent records stand: uuid -> chain and step. Forgets the oldest; never more than twice `_RECENT`."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[Chain, int]] = {}
        self._old: dict[str, tuple[Chain, int]] = {}

    def put(self, uuid: str, place: tuple[Chain, int]) -> None:
        """Remember a record."""
        if len(self._new) >= _RECENT:
            self._old, self._new = self._new, {}
        self._new[uuid] = place

    def get(self, uuid: str) -> tuple[Chain, int] | None:
        """The chain and step of a record; None where it is not there, or too long ago."""
        return self._new.get(uuid) or self._old.get(uuid)


def runs(hashes: array[int]) -> Iterator[int]:
    """How often each value occurs, in buckets so that only a part is ever held as Python integers."""
    buckets = 1 + len(hashes) // 250_000
    for bucket in range(buckets):
        values = sorted(value for value in hashes if value % buckets == bucket)
        length = 0
        for at, value in enumerate(values, start=1):
            length += 1
            if at == len(values) or values[at] != value:
                yield length
                length = 0
