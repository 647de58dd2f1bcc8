"""Where runs stand, for `composer-run status`: read from the tail of their files, so that it costs the same however
long a run is.

How a run's state is told (alive, stopped, killed) stands in `directory.py`; curves and samples in `report.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_core.errors import ComposerError
from composer_core.run.directory import LATEST, RunDirectory
from composer_core.run.files import read_jsonl
from composer_core.run.metrics import REWARD, ends
from composer_core.run.report import look_up

TAIL_BYTES = 1 << 16
"""Read from the end of metrics.jsonl: some dozens of steps."""
UNFINISHED = frozenset({"new", "running"})
"""States of a run that may still write."""
UNREADABLE = "unreadable"
"""The state of a run whose files cannot be read."""


@dataclass(frozen=True)
class Status:
    """One run; what `composer-run status --json` prints a list of. Times are seconds, or seconds since 1970."""

    run: str
    path: str
    state: str
    reason: str
    step: int = 0
    """The last logged step; 0 before the first."""
    total_steps: int | None = None
    reward: float | None = None
    """Mean of the last five logged steps."""
    started: float | None = None
    updated: float | None = None
    """When it last wrote an event or a step."""
    step_s: float | None = None
    """Time of one step, the median of the last ones."""
    left_s: float | None = None
    """Until the last step at that pace; None when it does not run."""


def all_runs(root: Path) -> list[RunDirectory]:
    """The runs of a folder, the newest last; empty when there is no such folder."""
    found = [path for path in root.glob("*") if (path / "plan.json").is_file() and path.name != LATEST]
    return [RunDirectory(path) for path in sorted(found, key=lambda path: (_made(path), path.name))]


def status_of_each(directories: Sequence[RunDirectory]) -> list[Status]:
    """Status of many runs; one with a broken file is `unreadable`, with the place, and does not hide the others."""
    found = []
    for directory in directories:
        try:
            found.append(status_of(directory))
        except (ComposerError, ValueError) as error:
            found.append(Status(directory.name, str(directory.path), state=UNREADABLE, reason=str(error)))
    return found


def status_of(directory: RunDirectory) -> Status:
    """Read one run's status; changes nothing.

    Raises:
        RunFailed: a line of its events is not JSON, with its place.
    """
    events, metrics = read_jsonl(directory.events), tail(directory.metrics)
    state = directory.state()
    step = metrics[-1]["step"] if metrics else 0
    total = look_up(directory.read_json("plan.json"), "spec", "train", "steps")
    step_s = seconds_per_step(metrics)
    known = state.state == "running" and step_s is not None and total is not None
    times = [line["time"] for line in [*events, *metrics[-1:]]]
    return Status(
        run=directory.name,
        path=str(directory.path),
        state=state.state,
        reason=state.reason,
        step=step,
        total_steps=total,
        reward=ends(metrics, REWARD)[1],
        started=min(times, default=None),
        updated=max(times, default=None),
        step_s=step_s,
        left_s=max(0, total - step) * step_s if known else None,
    )


def tail(path: Path, *, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The objects in the last `size` bytes of a file of JSON lines; a line cut at either end is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        lines = file.read().split(b"\n")
    found = []
    for line in lines[1 if start else 0 : -1]:  # behind the last line break: nothing, or a line being written
        with suppress(ValueError):  # `report` names a broken line; how far a run is can be told without it
            found.append(json.loads(line))
    return found


def seconds_per_step(metrics: list[dict[str, Any]]) -> float | None:
    """Median over pairs of neighbouring lines, so that the pause before a resume does not count."""
    paces = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(metrics)
        if after["step"] > before["step"]
    ]
    return statistics.median(paces) if paces else None


def _made(path: Path) -> float:
    with suppress(OSError):
        return (path / "plan.json").stat().st_mtime
    return time.time()  # removed since it was listed
