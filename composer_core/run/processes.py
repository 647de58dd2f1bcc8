"""Whether a process that left its id somewhere still runs: locks of runs and reservations of teachers ask the same."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(pid: int) -> str:
    """Clock ticks since boot at which a process started: tells it from a later one with the same id. Linux only.

    "" for a process that is over and only waits to be reaped, which the first process of a container may never do.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        state, *others = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in ("Z", "X") else others[18]


def is_running(pid: int, start: str) -> bool:
    """Whether the process of this id that started then (as `process_start` said) still runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process: it is there
    return process_start(pid) == start
