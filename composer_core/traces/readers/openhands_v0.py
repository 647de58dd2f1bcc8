"""Events of OpenHands version 0: `{"id", "source", "action", "args"}` and `{"cause", "observation", "content"}`."""

from __future__ import annotations

from typing import Any

from composer_core.traces.decode import as_dict, as_int, as_list, as_str
from composer_core.traces.messages import content, parse_arguments
from composer_core.traces.model import Observation, Step, ToolCall
from composer_core.traces.readers.turns import Turns
from composer_core.traces.stats import Tally

_HARNESS_ACTIONS = frozenset(
    {"recall", "change_agent_state", "null", "condensation", "condensation_request", "initialize", "start", "pause"}
    | {"resume", "stop", "loop_recovery", "task_tracking_state"}
)
_HARNESS_OBSERVATIONS = frozenset({"null", "recall", "agent_state_changed", "agent_condensation", "success"})
_NO_ARGUMENT = frozenset(
    {
        "thought", "translated_ipython_code", "impl_source", "blocking", "is_static", "cwd", "hidden",
        "confirmation_state", "security_risk", "is_confirmed",
    }
)  # fmt: skip
"""Keys of `args` that the harness added to what the model sent."""
_RUNNING = -1
"""Exit code of a command that has not ended."""


def take(turns: Turns, event: dict[str, Any], number: int, tally: Tally) -> None:
    """Sort one event in."""
    if isinstance(event.get("observation"), str):
        _observe(turns, event, tally)
    elif isinstance(event.get("action"), str):
        _act(turns, event, tally)
    else:
        tally.unknown("(no action or observation)")


def _act(turns: Turns, event: dict[str, Any], tally: Tally) -> None:
    action, args, source = event["action"], as_dict(event.get("args")), event.get("source")
    if action == "system":
        turns.say(Step(source="system", message=as_str(args.get("content"))))
        turns.tools += [tool for tool in as_list(args.get("tools")) if isinstance(tool, dict)]
    elif action in _HARNESS_ACTIONS or source == "environment":
        tally.no_turn[action] += 1
    elif source == "user":
        turns.say(Step(source="user", message=_said(event, args)))
    elif action == "message":
        tally.assistant_turns += 1
        turns.say(Step(source="agent", message=_said(event, args)))
    else:
        tally.assistant_turns += 1
        tally.tool_calls += 1
        _call(turns, event, args)


def _said(event: dict[str, Any], args: dict[str, Any]) -> str | list[dict[str, Any]]:
    text = as_str(args.get("content")) or as_str(event.get("message"))
    images = [url for url in as_list(args.get("image_urls")) if isinstance(url, str)]
    if not images:
        return text
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in images)]


def _call(turns: Turns, event: dict[str, Any], args: dict[str, Any]) -> None:
    metadata = as_dict(event.get("tool_call_metadata"))
    response = as_dict(metadata.get("model_response"))
    message = as_dict(as_dict(next(iter(as_list(response.get("choices"))), None)).get("message"))
    call_id = as_str(metadata.get("tool_call_id")) or str(event.get("id"))
    sent = [as_dict(call) for call in as_list(message.get("tool_calls"))]
    function = next((as_dict(call.get("function")) for call in sent if call.get("id") == call_id), {})
    name = as_str(metadata.get("function_name")) or as_str(function.get("name")) or event["action"]
    value = function.get("arguments", {key: args[key] for key in args if key not in _NO_ARGUMENT})
    arguments, text = parse_arguments(value)
    said = content(message.get("content")) if message else args.get("thought")
    thinking = message.get("reasoning_content")
    turns.act(
        as_str(response.get("id")),
        ToolCall(call_id, name, arguments, text),
        message=content(said) or None,
        reasoning=thinking if isinstance(thinking, str) else None,
    )


def _observe(turns: Turns, event: dict[str, Any], tally: Tally) -> None:
    kind = event["observation"]
    if kind in _HARNESS_OBSERVATIONS:
        tally.no_turn[kind] += 1
        return
    tally.tool_results += 1
    extras = as_dict(event.get("extras"))
    code = as_int(as_dict(extras.get("metadata")).get("exit_code"))
    failed = kind == "error" or code not in (None, 0, _RUNNING)
    if failed:
        tally.error()
    call_id = as_str(as_dict(event.get("tool_call_metadata")).get("tool_call_id"))
    if not call_id:  # a call that never ran has no cause either
        call_id = turns.waiting_call() if event.get("cause") is None else str(event["cause"])
    known = kind == "error" or code is not None
    turns.answer(
        Observation(
            call_id=call_id,
            content=content(event.get("content")),
            is_error=failed if known else None,
            exit_code=code if code != _RUNNING else None,
            extra={"observation": kind},
        )
    )
