"""What comes back from a run's store into the run directory: while somebody waits, and when somebody asks.

Lines are appended as they arrive, folders stand there once they are whole and verified, and the worker's events come
after what was complete before them. How far it got stands in `replicas/store.json`, so another process goes on there; a
lock keeps two from bringing at once. Where the worker was started again, its lines so far take the place of earlier
ones. Only the replica of rank 0 has anything to bring: it is the one that writes metrics.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_core.errors import ComposerError, RunFailed
from composer_core.jobs import Job
from composer_core.run.directory import RunDirectory
from composer_core.run.files import MARKER, disk_full, fill_folder, read_json, remove_folder, write_json, write_text
from composer_executors.journal import Reader, Tree, checkpoints, marker_facts
from composer_executors.ledger import REPLICAS
from composer_executors.shipping import input_of, wish_to_stop
from composer_executors.store import Store

EVENTS = "events.jsonl"
REST = "rest"
EVERY_S, AFTER_FAILURE_S = 1.0, 30.0
AGAIN = "composer-run status"
"""The command that brings what is not here yet."""


@dataclass
class _Progress:
    """How far it got."""

    launch: str
    store: str
    writer: int = -1
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Of growing files: bytes taken from the store, and the size that the file has here since."""
    trees: dict[str, str] = field(default_factory=dict)
    """Folder -> where in the store it came from."""


class Bringing:
    """Of one job. Each call brings what is new."""

    def __init__(self, job: Job) -> None:
        self._store = Store(job.store)
        self._launch = input_of(job)
        self._directory = RunDirectory(job.run_dir)
        self._reader = Reader(self._store, 0)
        self._folder = job.run_dir / REPLICAS
        self._wished = False

    def bring(self) -> None:
        """Bring what the worker put there since, and tell it where the run is asked to stop.

        Raises:
            RunFailed: the store fails; an object is gone or damaged, and nothing of it was taken.
            MissingError: it no longer lets us in.
        """
        self._pass_on_wish()
        writer = self._reader.newest(self._launch)
        if writer is None:
            return
        with self._alone() as progress:
            if writer != progress.writer:
                progress.writer, progress.lines = writer, {}
            self._lines(progress, but=EVENTS)
            # read before folders are looked for: what these events speak of is there by now
            events = self._new_of(progress, EVENTS)
            self._lock(writer)
            self._folders(progress)
            self._take(progress, EVENTS, events)

    def _pass_on_wish(self) -> None:
        if not self._wished and self._directory.stop_file.is_file():
            wish_to_stop(self._store, self._launch, self._directory.stop_file.read_text(encoding="utf-8"))
            self._wished = True

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _lines(self, progress: _Progress, *, but: str) -> None:
        for name in self._reader.growing(progress.writer):
            if name != but:
                self._take(progress, name, self._new_of(progress, name))

    def _new_of(self, progress: _Progress, name: str) -> bytes:
        return self._reader.lines(progress.writer, name, progress.lines.get(name, [0, 0])[0])

    def _take(self, progress: _Progress, name: str, content: bytes) -> None:
        """Append it; the first of a worker takes the place of what is there."""
        if not content:
            return
        path = self._directory.path / name
        taken, size = progress.lines.get(name, [0, 0])
        if taken:
            with path.open("r+b") as file:
                file.seek(size)
                more = file.read()
                # one that was killed may have appended it and not said so; a command may have added a line of its own
                left = content[len(more) :] if content.startswith(more) else content
                _append(path, left)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, content)
        progress.lines[name] = [taken + len(content), path.stat().st_size]
        self._write(progress)

    def _lock(self, writer: int) -> None:
        lock = self._reader.lock_of(writer)
        if lock is not None and lock != self._directory.read_json("lock.json"):
            self._directory.write_json("lock.json", lock)

    # -- folders -------------------------------------------------------------------------------------------------------

    def _folders(self, progress: _Progress) -> None:
        there = self._reader.trees()
        for name, tree in there.items():
            if progress.trees.get(name) == tree.prefix:
                continue
            try:
                self._take_files(tree) if name == REST else self._take_folder(tree)
            except RunFailed:
                if self._reader.trees().get(name) == tree:
                    raise
                continue  # the worker took it away meanwhile, for newer ones
            progress.trees[name] = tree.prefix
            self._write(progress)
        kept = checkpoints(there)
        for step, folder in self._directory.complete_checkpoints():
            if step not in kept and f"checkpoints/step_{step}" in progress.trees:
                remove_folder(folder)

    def _take_folder(self, tree: Tree) -> None:
        """Whole, with its own marker written last."""
        path = self._directory.path / tree.name
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            marker = Path(own, MARKER)
            self._store.get_file(f"{tree.prefix}/{MARKER}", tree.files[MARKER], marker)
            text = marker.read_text(encoding="utf-8")
        files = {name: stamp for name, stamp in tree.files.items() if name != MARKER}
        with fill_folder(path, **marker_facts(text)) as folder:
            self._store.get_tree(tree.prefix, files, folder)
        write_text(path / MARKER, text)

    def _take_files(self, tree: Tree) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            self._store.get_tree(tree.prefix, tree.files, Path(own))
            for name in tree.files:
                path = self._directory.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(own, name), path)

    # -- how far -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[_Progress]:
        self._folder.mkdir(exist_ok=True)
        descriptor = os.open(self._folder / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel lets go when a process dies
            document: dict[str, Any] | None = read_json(self._progress_file)
            yield self._progress(document)
        finally:
            os.close(descriptor)

    def _progress(self, document: dict[str, Any] | None) -> _Progress:
        uri = self._store.uri
        if document is None or document["store"] != uri:
            return _Progress(self._launch, uri)
        if document["launch"] != self._launch:  # folders of earlier launches are here already
            return _Progress(self._launch, uri, trees=document["trees"])
        return _Progress(**document)

    @property
    def _progress_file(self) -> Path:
        return self._folder / "store.json"

    def _write(self, progress: _Progress) -> None:
        write_json(self._progress_file, asdict(progress))


class Courier:
    """Brings while somebody waits, who must neither be held up by a big checkpoint nor end where a store fails."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._bringing: Bringing | None = None
        # not of a pool: those are waited for at the end of the program, also after the second Ctrl-C
        self._hand: threading.Thread | None = None
        self._failed = ""
        self._said = ""
        self._next = 0.0

    def look(self) -> None:
        """Begin to bring what is new, now and then; a failure is said once, and tried again later."""
        if time.monotonic() < self._next or (self._hand is not None and self._hand.is_alive()):
            return
        if self._failed and self._failed != self._said:
            self._said = self._failed
            self._say(f"warning: {self._failed}")
        self._hand = threading.Thread(target=self._bring, name="store", daemon=True)
        self._hand.start()

    def last(self) -> bool:
        """Bring what there is, and say where that failed; whether it did not."""
        if self._hand is not None:
            self._hand.join()
        self._bring()
        if self._failed:
            self._say(
                f"what the run left in its store is not all here: {self._failed}\n  fix: {AGAIN} {self._job.name}"
            )
        return not self._failed

    def _bring(self) -> None:
        try:
            self._bringing = self._bringing or Bringing(self._job)
            self._bringing.bring()
            self._failed = ""
        except (ComposerError, OSError) as error:
            self._failed = str(error)
        self._next = time.monotonic() + (AFTER_FAILURE_S if self._failed else EVERY_S)


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise disk_full(error, path) or error from error


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_full(error, path) or error from error
