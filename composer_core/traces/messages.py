"""Steps as OpenAI chat messages, and chat messages as steps.

The two are inverse: ids, names, arguments (to the character, where the source had text), results and errors survive
the way there and back. What OpenAI has no key for travels under ours: `reasoning_content` for thinking, `is_error`
and `exit_code` on results; `flags=False` leaves the latter two out for services that refuse unknown keys. Old
spellings (`function_call`, flat tool calls) are read and come back in today's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from composer_core.traces.decode import as_dict, as_list, as_str, dumps, loads
from composer_core.traces.model import Content, Observation, Step, ToolCall

ROLES: dict[str, Literal["system", "user", "agent"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "agent",
}
RESULT_ROLES = ("tool", "function")
_SOURCE_ROLE = {"system": "system", "user": "user", "agent": "assistant"}
_KNOWN_KEYS = frozenset(
    {"role", "content", "tool_calls", "function_call", "reasoning_content", "tool_call_id", "is_error", "exit_code"}
)


def to_messages(steps: Iterable[Step], *, reasoning: bool = True, flags: bool = True) -> list[dict[str, Any]]:
    """Chat messages of steps, in order.

    Args:
        steps: a trace's, or some of them.
        reasoning: keep thinking, as `reasoning_content`.
        flags: keep `is_error` and `exit_code` on results.
    """
    return [message for step in steps for message in step_messages(step, reasoning=reasoning, flags=flags)]


def step_messages(step: Step, *, reasoning: bool = True, flags: bool = True) -> list[dict[str, Any]]:
    """The messages of one step: its own, then its results."""
    own: list[dict[str, Any]] = []
    if step.source == "agent" or step.message is not None or not step.observations:
        own.append(own_message(step, reasoning=reasoning))
    return own + [
        _result_message(seen, call is not None and call.in_message, flags=flags)
        for call, seen in step.answers()
        if seen.call_id or seen.content is not None  # nothing to say: it only refers to a sub-agent's file
    ]


def own_message(step: Step, *, reasoning: bool = True) -> dict[str, Any]:
    """What the step itself says, without the results of its calls."""
    message: dict[str, Any] = {"role": _SOURCE_ROLE[step.source], "content": step.message}
    if reasoning and step.reasoning is not None:
        message["reasoning_content"] = step.reasoning
    calls = [_call_message(call) for call in step.tool_calls if not call.in_message]
    if calls:
        message["tool_calls"] = calls
    return message | as_dict(step.extra.get("message"))


def _call_message(call: ToolCall) -> dict[str, Any]:
    text = call.text
    if text is None:
        text = call.arguments if isinstance(call.arguments, str) else dumps(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _result_message(seen: Observation, in_message: bool, *, flags: bool) -> dict[str, Any]:
    """A tool message, or, for what the environment answered to a call written in the text, a user message."""
    message: dict[str, Any] = {"role": "tool", "tool_call_id": seen.call_id, "content": seen.content}
    if in_message or not seen.call_id:
        message = {"role": "user", "content": seen.content}
    if flags and seen.is_error is not None:
        message["is_error"] = seen.is_error
    if flags and seen.exit_code is not None:
        message["exit_code"] = seen.exit_code
    return message | as_dict(seen.extra.get("message"))


def from_messages(messages: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Steps of chat messages, in order; results go to the agent's step before them.

    Raises:
        ValueError: a message is no object, or its role is none of OpenAI's.
    """
    steps: list[Step] = []
    results: list[Observation] = []
    for message in messages:
        role = as_str(message.get("role")) if isinstance(message, Mapping) else ""
        if role in RESULT_ROLES or (role == "user" and not {"is_error", "exit_code"}.isdisjoint(message)):
            results.append(observation(message))
            continue
        if role not in ROLES:
            raise ValueError(f"no chat message: role {role!r}")
        _attach(steps, results)
        steps.append(step(message))
    _attach(steps, results)
    return steps


def _attach(steps: list[Step], results: list[Observation]) -> None:
    """Hand collected results to the step they follow; a step of their own where no agent's step precedes them."""
    if not results:
        return
    if steps and steps[-1].source == "agent":
        steps[-1] = with_observations(steps[-1], results)
    else:
        steps.append(Step(source="system", observations=tuple(results)))
    results.clear()


def with_observations(step: Step, results: Sequence[Observation]) -> Step:
    """The same step with further observations."""
    return replace(step, observations=(*step.observations, *results))


def step(message: Mapping[str, Any]) -> Step:
    """One system, developer, user or assistant message."""
    role = as_str(message.get("role"))
    rest = _rest(message, ROLES[role], role in ("system", "user", "assistant"))
    thinking = message.get("reasoning_content")
    return Step(
        source=ROLES[role],
        message=content(message.get("content")),
        reasoning=thinking if isinstance(thinking, str) else None,
        tool_calls=tool_calls(message),
        extra={"message": rest} if rest else {},
    )


def observation(message: Mapping[str, Any]) -> Observation:
    """One tool message (or a marked user message: a result that answers no call by id)."""
    call_id, flag, code = message.get("tool_call_id"), message.get("is_error"), message.get("exit_code")
    call_id = call_id if isinstance(call_id, str) else ""
    usual = message.get("role") == ("tool" if call_id else "user")
    rest = _rest(message, "", usual)
    return Observation(
        call_id=call_id,
        content=content(message.get("content")),
        is_error=flag if isinstance(flag, bool) else None,
        exit_code=code if isinstance(code, int) else None,
        extra={"message": rest} if rest else {},
    )


def _rest(message: Mapping[str, Any], source: str, usual_role: bool) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key not in _KNOWN_KEYS}
    return rest if usual_role else {"role": message["role"], **rest}


def tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message, in any of their spellings."""
    calls = as_list(message.get("tool_calls")) or [message.get("function_call")]
    return tuple(tool_call(call) for call in calls if isinstance(call, dict))


def tool_call(call: Mapping[str, Any]) -> ToolCall:
    """One call: ``{"id", "function": {"name", "arguments"}}``, or name and arguments without that envelope."""
    function = as_dict(call.get("function")) or call
    arguments, text = parse_arguments(function.get("arguments"))
    return ToolCall(id=as_str(call.get("id")), name=as_str(function.get("name")), arguments=arguments, text=text)


def parse_arguments(value: Any) -> tuple[Mapping[str, Any] | str, str | None]:
    """Arguments as an object, or as the text that is none; and that text, where the source had text."""
    if isinstance(value, dict):
        return value, None
    if not isinstance(value, str):
        return ({}, None) if value is None else (dumps(value), None)
    try:
        parsed = loads(value)
    except ValueError:
        return value, value
    return (parsed if isinstance(parsed, dict) else value), value


def content(value: Any) -> Content:
    """Message content: text, parts, or nothing; anything else becomes its JSON text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    return dumps(value)


def text_of(value: Content) -> str:
    """The text of a message's content; parts without text are left out."""
    if isinstance(value, list):
        return "\n".join(as_str(part.get("text")) for part in value if part.get("type") in ("text", None))
    return value or ""
