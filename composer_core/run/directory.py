"""The directory of one run: what stands in it, how it is made and found again.

    runs/<name>-<time>-<4 hex>/
      spec.yaml        as given              events.jsonl    started | resumed, checkpoint, finished | stopped | failed
      resolved.json    value and source      rollouts.jsonl  sampled completions (recorded.jsonl: rows of traces)
      plan.json        all a worker needs    checkpoints/step_N/   complete or absent
      provenance.json  versions, git, host   model/          the trained model, complete or absent
      metrics.jsonl    one line a step       logs/  report.html  lock.json (who runs it)  STOP (a wish, see control.py)
      *.dropped.jsonl  lines of steps that a resume trained again
    runs/latest -> the newest

How files are written stands in `files.py`, what is written in `metrics.py`, `provenance.py` and `report.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.run.control import STOP_FILE
from composer_core.run.files import (
    JsonLines,
    fill_folder,
    find_complete,
    read_json,
    read_jsonl,
    remove_folder,
    settle,
    write_json,
    write_text,
)
from composer_core.run.processes import is_running, process_start

RUNS_VARIABLE = "COMPOSER_RUNS"
DEBUG_VARIABLE = "COMPOSER_DEBUG"
"""`1` makes a worker print tracebacks."""
LATEST = "latest"
STEP = re.compile(r"step_(\d+)")
STARTS = ("started", "resumed")
"""Events that begin a part of a run."""
ENDS = {"finished": "done", "stopped": "stopped", "failed": "failed"}
"""The event that ends a run -> the state it leaves."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands: `done`, `stopped`, `failed`, `running` or `new` (planned, no worker yet)."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run, and the only ways to write folders and whole files into it."""

    path: Path

    @property
    def name(self) -> str:
        """The directory's own name, which `find_run` takes."""
        return self.path.name

    @property
    def plan(self) -> Path:
        """All a worker needs."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One line per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened, with times."""
        return self.path / "events.jsonl"

    @property
    def rollouts(self) -> Path:
        """Sampled completions."""
        return self.path / "rollouts.jsonl"

    @property
    def recorded(self) -> Path:
        """Rows of recorded traces, of a run without rollouts."""
        return self.path / "recorded.jsonl"

    @property
    def report(self) -> Path:
        """The page a user opens."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """Log files of the worker."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Holds `step_N` folders."""
        return self.path / "checkpoints"

    @property
    def scratch(self) -> Path:
        """Upstream's temporary files, a folder per process."""
        return self.path / "scratch"

    @property
    def stop_file(self) -> Path:
        """A wish that the run may end; its text is the reason."""
        return self.path / STOP_FILE

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document as one step."""
        write_json(self.path / name, value)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file as one step."""
        write_text(self.path / name, text)

    def read_json(self, name: str) -> Any:
        """A JSON document of the run, or None where it is missing."""
        return read_json(self.path / name)

    def event(self, kind: str, **facts: Any) -> None:
        """Append one line to events.jsonl: `{event, time, ...}`. Rare, so the file is opened each time."""
        lines = JsonLines(self.events)
        lines.write({"event": kind, "time": time.time(), **facts})
        lines.close()

    # -- folders -------------------------------------------------------------------------------------------------------

    @contextmanager
    def checkpoint(self, step: int, *, keep: int, **facts: Any) -> Iterator[Path]:
        """A folder to fill; afterwards it is `checkpoints/step_N`, and all but the `keep` newest are gone.

        `facts` are written into its marker.
        """
        with fill_folder(self.checkpoints / f"step_{step}", step=step, **facts) as folder:
            yield folder
        self._prune(keep)

    @contextmanager
    def trained_model(self) -> Iterator[Path]:
        """A folder to fill; afterwards it is `model/`. An older one stays until then."""
        with fill_folder(self.path / "model") as folder:
            yield folder

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of those that are complete, oldest first."""
        found = [(step, find_complete(self.checkpoints / f"step_{step}")) for step in self.checkpoint_steps()]
        return [(step, path) for step, path in found if path is not None]

    def newest_checkpoint(self) -> str:
        """The newest complete one in words: `checkpoints/step_N`, or `none`."""
        complete = self.complete_checkpoints()
        return f"{self.checkpoints.name}/{complete[-1][1].name}" if complete else "none"

    def checkpoint_steps(self) -> list[int]:
        """Steps that somebody began to save, complete or not, in order."""
        return sorted({int(match[1]) for path in self.checkpoints.glob("*step_*") if (match := STEP.search(path.name))})

    def complete_model(self) -> Path | None:
        """The trained model's folder, when there is a complete one."""
        return find_complete(self.path / "model")

    def _prune(self, keep: int) -> None:
        for leftover in self.checkpoints.glob(".step_*.old"):
            settle(self.checkpoints / leftover.name.removeprefix(".").removesuffix(".old"))
        complete = self.complete_checkpoints()
        for path in set(self.checkpoints.glob("*step_*")) - {path for _, path in complete[-keep:]}:
            remove_folder(path)  # an old one, or what a killed writer left

    # -- who runs it, and how it ended ---------------------------------------------------------------------------------

    def lock(self) -> None:
        """Say that this process runs it.

        Raises:
            UsageError: another process does.
        """
        with _exclusive(self.path):
            other = self.read_json("lock.json")
            if other is not None and other["pid"] != os.getpid() and _alive(other):
                where = "" if other["host"] == socket.gethostname() else f" on {other['host']}"
                gone = ", or remove lock.json if that machine is gone" if where else ""
                raise UsageError(
                    f"run {self.name} is running already: process {other['pid']}{where}",
                    fix=f"composer-run stop {self.name}{gone}",
                )
            pid = os.getpid()
            me = {"pid": pid, "process_start": process_start(pid), "host": socket.gethostname(), "time": time.time()}
            self.write_json("lock.json", me)

    def state(self) -> RunState:
        """From the last event of the run; without an end event, from whether its process is alive."""
        events = read_jsonl(self.events)
        for event in reversed(events):
            if event.get("event") in ENDS:
                return RunState(ENDS[event["event"]], str(event.get("reason", "")))
            if event.get("event") in STARTS:
                break
        lock = self.read_json("lock.json")
        if lock is None:
            return RunState("new")
        if _alive(lock):
            return RunState("running")
        return RunState("failed", "its process ended without a word (killed, or the machine went down)")


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time reads and replaces the lock; the kernel lets go when a process dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _alive(lock: Mapping[str, Any]) -> bool:
    """Whether a lock's process still runs; on another machine nobody can tell, so it counts as running."""
    if lock["host"] != socket.gethostname():
        return True
    return is_running(lock["pid"], str(lock["process_start"]))


