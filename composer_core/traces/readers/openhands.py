"""OpenHands events: version 0 (`action`, `observation`, `cause`) and version 1 (`kind`).

A file is an array of events (one run), JSON lines of runs with their events under `history`, or JSON lines of events.
Actions of one model response are one turn. What the model said is taken from the stored response where there is one,
else from the action. Events by which the harness talks to itself (null, recall, state changes) are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.model import Trace
from composer_core.traces.readers.base import objects, outline
from composer_core.traces.readers.openhands_v0 import take as take_v0
from composer_core.traces.readers.openhands_v1 import KINDS
from composer_core.traces.readers.openhands_v1 import take as take_v1
from composer_core.traces.readers.turns import Turns
from composer_core.traces.stats import Tally

_RUN_FACTS = ("instance_id", "test_result", "error")


class OpenHandsReader:
    """Saved trajectories and evaluation outputs of OpenHands."""

    name: ClassVar[str] = "openhands"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """Events with a source and an action or observation, or a known `kind`; or a run's history of them."""
        return any(
            ("source" in keys and ("action" in keys or "observation" in keys) and "id" in keys)
            or (keys.get("kind") in KINDS and "source" in keys)
            or ("instance_id" in keys and ("history" in keys or "test_result" in keys) and "trajectory" not in keys)
            for keys in outline(head)
        )

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per run."""
        loose = Turns()
        for number, item in objects(path, tally):
            if isinstance(item.get("history"), list):
                turns = Turns()
                for event in item["history"]:
                    _take(turns, event, number, tally)
                facts: dict[str, Any] = {key: item[key] for key in _RUN_FACTS if key in item}
                yield from self._trace(path, f"{path.stem}#{number}", turns, facts)
            else:
                _take(loose, item, number, tally)
        yield from self._trace(path, path.stem, loose, {})

    def _trace(self, path: Path, name: str, turns: Turns, extra: dict[str, Any]) -> Iterator[Trace]:
        steps = turns.steps()
        if steps:
            yield Trace(id=name, steps=steps, format=self.name, source=str(path), tools=tuple(turns.tools), extra=extra)


def _take(turns: Turns, event: Any, number: int, tally: Tally) -> None:
    """One event, of either version."""
    if isinstance(event, list):  # old outputs pair an action with its observation
        for part in event:
            _take(turns, part, number, tally)
    elif not isinstance(event, dict):
        tally.lose(number, "event that is no object")
    else:
        tally.records += 1
        (take_v1 if "kind" in event and "action_type" not in event else take_v0)(turns, event, number, tally)
