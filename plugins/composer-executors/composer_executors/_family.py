"""All processes below this one, adopted orphans included: to bury those that are dead, and to end the others.

Used by guard and keeper (`_child.py`), which have one thread and no other children than these. psutil is imported only
where somebody is left, because a user waits for the first line.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

LINUX = sys.platform == "linux"
SWEEP_SECONDS = 0.01


def reaped(child: int) -> int | None:
    """Bury whoever is dead, adopted orphans too; the child's exit code where it was among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def sweep() -> None:
    """Kill all descendants, and look again until none is left: they may go on starting others meanwhile."""
    spared: set[int] = set()
    # on Linux every orphan becomes a child, so that the kernel, and no list that is old by now, says when all are gone
    while not LINUX or _has_children():
        family = [process for process in _family() if process.pid not in spared]
        if not family and (spared or not LINUX):
            return
        for process in family:
            if not _killed(process):
                spared.add(process.pid)
                print(f"cannot end process {process.pid}: it belongs to another user", file=sys.stderr, flush=True)
        time.sleep(SWEEP_SECONDS)
        reaped(0)


def _killed(process: psutil.Process) -> bool:
    """Whether it is over or will be; not where it belongs to another user."""
    from psutil import AccessDenied, NoSuchProcess

    try:
        process.kill()
    except NoSuchProcess:
        pass
    except AccessDenied:
        return False
    return True


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _family() -> list[psutil.Process]:
    import psutil

    me = psutil.Process()
    family = me.children(recursive=True)
    if not LINUX:
        family += [one for one in psutil.process_iter() if one.pid != me.pid and _in_my_session(one.pid)]
    return [process for process in family if not _is_dead(process)]


def _in_my_session(pid: int) -> bool:
    """Below the guard, which leads the session."""
    leader = os.getsid(0)
    try:
        return os.getsid(pid) == leader != pid
    except OSError:
        return False  # it is over, or nothing that we may ask about


def _is_dead(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
