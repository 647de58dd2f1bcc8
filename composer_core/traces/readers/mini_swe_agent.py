"""mini-swe-agent trajectories: chat messages whose action is a fenced bash block, or a tool call in late versions.

The document is ``{"messages": [...], "info": {...}}``, or the bare list. An observation is a message with
`<returncode>`; a code other than 0 is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_list
from composer_core.traces.messages import from_messages, text_of
from composer_core.traces.model import Observation, Step, Trace
from composer_core.traces.readers.base import document, outline
from composer_core.traces.readers.text_actions import with_actions
from composer_core.traces.stats import Tally

_ACTION = re.compile(r"```(?:mswea_bash_command|bash)[ \t]*\n(.*?)\n?```", re.DOTALL)
_RETURNCODE = re.compile(r"<returncode>\s*(-?\d+)\s*</returncode>")
_FENCES = (b"```mswea_bash_command", b"```bash", b"<returncode>")


class MiniSweAgentReader:
    """`*.traj.json` of mini-swe-agent 1.x and 2.x."""

    name: ClassVar[str] = "mini-swe-agent"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """Its own `trajectory_format`, or messages with its fences, in a bare list or beside `info`."""
        objects = outline(head)
        if any(keys.get("trajectory_format", "").startswith("mini-swe-agent") for keys in objects):
            return True
        bare = (
            any({"role", "content"} <= set(keys) for keys in objects)
            and head.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] == b"["
        )
        wrapped = any({"messages", "info"} <= set(keys) for keys in objects) and b"<returncode>" in head
        return (bare or wrapped) and any(fence in head for fence in _FENCES)

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """The one session of the file."""
        value = document(path, tally)
        if value is None:
            return
        info = as_dict(as_dict(value).get("info"))
        messages = value if isinstance(value, list) else as_list(as_dict(value).get("messages"))
        steps = _steps(messages, tally)
        if steps:
            yield Trace(id=path.stem, steps=steps, format=self.name, source=str(path), extra={"info": info})


def _steps(messages: list[Any], tally: Tally) -> list[Step]:
    good: list[dict[str, Any]] = []
    for at, raw in enumerate(messages, start=1):
        tally.records += 1
        message = as_dict(raw)
        if message.get("role") == "exit":  # the harness's note on how it ended
            continue
        try:
            from_messages([message])
        except ValueError as error:
            tally.lose(at, "entry that is no message", str(error))
            continue
        good.append({key: message[key] for key in message if key not in ("extra", "timestamp")})
    steps = with_actions(from_messages(good), action=_action, answers=_answers, observe=_observe)
    steps = [replace(step, observations=tuple(_coded(seen) for seen in step.observations)) for step in steps]
    for step in steps:
        tally.assistant_turns += step.source == "agent"
        tally.tool_calls += len(step.tool_calls)
        tally.tool_results += len(step.observations)
        for seen in step.observations:
            if seen.exit_code not in (None, 0):
                tally.error()
    return steps


def _action(step: Step) -> str | None:
    found = _ACTION.search(text_of(step.message))
    return found[1] if found else None


def _answers(step: Step) -> bool:
    return _RETURNCODE.search(text_of(step.message)) is not None


def _observe(step: Step) -> Observation:
    return Observation(call_id="", content=step.message)


def _coded(seen: Observation) -> Observation:
    """With the exit code that its text gives."""
    found = _RETURNCODE.search(text_of(seen.content))
    return replace(seen, exit_code=int(found[1])) if found else seen
