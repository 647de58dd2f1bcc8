"""Codex CLI rollouts: JSON lines of the items that the model exchanged, in the envelope of today or bare as in 2025.

    {"timestamp": ..., "type": "response_item", "payload": {"type": "function_call", ...}}      today
    {"type": "function_call", ...}                                                             before 0.32

A turn is what stands between two results or messages of the user: reasoning, messages and calls. Only response items
are read: `event_msg` records repeat them for the screen. The flag of an error is `metadata.exit_code` in an output
that is JSON in a string; newer outputs say it in words, which gives an exit code but counts as no flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_int, as_list, as_str, dumps, loads
from composer_core.traces.index import LazySteps, StepIndex
from composer_core.traces.messages import parse_arguments
from composer_core.traces.model import Content, Observation, Origin, Step, ToolCall, Trace
from composer_core.traces.readers.base import lines, outline
from composer_core.traces.stats import Tally

_ENVELOPES = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})
_SCREEN = _ENVELOPES - {"response_item", "compacted"}
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", "web_search_call", "tool_search_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})
_ITEMS = _CALLS | _OUTPUTS | {"message", "reasoning"}
_NOTHING = frozenset({"ghost_snapshot", "compaction", "context_compaction"})
_EXITED = re.compile(r"^Process exited with code (-?\d+)$", re.MULTILINE)
_SAID, _AGENT, _RESULTS = range(3)


class CodexReader:
    """`~/.codex/sessions/**/rollout-*.jsonl`, both layouts."""

    name: ClassVar[str] = "codex"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """An envelope of Codex, a state record, or a bare response item with a call id of its own kind."""
        return any(
            ("payload" in keys and keys.get("type") in _ENVELOPES)
            or "record_type" in keys
            or ("call_id" in keys and keys.get("type") in _CALLS | _OUTPUTS)
            or ("instructions" in keys and {"id", "timestamp"} <= set(keys))
            for keys in outline(head)
        )

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """The session, and a further trace from each compaction on: the model then saw the summary only."""
        chains = [_Chain()]
        meta: dict[str, Any] = {}
        for number, offset, record in lines(path, tally):
            tally.records += 1
            if record.get("type") == "session_meta" or ("instructions" in record and "type" not in record):
                meta = meta or as_dict(record.get("payload")) or record
            elif record.get("type") == "compacted":
                chains.append(_Chain())
                chains[-1].index.begin(_SAID, offset)
            else:
                _take(chains[-1], number, offset, record, tally)
        filled = [chain for chain in chains if len(chain.index)]
        for at, chain in enumerate(filled):
            before = f"{path.stem}#{at}" if at > 1 else path.stem
            yield Trace(
                id=f"{path.stem}#{at + 1}" if at else path.stem,
                steps=LazySteps(path, chain.index, _build),
                format=self.name,
                source=str(path),
                origin=Origin("continuation", before, len(filled[at - 1].index) - 1) if at else None,
                extra={"session": as_str(meta.get("id")), "version": as_str(meta.get("cli_version"))},
            )


class _Chain:
    """The steps between two compactions while they are being found."""

    def __init__(self) -> None:
        self.index = StepIndex()
        self.answered = True
        """Whether the last step is over: the next thing the agent does begins a turn."""
        self.open_calls: dict[str, int] = {}


def _take(chain: _Chain, number: int, offset: int, record: dict[str, Any], tally: Tally) -> None:
    item, kind = _item(record)
    if kind in _CALLS or kind == "reasoning" or (kind == "message" and item.get("role") == "assistant"):
        _count_agent(item, kind, tally)
        if chain.answered:
            chain.index.begin(_AGENT, offset)
            chain.answered = False
        else:
            chain.index.add(offset)
        if kind in _CALLS:
            chain.open_calls[_call_id(item)] = len(chain.index) - 1
    elif kind in _OUTPUTS:
        tally.tool_results += 1
        if _exit_flag(item.get("output")):
            tally.error()
        step = chain.open_calls.pop(_call_id(item), None)
        if step is None:
            chain.index.begin(_RESULTS, offset)
        else:
            chain.index.add(offset, step)
        chain.answered = True
    elif kind == "message":
        chain.index.begin(_SAID, offset)
        chain.answered = True
    elif record.get("type") == "response_item" and not item:
        tally.lose(number, "response item without a payload")
    elif kind in _SCREEN | _NOTHING or "record_type" in record:
        tally.no_turn[kind or "state"] += 1
    else:
        tally.unknown(kind or "(no type)")


def _count_agent(item: dict[str, Any], kind: str, tally: Tally) -> None:
    tally.tool_calls += kind in _CALLS
    tally.assistant_turns += kind == "message"


def _item(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The response item of a record, with its type; for other records the record and its own type."""
    kind = as_str(record.get("type"))
    if kind == "response_item":
        payload = as_dict(record.get("payload"))
        return payload, as_str(payload.get("type"))
    return record, kind


