"""A trace as the decisions its agent took: what it had seen, and what it did.

Teachers answer the first, pairs compare with the second. Copied steps (another trace's) and what the harness wrote
in the model's place are history, never a decision.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_core.errors import UsageError
from composer_core.traces.decode import dumps
from composer_core.traces.messages import own_message, step_messages
from composer_core.traces.model import Trace, TraceState

Message = dict[str, Any]
CountTokens = Callable[[Message], int]
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_CHARS_PER_TOKEN = 4


def states(
    trace: Trace,
    *,
    system_prompt: str | None = None,
    strip_thinking: bool = True,
    max_history_tokens: int | None = None,
    count_tokens: CountTokens | None = None,
) -> Iterator[TraceState]:
    """One state per turn the agent took in this trace, in order.

    Args:
        trace: read once, step by step.
        system_prompt: put in front of a trace that does not begin with a system message.
        strip_thinking: leave thinking out of the history; the action keeps its own.
        max_history_tokens: keep the system messages at the beginning and as many of the newest steps as fit, at
            least the last one; None keeps all.
        count_tokens: tokens of a message; default: its characters / 4.

    Raises:
        UsageError: max_history_tokens is below 1.
    """
    if max_history_tokens is not None and max_history_tokens < 1:
        raise UsageError(f"max_history_tokens must be at least 1, got {max_history_tokens}")
    history = _History(max_history_tokens, count_tokens or estimate_tokens)
    turn = -1
    for number, step in enumerate(trace.steps):
        if number == 0 and step.source != "system" and system_prompt is not None:
            history.add([{"role": "system", "content": system_prompt}], system=True)
        if step.source == "agent":
            turn += 1
            if not (step.copied or step.synthetic):
                yield TraceState(f"{trace.id}::{turn:04d}", history.messages(), own_message(step), number)
        messages = step_messages(step, reasoning=not strip_thinking, flags=False)
        history.add([_without_thinking(m) for m in messages] if strip_thinking else messages, step.source == "system")


def estimate_tokens(message: Mapping[str, Any]) -> int:
    """Characters of a message's JSON divided by four, at least 1."""
    return max(1, len(dumps(message)) // _CHARS_PER_TOKEN)


class _History:
    """The messages so far, whole steps of them dropped from the front when they get too many."""

    def __init__(self, limit: int | None, count: CountTokens) -> None:
        self._limit, self._count = limit, count
        self._head: list[Message] = []
        self._steps: deque[tuple[list[Message], int]] = deque()
        self._tokens = 0

    def add(self, messages: list[Message], system: bool) -> None:
        """One step; a system message stays for good where only such came before it."""
        size = sum(map(self._count, messages)) if self._limit is not None else 0
        self._tokens += size
        if system and not self._steps:
            self._head += messages
            return
        self._steps.append((messages, size))
        while self._limit is not None and self._tokens > self._limit and len(self._steps) > 1:
            self._tokens -= self._steps.popleft()[1]

    def messages(self) -> list[Message]:
        """A list of its own; the messages are shared."""
        return [*self._head, *(message for messages, _ in self._steps for message in messages)]


def _without_thinking(message: Message) -> Message:
    """Without thinking that was written into the text of an assistant's message."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or "<think>" not in content:
        return message
    return {**message, "content": _THINKING.sub("", content)}
