"""The bodies of Claude Code steps: records of one turn (or one user record) to a `Step`."""

from __future__ import annotations

from typing import Any

from composer_core.traces.decode import as_dict, as_list, as_str, dumps
from composer_core.traces.model import Content, Observation, Step, ToolCall

USER, AGENT, RESULTS = range(3)
"""Kinds of step: a user's message, the agent's turn with its results, results without a turn."""
KNOWN_BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document"})
"""Content blocks that are read, or (encrypted thinking) cannot be read by anybody."""
_HARNESS_MODEL = "<synthetic>"
"""What stands as the model of a message that Claude Code wrote itself, for example about an API error."""


def build_step(kind: int, records: list[dict[str, Any]], copied: bool) -> Step:
    """One step from its records, in the file's order."""
    if kind == USER:
        return _user(records[0], copied)
    observations: list[Observation] = []
    turn: list[dict[str, Any]] = []
    for record in records:
        if record.get("type") == "assistant":
            turn.append(record)
        else:
            _results(record, observations)
    if kind == RESULTS:
        return Step(source="system", observations=tuple(observations), copied=copied)
    return _turn(turn, tuple(observations), copied)


def user_text(message: dict[str, Any]) -> Content:
    """What a user record says besides tool results; None where it holds nothing else."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return _content([item for item in as_list(content) if as_dict(item).get("type") != "tool_result"])


def _user(record: dict[str, Any], copied: bool) -> Step:
    extra = {"uuid": record.get("uuid"), "timestamp": record.get("timestamp")}
    for key in ("isMeta", "isCompactSummary"):
        if record.get(key) is True:
            extra[key] = True
    return Step(source="user", message=user_text(as_dict(record.get("message"))), copied=copied, extra=extra)


def _turn(records: list[dict[str, Any]], observations: tuple[Observation, ...], copied: bool) -> Step:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    message: dict[str, Any] = {}
    for record in records:
        message = as_dict(record.get("message"))
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        for block in as_list(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use":
                calls.append(_call(block))
            elif kind == "text":
                texts.append(as_str(block.get("text")))
            elif kind == "thinking":
                thoughts.append(as_str(block.get("thinking")))
            elif isinstance(block, str):
                texts.append(block)
    return Step(
        source="agent",
        message="\n".join(texts) if texts else None,
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
        observations=observations,
        copied=copied,
        synthetic=message.get("model") == _HARNESS_MODEL,
        metrics=as_dict(message.get("usage")),
        extra={
            "uuid": records[0].get("uuid"),
            "timestamp": records[0].get("timestamp"),
            "model": message.get("model"),
            "message_id": message.get("id"),
        },
    )


def _call(block: dict[str, Any]) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        arguments = arguments if isinstance(arguments, str) else dumps(arguments)
    return ToolCall(id=as_str(block.get("id")), name=as_str(block.get("name")), arguments=arguments)


def _results(record: dict[str, Any], into: list[Observation]) -> None:
    for block in as_list(as_dict(record.get("message")).get("content")):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            flag = block.get("is_error")
            content = _result_content(block.get("content"))
            into.append(
                Observation(as_str(block.get("tool_use_id")), content, flag if isinstance(flag, bool) else None)
            )


def _result_content(content: Any) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    return _content(content) if isinstance(content, list) else dumps(content)


def _content(items: list[Any]) -> Content:
    """Text where there is only text, parts where there are images; None for nothing."""
    if not items:
        return None
    parts = [_part(item) for item in items]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(item: Any) -> dict[str, Any]:
    """A content part in OpenAI's spelling."""
    if isinstance(item, str):
        return {"type": "text", "text": item}
    block = as_dict(item)
    if block.get("type") == "text":
        return {"type": "text", "text": as_str(block.get("text"))}
    source = as_dict(block.get("source"))
    if block.get("type") == "image" and source.get("type") == "base64":
        url = f"data:{as_str(source.get('media_type'))};base64,{as_str(source.get('data'))}"
        return {"type": "image_url", "image_url": {"url": url}}
    if block.get("type") == "image" and isinstance(source.get("url"), str):
        return {"type": "image_url", "image_url": {"url": source["url"]}}
    return {"type": "text", "text": dumps(item)}