def _call_id(item: dict[str, Any]) -> str:
    return as_str(item.get("call_id")) or as_str(item.get("id"))


def _exit_flag(output: Any) -> bool:
    code = _exit_code(output)[0]
    return code is not None and code != 0


def _exit_code(output: Any) -> tuple[int | None, str | None]:
    """`metadata.exit_code` and `output` of a JSON text; None where the output is not of that kind."""
    if not isinstance(output, str) or not output.startswith("{"):
        return None, None
    try:
        parsed = as_dict(loads(output))
    except ValueError:
        return None, None
    text = parsed.get("output")
    return as_int(as_dict(parsed.get("metadata")).get("exit_code")), text if isinstance(text, str) else None


# -- bodies ------------------------------------------------------------------------------------------------------------


def _build(kind: int, records: list[dict[str, Any]], copied: bool) -> Step:
    items = [_item(record) for record in records]
    if kind == _SAID:
        return _said(items[0][0], copied)
    observations = tuple(_observation(item) for item, name in items if name in _OUTPUTS)
    if kind == _RESULTS:
        return Step(source="system", observations=observations, copied=copied)
    texts = [_text(item.get("content")) for item, name in items if name == "message"]
    thoughts = [thought for item, name in items if name == "reasoning" for thought in _thoughts(item)]
    return Step(
        source="agent",
        message="\n".join(texts) if texts else None,
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(_call(item, name) for item, name in items if name in _CALLS),
        observations=observations,
        copied=copied,
        extra={"timestamp": records[0].get("timestamp")},
    )


def _said(item: dict[str, Any], copied: bool) -> Step:
    if item.get("type") == "compacted":
        return Step(source="user", message=as_str(as_dict(item.get("payload")).get("message")), copied=copied)
    role = item.get("role")
    extra = {"message": {"role": "developer"}} if role == "developer" else {}
    source: Any = "user" if role == "user" else "system"
    return Step(source=source, message=_content(item.get("content")), copied=copied, extra=extra)


def _call(item: dict[str, Any], kind: str) -> ToolCall:
    value = item.get("arguments")
    if kind == "custom_tool_call":  # free text by design: wrapped, so that it stays an argument
        value = {"input": item.get("input")}
    elif kind == "local_shell_call" or (value is None and isinstance(item.get("action"), dict)):
        value = item.get("action")
    arguments, text = parse_arguments(value)
    return ToolCall(id=_call_id(item), name=as_str(item.get("name")) or kind, arguments=arguments, text=text)


def _observation(item: dict[str, Any]) -> Observation:
    output = item.get("output")
    if isinstance(output, dict):  # {"content": ..., "success": ...}
        success = output.get("success")
        flag = not success if isinstance(success, bool) else None
        return Observation(call_id=_call_id(item), content=_content(output.get("content")), is_error=flag)
    if isinstance(output, list):
        return Observation(call_id=_call_id(item), content=_content(output))
    code, text = _exit_code(output)
    if code is not None:
        said = as_str(output) if text is None else text
        return Observation(call_id=_call_id(item), content=said, is_error=code != 0, exit_code=code)
    said = as_str(output)
    exited = _EXITED.search(said)
    return Observation(call_id=_call_id(item), content=said, exit_code=int(exited[1]) if exited else None)


def _thoughts(item: dict[str, Any]) -> list[str]:
    """Reasoning in plain text, or its summary; what is encrypted stays with its service."""
    return [
        as_str(part.get("text"))
        for part in as_list(item.get("content")) or as_list(item.get("summary"))
        if isinstance(part, dict)
    ]


def _text(content: Any) -> str:
    said = _content(content)
    return said if isinstance(said, str) else dumps(said)


def _content(content: Any) -> Content:
    if isinstance(content, str):
        return content
    parts = [part for part in as_list(content) if isinstance(part, dict)]
    if all(isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return [_part(part) for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["text"] if isinstance(part.get("text"), str) else dumps(part)}
