"""Traces written in two formats that others read: ATIF 1.7 documents, and OpenAI chat lines.

What ATIF has no key for (an error flag, a call that stands in the message, thinking aloud in broken JSON) goes into
`extra.composer` of the step, where our reader finds it and others pass it by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.traces.decode import as_dict, as_str, dumps
from composer_core.traces.messages import to_messages
from composer_core.traces.model import Content, Observation, Step, ToolCall, Trace

ATIF_VERSION = "ATIF-v1.7"


def to_chat(trace: Trace) -> dict[str, Any]:
    """`{"id", "messages", "tools", "reward"}`; the last two where the trace has them."""
    row: dict[str, Any] = {"id": trace.id, "messages": to_messages(trace.steps)}
    if trace.tools:
        row["tools"] = list(trace.tools)
    if trace.reward is not None:
        row["reward"] = trace.reward
    return row


def to_atif(trace: Trace) -> dict[str, Any]:
    """The trace as one ATIF document."""
    version = str(trace.extra.get("version") or "unknown")
    agent: dict[str, Any] = {"name": trace.format or "unknown", "version": version}
    if trace.tools:
        agent["tool_definitions"] = list(trace.tools)
    document: dict[str, Any] = {"schema_version": ATIF_VERSION, "session_id": trace.id, "agent": agent}
    document["steps"] = [_step(step, number) for number, step in enumerate(trace.steps, start=1)]
    return document


FORMATS: Mapping[str, Callable[[Trace], dict[str, Any]]] = {"atif": to_atif, "openai-chat": to_chat}
"""What `traces convert --to` offers."""


def write_lines(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """JSON lines, in place of `path` as one step; how many. Nothing remains of them when `rows` raises.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        count = _write(rows, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror or error}", at=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _write(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(dumps(row) + "\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _step(step: Step, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"step_id": number, "source": step.source, "message": _content(step.message) or ""}
    ours: dict[str, Any] = {}
    if isinstance(step.extra.get("timestamp"), str):
        made["timestamp"] = step.extra["timestamp"]
    if step.reasoning is not None:
        made["reasoning_content"] = step.reasoning
    if step.tool_calls:
        made["tool_calls"] = [_call(call, _call_id(call, number, at)) for at, call in enumerate(step.tool_calls)]
        texts = {_call_id(c, number, at): c.text or c.arguments for at, c in enumerate(step.tool_calls) if _raw(c)}
        ours |= {"arguments": texts} if texts else {}
        ours |= {"in_message": True} if any(call.in_message for call in step.tool_calls) else {}
    if step.observations:
        made["observation"] = {"results": [_result(step, number, at) for at in range(len(step.observations))]}
        flags = [_flags(seen) for seen in step.observations]
        ours |= {"results": flags} if any(flags) else {}
    if step.copied:
        made["is_copied_context"] = True
    if step.message is None and step.source == "agent":
        ours["no_message"] = True
    if step.extra.get("message"):
        ours["message"] = step.extra["message"]
    metrics = _metrics(step)
    return made | ({"metrics": metrics} if metrics else {}) | ({"extra": {"composer": ours}} if ours else {})


def _raw(call: ToolCall) -> bool:
    """Whether the arguments were sent as text: written down, as an object would lose its spelling."""
    return call.text is not None or isinstance(call.arguments, str)


def _call(call: ToolCall, call_id: str) -> dict[str, Any]:
    arguments = {} if isinstance(call.arguments, str) else dict(call.arguments)
    return {"tool_call_id": call_id, "function_name": call.name, "arguments": arguments}


def _call_id(call: ToolCall, number: int, at: int) -> str:
    return call.id or f"call_{number}_{at}"


def _result(step: Step, number: int, at: int) -> dict[str, Any]:
    call, seen = step.answers()[at]
    call_id = seen.call_id or (_call_id(call, number, step.tool_calls.index(call)) if call else "")
    result: dict[str, Any] = {"content": _content(seen.content)}
    return {"source_call_id": call_id, **result} if call_id else result


def _content(content: Content) -> Content:
    """Parts in ATIF's spelling."""
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: dict[str, Any]) -> dict[str, Any]:
    url = as_str(as_dict(part.get("image_url")).get("url"))
    if part.get("type") == "image_url" and url:
        kind = url.removeprefix("data:").partition(";")[0] if url.startswith("data:") else guess_type(url)[0]
        return {"type": "image", "source": {"media_type": kind or "image/png", "path": url}}
    return {"type": "text", "text": part["text"] if isinstance(part.get("text"), str) else dumps(part)}


def _flags(seen: Observation) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "is_error": seen.is_error,
        "exit_code": seen.exit_code,
        "message": seen.extra.get("message"),
    }
    return {key: value for key, value in flags.items() if value is not None}


def _metrics(step: Step) -> dict[str, Any]:
    """Numbers ATIF knows by name, and the tokens; usage of another service under `extra`."""
    metrics: dict[str, Any] = {"extra": dict(step.metrics)} if step.metrics else {}
    tokens = {
        "completion_token_ids": step.token_ids,
        "prompt_token_ids": step.prompt_token_ids,
        "logprobs": step.logprobs,
    }
    return metrics | {key: list(value) for key, value in tokens.items() if value is not None}
