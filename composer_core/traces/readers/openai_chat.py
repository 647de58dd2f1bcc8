"""Chat conversations: ``{"messages": [...]}`` as OpenAI has them, and the ShareGPT spelling.

A JSON array, JSON lines, or one document; a bare array of messages is one conversation. The format has no flag for
errors: results that begin with "Error" are counted as such, and their observations stay unmarked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_list, as_str, loads
from composer_core.traces.messages import from_messages, text_of
from composer_core.traces.model import Step, Trace
from composer_core.traces.readers.base import objects, outline
from composer_core.traces.stats import Tally

LISTS = ("messages", "conversations", "conversation")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_REWARDS = ("reward", "score")


class OpenAIChatReader:
    """What everybody has: chat messages, with or without tools."""

    name: ClassVar[str] = "openai-chat"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """A list of messages under one of its names, in an object that is no other format's."""
        others = ("trajectory_format", "trajectory", "history", "schema_version", "samples", "nodes", "eval")
        return any(not keys.keys().isdisjoint(LISTS) and keys.keys().isdisjoint(others) for keys in outline(head))

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per conversation."""
        for number, conversation in objects(path, tally):
            tally.records += 1
            messages = next((conversation[key] for key in LISTS if isinstance(conversation.get(key), list)), None)
            if messages is None:
                tally.lose(number, "conversation without a list of messages")
                continue
            steps = read_messages(messages, number, tally)
            if steps:
                yield self._trace(path, number, conversation, steps)

    def _trace(self, path: Path, number: int, conversation: dict[str, Any], steps: list[Step]) -> Trace:
        reward = next((conversation[key] for key in _REWARDS if isinstance(conversation.get(key), int | float)), None)
        return Trace(
            id=f"{path.stem}#{number}",
            steps=steps,
            format=self.name,
            source=str(path),
            tools=tools(conversation.get("tools")),
            reward=float(reward) if reward is not None else None,
            extra={key: value for key, value in conversation.items() if key not in (*LISTS, "tools")},
        )


def read_messages(messages: list[Any], number: int, tally: Tally) -> list[Step]:
    """Steps of one conversation; messages that are none are counted under its number, and the rest stays."""
    today = [_today(message) for message in messages]
    try:
        steps = from_messages(today)
    except ValueError:  # rare, so that the usual conversation is gone through once
        steps = from_messages(_good(today, number, tally))
    count(steps, tally)
    return steps


def _good(messages: list[Any], number: int, tally: Tally) -> list[dict[str, Any]]:
    """Those that can be read; the others are counted."""
    good = []
    for at, message in enumerate(messages, start=1):
        try:
            from_messages([message])
        except ValueError as error:
            tally.lose(number, "message that cannot be read", f"message {at}: {error}")
            continue
        good.append(message)
    return good


def count(steps: list[Step], tally: Tally) -> None:
    """Turns, calls, results, and results that begin with "Error"."""
    for step in steps:
        tally.assistant_turns += step.source == "agent"
        tally.tool_calls += len(step.tool_calls)
        tally.tool_results += len(step.observations)
        for seen in step.observations:
            if text_of(seen.content).startswith("Error"):
                tally.error()


def tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool definitions in OpenAI form, from a list or its JSON text, wrapped where they stand bare."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            return ()
    found = [tool for tool in as_list(value) if isinstance(tool, dict)]
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in found)


def _today(message: Any) -> Any:
    """A ShareGPT turn as a chat message; others as they are."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    role, value = as_str(message["from"]), message.get("value")
    if role != "function_call":
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": value}
    try:
        called = loads(value) if isinstance(value, str) else value
    except ValueError:
        called = None
    calls = called if isinstance(called, list) else [called]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        # no JSON: what the agent wrote is kept as it is, a call without a name
        calls = [{"name": "", "arguments": value}]
    return {"role": "assistant", "content": None, "tool_calls": calls}
