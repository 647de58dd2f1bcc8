"""Inspect logs, version 2: one JSON document, or the zip layout (`.eval`) with one member per sample.

A sample of an epoch is a trace. Of a zip one sample is in memory at a time. A tool message with `error` (old logs:
`tool_error`) is an error. Long texts stand apart under `attachments` and are put back.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_list, as_str, loads
from composer_core.traces.messages import from_messages
from composer_core.traces.model import Step, Trace
from composer_core.traces.readers.base import document, outline
from composer_core.traces.stats import Tally

_ZIP = b"PK\x03\x04"
_ATTACHMENT = "attachment://"


class InspectReader:
    """Logs that inspect-ai writes, `.json` and `.eval`, read without inspect-ai."""

    name: ClassVar[str] = "inspect"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """A zip that ends in .eval, or a document with version, status and eval."""
        if head.startswith(_ZIP):
            return path.suffix == ".eval"
        return any({"version", "status", "eval"} <= set(keys) for keys in outline(head))

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per sample that has messages."""
        for number, sample in enumerate(_samples(path, tally), start=1):
            tally.records += 1
            steps = _steps(sample, number, tally)
            if not steps:
                continue
            yield Trace(
                id=f"{path.stem}#{sample.get('id')}.{sample.get('epoch')}",
                steps=steps,
                format=self.name,
                source=str(path),
                extra={
                    "sample": sample.get("id"),
                    "epoch": sample.get("epoch"),
                    "target": sample.get("target"),
                    "scores": as_dict(sample.get("scores")),
                },
            )


def _samples(path: Path, tally: Tally) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
    values = _members(path, tally) if zipped else as_list(as_dict(document(path, tally)).get("samples"))
    for at, sample in enumerate(values, start=1):
        if isinstance(sample, dict):
            yield sample
        else:
            tally.malformed(at, "sample that is no object")


def _members(path: Path, tally: Tally) -> Iterator[Any]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        tally.malformed(1, f"not a zip file to its end: {error}")
        return
    with archive:
        names = sorted(name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json"))
        for at, name in enumerate(names, start=1):
            try:
                yield loads(archive.read(name))
            except (ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
                tally.malformed(at, f"{name}: {error}")


def _steps(sample: dict[str, Any], number: int, tally: Tally) -> list[Step]:
    attachments = as_dict(sample.get("attachments"))
    good: list[dict[str, Any]] = []
    for at, raw in enumerate(as_list(sample.get("messages")), start=1):
        try:
            message = _message(as_dict(_put_back(raw, attachments)))
            from_messages([message])
        except (ValueError, RecursionError) as error:
            tally.lose(number, "message that cannot be read", f"message {at}: {error}")
            continue
        good.append(message)
    steps = from_messages(good)
    for step in steps:
        tally.assistant_turns += step.source == "agent"
        tally.tool_calls += len(step.tool_calls)
        tally.tool_results += len(step.observations)
        for seen in step.observations:
            if seen.is_error:
                tally.error()
    return steps


def _put_back(value: Any, attachments: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if isinstance(value, list):
        return [_put_back(item, attachments) for item in value]
    if isinstance(value, dict):
        return {key: _put_back(item, attachments) for key, item in value.items()}
    return value


def _message(raw: dict[str, Any]) -> dict[str, Any]:
    """An Inspect message as a chat message."""
    role, content = as_str(raw.get("role")), raw.get("content")
    parts = [part for part in as_list(content) if isinstance(part, dict)]
    message: dict[str, Any] = {"role": role, "content": _content(parts) if isinstance(content, list) else content}
    thoughts = [as_str(part.get("reasoning")) for part in parts if part.get("type") == "reasoning"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if role == "assistant":
        message["tool_calls"] = [_call(call) for call in as_list(raw.get("tool_calls")) if isinstance(call, dict)]
    if role == "tool":
        error = raw.get("error") or raw.get("tool_error")
        message |= {"tool_call_id": as_str(raw.get("tool_call_id")), "is_error": error is not None}
        if raw.get("function"):
            message["name"] = raw["function"]
        if error is not None:
            message["error"] = error
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return call
    return {"id": call.get("id"), "function": {"name": function, "arguments": call.get("arguments")}}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    shown = [_part(part) for part in parts if part.get("type") != "reasoning"]
    if all(part.get("type") == "text" for part in shown):
        return "\n".join(as_str(part.get("text")) for part in shown)
    return shown


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": as_str(part.get("image"))}}
    if part.get("type") == "text":
        return {"type": "text", "text": as_str(part.get("text"))}
    return part
