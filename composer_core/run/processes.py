"""Whether a process that left its id somewhere still runs, which locks of runs and reservations of teachers ask; and in
words, how one ended.
"""

from __future__ import annotations

import os
import signal
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


def death(code: int) -> str:
    """How a process ended, from its exit code as `subprocess` gives it: goes behind "the worker", "rank 1"."""
    if code >= 0:
        return f"ended with exit code {code}"
    guess = " (by the system when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{guess}"
