"""`composer-run doctor --executor local`: whether processes start here, and end with all that they started."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from composer_core.errors import ComposerError
from composer_core.jobs import JobHandle, JobState
from composer_core.run.doctor import Finding, Level
from composer_core.run.processes import process_start
from composer_executors.service import Replica, Service

LEAVES_ONE = """
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleeper, start_new_session=True).pid)
"""
"""Starts a process in a session of its own, says its id, and is done."""
PATIENCE_SECONDS = 30.0
_NAME = "local processes"


def probe(service: Service, python: str) -> Finding:
    """Run a replica for a moment."""
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica(f"doctor-{os.getpid()}", 0, 1, 0, (python, "-c", LEAVES_ONE), {}, Path(folder), None, None)
        try:
            (handle,) = service.submit([replica])
        except ComposerError as error:
            return Finding(_NAME, Level.FAIL, str(error))
        try:
            return _look(service, handle)
        finally:
            service.kill(handle)


def _look(service: Service, handle: JobHandle) -> Finding:
    until = time.monotonic() + PATIENCE_SECONDS
    while not (status := service.poll([handle])[0]).state.over:
        if time.monotonic() > until:
            return Finding(_NAME, Level.FAIL, f"a program that does nothing ran for {PATIENCE_SECONDS:g} s")
        time.sleep(0.01)
    said = service.log(handle, 0).decode("utf-8", "replace").strip()
    if status.state is not JobState.SUCCEEDED:
        return Finding(_NAME, Level.FAIL, f"a program that does nothing {status.state}: {status.reason or said}")
    if started(int(said)):
        return Finding(_NAME, Level.WARN, f"process {said} outlived the one that started it", fix=f"kill {said}")
    return Finding(_NAME, Level.OK, "one was started, left another behind, and both are gone")


def started(pid: int) -> str:
    """When a process started, in the system's own unit; "" for one that is over."""
    if sys.platform == "linux":
        return process_start(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return ""
