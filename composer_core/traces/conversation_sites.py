"""Where a multi-turn rollout went wrong, told from its conversation.

A backend hands a rollout with tools over as chat messages: the policy's turns, with the calls that could be parsed, and
what came back for each. Here they become a trace, so that `error_sites.py` finds in them what it finds in a recorded
session, of the same kind and with the same context. In such a conversation an exception of a tool is the text of
`{"error": message}`, no call has an id, and a turn whose call could not be parsed is plain text, as TRL does it and our
own loops do after it: those three are undone here, nothing is judged. To undo one habit more, change `_steps`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_core.traces.error_sites import RAISED, SITES_COLUMN, find_sites
from composer_core.traces.messages import from_messages
from composer_core.traces.model import Observation, Step, ToolCall, Trace
from composer_core.traces.tool_format import CLOSE, OPEN

TOOLS_COLUMN = "tools"
"""Column with the definitions that the prompt was rendered with; a hint in the system message needs them."""

_BARE_CALL = re.compile(r'\s*\{\s*"name"\s*:')
"""How a turn begins that is nothing but a call, where a template puts no marks around it (Llama 3)."""
_CALLED = re.compile(r'"name"\s*:\s*"([\w.-]+)"')
_UNPARSED = "call0"
_NO_CALL = "this tool call cannot be parsed"


def rollout_columns(
    row: Mapping[str, Any],
    completion: str | Sequence[Mapping[str, Any]],
    tools: Sequence[str | Mapping[str, Any]],
) -> dict[str, Any]:
    """What a channel's `prepare` sees of a rollout beside its tokens: the data row, and what the rollout adds.

    `error_sites` is added where the conversation shows any, and `tools` where their definitions are given; a row that
    brings one of them keeps its own.

    Args:
        row: of the data, or of the environment.
        completion: a text, or the messages of one rollout.
        tools: names of what the policy could call, or definitions in OpenAI form.
    """
    columns = dict(row)
    definitions = [tool for tool in tools if isinstance(tool, Mapping)]
    if definitions and columns.get(TOOLS_COLUMN) is None:
        columns[TOOLS_COLUMN] = definitions
    if columns.get(SITES_COLUMN) is None and (sites := conversation_sites(completion, tools)):
        columns[SITES_COLUMN] = sites
    return columns


def conversation_sites(
    completion: str | Sequence[Mapping[str, Any]], tools: Sequence[str | Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The error sites of one rollout, as `error_sites.rollout_sites` reads them; none of a text, or without tools."""
    if isinstance(completion, str) or not tools:
        return []
    trace = Trace(id="rollout", steps=_steps(completion), format="rollout", tools=tuple(map(_definition, tools)))
    return [
        {"turn": site.turn, "kind": site.kind, "evidence": site.evidence, "context": dict(site.context)}
        for site in find_sites(trace)
    ]


def _definition(tool: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": tool}} if isinstance(tool, str) else tool


def _steps(completion: Sequence[Mapping[str, Any]]) -> list[Step]:
    """One step per turn of the policy, with what came back for its calls."""
    steps = from_messages(_with_ids(completion))
    return [_with_unparsed_call(step) if step.source == "agent" and not step.tool_calls else step for step in steps]


def _with_ids(completion: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with calls and results joined by ids; those of async tools come last, whatever was called first."""
    waiting: list[tuple[str, str]] = []
    for message in completion:
        if message.get("role") == "tool":
            called = str(message.get("name"))
            found = next((pair for pair in waiting if pair[1] == called), None)
            if found is not None:
                waiting.remove(found)
            yield _result(message, found[0] if found else "")
            continue
        calls = [{**call, "id": f"call{index}"} for index, call in enumerate(message.get("tool_calls") or ())]
        waiting = [(call["id"], _name(call)) for call in calls]
        yield {**message, "tool_calls": calls} if calls else dict(message)


def _name(call: Mapping[str, Any]) -> str:
    """What a call is answered under."""
    return str((call.get("function") or call).get("name", "unknown"))


def _result(message: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """A tool's message; one that reports an exception as the message of that exception."""
    raised = _exception(message.get("content"))
    result = {"role": "tool", "tool_call_id": call_id, "content": message.get("content")}
    return result if raised is None else {**result, "content": raised, "is_error": True, RAISED: True}


def _exception(content: Any) -> str | None:
    """What an exception said, from `str({"error": what it said})`; None for any other result."""
    if not isinstance(content, str) or not content.startswith("{'error': "):
        return None
    try:
        value = ast.literal_eval(content)  # reads literals only
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # a tool's own text that begins alike
        return None
    said = value.get("error") if isinstance(value, dict) and len(value) == 1 else None
    return said if isinstance(said, str) else None


# -- calls that could not be parsed ------------------------------------------------------------------------------------


def _with_unparsed_call(step: Step) -> Step:
    """The step with the call that its text still holds, and what is wrong with that; else the step itself."""
    text = step.message if isinstance(step.message, str) else ""
    answer = text.rpartition("</think>")[2]
    if OPEN in answer:
        parts = answer.split(OPEN)[1:]
    elif _BARE_CALL.match(answer):
        parts = [answer]
    else:
        return step
    body, said = _first_fault(parts, marked=OPEN in answer)
    name = _CALLED.search(body)
    call = ToolCall(id=_UNPARSED, name=name[1] if name else "", arguments=body, in_message=True)
    seen = Observation(_UNPARSED, said, is_error=True, extra={"message": {RAISED: True}})
    return replace(step, tool_calls=(call,), observations=(seen,))


def _first_fault(parts: Sequence[str], *, marked: bool) -> tuple[str, str]:
    """The first call that cannot be parsed, and why; where each could be, the last one and what is behind it."""
    body = ""
    for part in parts:
        body, closed, _ = part.partition(CLOSE)
        body = body.strip()
        if said := _fault(body, closed=bool(closed) or not marked):
            return body, said
    return body, f"this tool call is not carried out: nothing may follow {CLOSE}" if marked else _NO_CALL


def _fault(body: str, *, closed: bool) -> str:
    """Why a call cannot be parsed, in words that the core's classifier takes for what they are; "" where it can."""
    if not closed:
        return f"malformed JSON in a tool call: it does not end with {CLOSE}"
    if not body.startswith("{"):
        return _NO_CALL
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"malformed JSON in a tool call: {error}"
    if not isinstance(call.get("name"), str):
        return 'malformed JSON in a tool call: it has no "name"'
    if isinstance(call.get("arguments", {}), dict | None):
        return ""
    return 'malformed JSON in a tool call: its arguments must be an object, as in {"name": ..., "arguments": {...}}'
