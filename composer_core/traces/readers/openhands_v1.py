"""Events of OpenHands version 1 (the agent SDK): `{"kind": "ActionEvent", "source", "tool_call", ...}`."""

from __future__ import annotations

from typing import Any

from composer_core.traces.decode import as_dict, as_int, as_list, as_str, dumps
from composer_core.traces.messages import parse_arguments
from composer_core.traces.model import Content, Observation, Step, ToolCall
from composer_core.traces.readers.turns import Turns
from composer_core.traces.stats import Tally

_RESULTS = frozenset({"ObservationEvent", "AgentErrorEvent", "UserRejectObservation"})
_HARNESS = frozenset(
    {"ConversationStateUpdateEvent", "CondensationRequest", "Condensation", "PauseEvent", "TokenEvent"}
    | {"ConversationErrorEvent", "LLMCompletionLogEvent", "StreamingDeltaEvent", "HookExecutionEvent"}
)
KINDS = _RESULTS | _HARNESS | {"SystemPromptEvent", "MessageEvent", "ActionEvent", "CondensationSummaryEvent"}


def take(turns: Turns, event: dict[str, Any], number: int, tally: Tally) -> None:
    """Sort one event in."""
    kind = as_str(event.get("kind"))
    if kind == "ActionEvent":
        _act(turns, event, tally)
    elif kind in _RESULTS:
        _observe(turns, event, kind, tally)
    elif kind == "MessageEvent":
        _say(turns, event, tally)
    elif kind == "SystemPromptEvent":
        turns.say(Step(source="system", message=_content(event.get("system_prompt"))))
        turns.tools += [_tool(tool) for tool in as_list(event.get("tools")) if isinstance(tool, dict)]
    elif kind == "CondensationSummaryEvent":
        turns.say(Step(source="user", message=as_str(event.get("summary"))))
    elif kind in _HARNESS:
        tally.no_turn[kind] += 1
    else:
        tally.unknown(kind or "(no kind)")


def _act(turns: Turns, event: dict[str, Any], tally: Tally) -> None:
    tally.assistant_turns += 1
    tally.tool_calls += 1
    sent = as_dict(event.get("tool_call"))
    function = as_dict(sent.get("function")) or sent
    action = {key: value for key, value in as_dict(event.get("action")).items() if key != "kind"}
    arguments, text = parse_arguments(function.get("arguments", action))
    thinking = event.get("reasoning_content")
    turns.act(
        as_str(event.get("llm_response_id")),
        ToolCall(
            as_str(event.get("tool_call_id")) or as_str(sent.get("id")),
            as_str(event.get("tool_name")) or as_str(function.get("name")),
            arguments,
            text,
        ),
        message=_content(event.get("thought")) or None,
        reasoning=thinking if isinstance(thinking, str) and thinking else None,
    )


def _observe(turns: Turns, event: dict[str, Any], kind: str, tally: Tally) -> None:
    tally.tool_results += 1
    seen = as_dict(event.get("observation"))
    code = as_int(seen.get("exit_code"))
    flag = seen.get("is_error")
    if flag is None:
        flag = seen.get("error")
    failed = kind != "ObservationEvent" or bool(flag) or code not in (None, 0, -1)
    if failed:
        tally.error()
    said = event.get("error") or event.get("rejection_reason")
    turns.answer(
        Observation(
            call_id=as_str(event.get("tool_call_id")),
            content=as_str(said) if said else _content(_output(seen)),
            is_error=failed,
            exit_code=code if code != -1 else None,
            extra={"observation": kind},
        )
    )


def _output(seen: dict[str, Any]) -> Any:
    """The part of an observation that the model reads; each tool has its own name for it."""
    known = next((seen[key] for key in ("content", "output", "message") if seen.get(key) is not None), None)
    return dumps(seen) if known is None else known


def _say(turns: Turns, event: dict[str, Any], tally: Tally) -> None:
    message = as_dict(event.get("llm_message"))
    agent = event.get("source") == "agent" or message.get("role") == "assistant"
    tally.assistant_turns += agent
    thinking = message.get("reasoning_content")
    turns.say(
        Step(
            source="agent" if agent else "user",
            message=_content(message.get("content")),
            reasoning=thinking if agent and isinstance(thinking, str) and thinking else None,
        )
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if "function" in tool else {"type": "function", "function": tool}


def _content(value: Any) -> Content:
    """Text of one part or several; parts as OpenAI has them where there are images."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return as_str(value)
    parts = [part for part in value if isinstance(part, dict)]
    if all(isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return [shown for part in parts for shown in _parts(part)]


def _parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part.get("type") == "image":
        urls = [url for url in as_list(part.get("image_urls")) if isinstance(url, str)]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": part["text"] if isinstance(part.get("text"), str) else dumps(part)}]
