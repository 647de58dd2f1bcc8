"""SWE-agent trajectories (`.traj`): one JSON document with the model's `history` and the environment's `trajectory`.

Steps come from the history, which is what the model saw; the counts come from the trajectory. Demonstrations
(`is_demo`) are context that nobody learns from. The format has no flag for errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_list, as_str
from composer_core.traces.messages import from_messages
from composer_core.traces.model import Step, Trace
from composer_core.traces.readers.base import objects, outline
from composer_core.traces.readers.text_actions import with_actions
from composer_core.traces.stats import Tally

_OURS = ("role", "content", "tool_calls", "tool_call_id")


class SweAgentReader:
    """`.traj` files of SWE-agent 0.x (actions in the text) and 1.x (tool calls)."""

    name: ClassVar[str] = "swe-agent"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """A trajectory, with the environment, history or info that SWE-agent puts beside it."""
        return any(
            "trajectory" in keys and ("environment" in keys or "history" in keys or b'"observation"' in head)
            for keys in outline(head)
        )

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per document."""
        tally.tool_errors = None
        for number, document in objects(path, tally):
            _count(as_list(document.get("trajectory")), tally)
            steps = _history(document, tally) or _trajectory(document)
            if not steps:
                tally.lose(number, "document without history or trajectory")
                continue
            yield Trace(
                id=path.stem if number == 1 else f"{path.stem}#{number}",
                steps=steps,
                format=self.name,
                source=str(path),
                extra={"info": as_dict(document.get("info")), "environment": as_str(document.get("environment"))},
            )


def _count(trajectory: list[Any], tally: Tally) -> None:
    for at, step in enumerate(trajectory, start=1):
        tally.records += 1
        if not isinstance(step, dict):
            tally.lose(at, "trajectory step that is no object")
            continue
        tally.assistant_turns += 1
        tally.tool_calls += bool(as_str(step.get("action")).strip())
        tally.tool_results += "observation" in step


def _history(document: dict[str, Any], tally: Tally) -> list[Step]:
    steps: list[Step] = []
    for at, raw in enumerate(as_list(document.get("history")), start=1):
        try:
            made = from_messages([_message(as_dict(raw))])
        except ValueError as error:
            tally.lose(at, "history entry that is no message", str(error))
            continue
        step = replace(made[0], copied=as_dict(raw).get("is_demo") is True)
        if steps and not step.copied and step.source != "agent" and step.observations:
            steps[-1] = replace(steps[-1], observations=(*steps[-1].observations, *step.observations))
        else:
            steps.append(replace(step, extra={**step.extra, "action": as_str(as_dict(raw).get("action"))}))
    return with_actions(
        steps,
        action=lambda step: as_str(step.extra.get("action")) or None,
        answers=lambda step: not step.copied,
    )


def _message(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a history entry that is a chat message."""
    message = {key: raw[key] for key in _OURS if raw.get(key) is not None}
    ids = as_list(raw.get("tool_call_ids"))
    if ids and "tool_call_id" not in message:
        message["tool_call_id"] = ids[0]
    return message


def _trajectory(document: dict[str, Any]) -> list[Step]:
    """Steps of a document without a history: what the agent answered, and what came back."""
    messages: list[Step] = []
    for raw in as_list(document.get("trajectory")):
        step = as_dict(raw)
        messages.append(
            Step(source="agent", message=as_str(step.get("response")), extra={"action": as_str(step.get("action"))})
        )
        messages.append(Step(source="user", message=as_str(step.get("observation"))))
    return with_actions(
        messages, action=lambda step: as_str(step.extra.get("action")) or None, answers=lambda step: True
    )
