"""ATIF trajectories (Harbor's Agent Trajectory Interchange Format, 1.0 to 1.7): one JSON document a session.

The format has no flag for errors. Steps marked `is_copied_context` are context here and nobody's turn. Token ids and
log-probs of one turn that differ in number cannot be trusted: both are dropped, and counted. What `convert.py` wrote
under `extra.composer` is read back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_int, as_list, as_str
from composer_core.traces.messages import content, parse_arguments
from composer_core.traces.model import Content, Observation, Origin, Step, ToolCall, Trace
from composer_core.traces.readers.base import objects, outline
from composer_core.traces.stats import Tally

_SOURCES: dict[str, Literal["system", "user", "agent"]] = {"system": "system", "user": "user", "agent": "agent"}
_TOKEN_KEYS = ("completion_token_ids", "prompt_token_ids", "logprobs")


class AtifReader:
    """`*.trajectory.json` of Harbor and others, or several documents as JSON lines."""

    name: ClassVar[str] = "atif"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """`schema_version` begins with ATIF."""
        return any(keys.get("schema_version", "").startswith("ATIF") for keys in outline(head))

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per document."""
        tally.tool_errors = None
        for number, document in objects(path, tally):
            if not isinstance(document.get("steps"), list):
                tally.lose(number, "document without a list of steps")
                continue
            yield self._trace(path, number, document, tally)

    def _trace(self, path: Path, number: int, document: dict[str, Any], tally: Tally) -> Trace:
        steps = []
        for at, raw in enumerate(document["steps"], start=1):
            tally.records += 1
            step = _step(raw, at, tally)
            if step is not None:
                steps.append(step)
        agent, session = as_dict(document.get("agent")), as_str(document.get("session_id"))
        continues = "continuation_index" in as_dict(agent.get("extra"))
        return Trace(
            id=path.stem if number == 1 else f"{path.stem}#{number}",
            steps=steps,
            format=self.name,
            source=str(path),
            tools=tuple(tool for tool in as_list(agent.get("tool_definitions")) if isinstance(tool, dict)),
            origin=Origin("continuation", session) if continues else None,
            extra={
                "session": session,
                "version": as_str(document.get("schema_version")),
                "agent": agent,
                "continued": as_str(document.get("continued_trajectory_ref")),
                "final_metrics": as_dict(document.get("final_metrics")),
            },
        )


def _step(raw: Any, at: int, tally: Tally) -> Step | None:
    if not isinstance(raw, dict) or as_str(raw.get("source")) not in _SOURCES:
        tally.lose(at, "step without a known source")
        return None
    ours = as_dict(as_dict(raw.get("extra")).get("composer"))
    calls = [_call(call, ours) for call in as_list(raw.get("tool_calls")) if isinstance(call, dict)]
    results = [seen for seen in as_list(as_dict(raw.get("observation")).get("results")) if isinstance(seen, dict)]
    tally.assistant_turns += raw["source"] == "agent"
    tally.tool_calls += len(calls)
    tally.tool_results += len(results)
    metrics = as_dict(raw.get("metrics"))
    thinking = raw.get("reasoning_content")
    said = None if ours.get("no_message") is True else _content(raw.get("message"))
    flags = as_list(ours.get("results"))
    return Step(
        source=_SOURCES[raw["source"]],
        message=said if said or raw["source"] == "agent" or not results else None,
        reasoning=thinking if isinstance(thinking, str) else None,
        tool_calls=tuple(calls),
        observations=tuple(
            _observation(seen, as_dict(flag)) for seen, flag in zip_longest(results, flags[: len(results)])
        ),
        copied=raw.get("is_copied_context") is True,
        prompt_token_ids=_ids(metrics.get("prompt_token_ids")),
        **_tokens(metrics, at, tally),
        metrics={key: value for key, value in metrics.items() if key not in _TOKEN_KEYS},
        extra={key: raw[key] for key in ("step_id", "timestamp", "model_name", "extra") if key in raw}
        | ({"message": ours["message"]} if isinstance(ours.get("message"), dict) else {}),
    )


def _call(call: dict[str, Any], ours: dict[str, Any]) -> ToolCall:
    call_id = as_str(call.get("tool_call_id"))
    arguments, text = parse_arguments(as_dict(ours.get("arguments")).get(call_id, call.get("arguments")))
    name = as_str(call.get("function_name"))
    return ToolCall(call_id, name, arguments, text, in_message=ours.get("in_message") is True)


def _observation(seen: dict[str, Any], flags: dict[str, Any]) -> Observation:
    """A result; one that only refers to a sub-agent's trajectory keeps the reference."""
    references, failed = seen.get("subagent_trajectory_ref"), flags.get("is_error")
    message = {"message": flags["message"]} if isinstance(flags.get("message"), dict) else {}
    return Observation(
        call_id=as_str(seen.get("source_call_id")),
        content=_content(seen.get("content")),
        is_error=failed if isinstance(failed, bool) else None,
        exit_code=as_int(flags.get("exit_code")),
        extra={"subagents": references} if references else message,
    )


def _content(value: Any) -> Content:
    """Content with images as OpenAI has them."""
    found = content(value)
    if not isinstance(found, list):
        return found
    return [
        {"type": "image_url", "image_url": {"url": as_str(as_dict(part.get("source")).get("path"))}}
        if part.get("type") == "image"
        else part
        for part in found
    ]


def _tokens(metrics: dict[str, Any], at: int, tally: Tally) -> dict[str, Any]:
    """Ids and log-probs where they fit each other."""
    ids, logprobs = _ids(metrics.get("completion_token_ids")), _floats(metrics.get("logprobs"))
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        tally.lose(at, "token ids and log-probs differ in number", f"{len(ids)} and {len(logprobs)}")
        return {}
    return {"token_ids": ids, "logprobs": logprobs}


def _ids(value: Any) -> tuple[int, ...] | None:
    fits = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return tuple(value) if fits else None


def _floats(value: Any) -> tuple[float, ...] | None:
    fits = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
    return tuple(float(item) for item in value) if fits else None