# -- making and finding ------------------------------------------------------------------------------------------------


def runs_root(option: Path | None) -> Path:
    """The folder that holds runs: `--runs`, else COMPOSER_RUNS, else ./runs."""
    return (option or Path(os.environ.get(RUNS_VARIABLE) or "runs")).expanduser().absolute()


def create_run(root: Path, name: str) -> RunDirectory:
    """Make the directory of a new run and point `latest` at it.

    Raises:
        UsageError: the folder of runs cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = _new_folder(root, name)
        for folder in ("logs", "checkpoints"):
            (path / folder).mkdir()
        _point_latest(root, path.name)
    except OSError as error:
        raise UsageError(
            f"cannot make a run directory: {error.strerror}",
            at=str(error.filename or root),
            fix="--runs another folder",
        ) from error
    return RunDirectory(path)


def _new_folder(root: Path, name: str) -> Path:
    while True:
        path = root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another process drew the same four digits within this second
        return path


def _point_latest(root: Path, name: str) -> None:
    temporary = root / f".{LATEST}.{secrets.token_hex(4)}"
    temporary.symlink_to(name, target_is_directory=True)
    os.replace(temporary, root / LATEST)


def find_run(text: str, root: Path) -> RunDirectory:
    """The run that `text` means: `latest`, a path, a run's name, or the beginning of one.

    Raises:
        UsageError: no run fits, or several do.
    """
    for path in (root / text, Path(text).expanduser()):
        if _is_run(path):
            return RunDirectory(path.resolve())
    found = sorted(
        path for path in root.glob("*") if path.name.startswith(text) and _is_run(path) and not path.is_symlink()
    )
    if len(found) == 1:
        return RunDirectory(found[0].resolve())
    if found:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"several runs begin with {text!r}: {names}", at=str(root), fix="give the whole name")
    wanted = "no run yet" if text == LATEST else f"no run is called {text!r}"
    raise UsageError(wanted, at=str(root), fix="--runs DIR, or COMPOSER_RUNS, names the folder that holds runs")


def _is_run(path: Path) -> bool:
    return (path / "plan.json").is_file()
