"""Steps put together from events that come one by one: the parts of a turn, then the results of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_core.traces.model import Content, Observation, Step, ToolCall


@dataclass
class _Turn:
    key: str
    """What the events of one model response have in common."""
    message: Content
    reasoning: str | None
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Observation] = field(default_factory=list)


class Turns:
    """Collects what an agent and its surroundings do, in order."""

    def __init__(self) -> None:
        self.tools: list[Mapping[str, Any]] = []
        self._parts: list[Step | _Turn] = []
        self._calls: dict[str, _Turn] = {}

    def say(self, step: Step) -> None:
        """A system or user message, or an agent's message without calls."""
        self._parts.append(step)

    def act(self, key: str, call: ToolCall, *, message: Content, reasoning: str | None = None) -> None:
        """A call of the agent; calls with the same key, if it is not empty, are one turn with one message."""
        last = self._parts[-1] if self._parts else None
        if not (isinstance(last, _Turn) and key and last.key == key):
            last = _Turn(key, message, reasoning)
            self._parts.append(last)
        last.calls.append(call)
        self._calls[call.id] = last

    def answer(self, seen: Observation) -> None:
        """A result, for the turn that called; alone where nothing called."""
        turn = self._calls.get(seen.call_id)
        if turn is None:
            self._parts.append(Step(source="system", observations=(seen,)))
        else:
            turn.results.append(seen)

    def waiting_call(self) -> str:
        """Id of the last turn's first call without a result; empty where there is none."""
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, _Turn):
            return ""
        answered = {seen.call_id for seen in last.results}
        return next((call.id for call in last.calls if call.id not in answered), "")

    def steps(self) -> list[Step]:
        """All steps so far."""
        return [
            part
            if isinstance(part, Step)
            else Step(
                source="agent",
                message=part.message,
                reasoning=part.reasoning,
                tool_calls=tuple(part.calls),
                observations=tuple(part.results),
            )
            for part in self._parts
        ]
