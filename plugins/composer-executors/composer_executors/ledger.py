"""What was started for a run, in `jobs.json` of its directory: by it any later process finds the replicas again.

    version    1
    executor   the name of the place
    job        what was asked for, without any secret's value, so that a replica can be started again
    launcher   the process that submitted it
    replicas   one entry for each start of a replica, also those of earlier launches

An entry is written before its replica is submitted and again with the service's id: whoever is killed in between
leaves an entry without an id, which the label finds. Every change is read, made and written under a lock, since the
command that waits and another one that asks may change it at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from composer_core.errors import RunFailed
from composer_core.jobs import LEDGER, Job, JobHandle, JobState, JobStatus
from composer_core.run.files import read_json, write_text
from composer_core.run.processes import is_running, process_start

REPLICAS = "replicas"
VERSION = 1
RUN_DIR = "run_dir"
"""The fact of a handle that says where its ledger is; not written into it."""


@dataclass(frozen=True)
class Entry:
    """One start of one replica. Times are seconds since 1970."""

    rank: int
    attempt: int
    """Of this rank in the whole run."""
    launch: int
    """Which launch of the run it belongs to, from 0."""
    submitted: float
    id: str = ""
    """The service's own; "" while it is being submitted."""
    facts: Mapping[str, str] = field(default_factory=dict)
    state: JobState = JobState.PENDING
    reason: str = ""
    exit_code: int | None = None
    started: float | None = None
    """When it was first seen running."""
    ended: float | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """One of the ledger's."""
        return cls(**{**document, "state": JobState(document["state"])})

    def status(self) -> JobStatus:
        """As `poll` says it."""
        return JobStatus(self.state, self.exit_code, self.reason)

    def now(self, status: JobStatus, moment: float) -> Entry:
        """After a question to the service; an end that was booked stays."""
        if self.state.over:
            return self
        ran = status.state is JobState.RUNNING or status.state.over
        return replace(
            self,
            state=status.state,
            reason=status.reason,
            exit_code=status.exit_code,
            started=self.started or (moment if ran else None),
            ended=moment if status.state.over else None,
        )


@dataclass(frozen=True)
class Book:
    """What a ledger holds."""

    executor: str
    job: Job
    launcher: Mapping[str, Any]
    entries: tuple[Entry, ...]

    def current(self) -> list[Entry]:
        """The newest start of each rank of the last launch, by rank."""
        newest: dict[int, Entry] = {}
        for entry in self.entries:
            if entry.launch == self.entries[-1].launch:
                newest[entry.rank] = entry
        return [newest[rank] for rank in sorted(newest)]

    def restarts(self, rank: int) -> int:
        """How often this rank was started again since the last launch."""
        last = self.entries[-1].launch
        return sum(entry.rank == rank and entry.launch == last for entry in self.entries) - 1

    def launcher_gone(self) -> bool:
        """Whether the process that submitted it, on this machine, is not there any more."""
        it = self.launcher
        return it["host"] == socket.gethostname() and not is_running(it["pid"], it["process_start"])

    def deserted(self) -> bool:
        """Whether somebody was to wait for the end and is not there any more."""
        return not self.job.detached and self.launcher_gone()


class Ledger:
    """The file of one run. Keeps nothing in memory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def read(self) -> Book | None:
        """None where nothing was launched.

        Raises:
            RunFailed: another version of Composer wrote it, or it is broken.
        """
        path = self._run_dir / LEDGER
        try:
            document = read_json(path)
            return None if document is None else self._book(document)
        except (ValueError, LookupError, TypeError) as error:
            raise RunFailed(
                f"not a ledger of version {VERSION}: {type(error).__name__}: {error}",
                at=str(path),
                fix="ask the Composer that launched the run, or its service, what still runs",
            ) from error

    def begin(self, executor: str, job: Job, *, ranks: Sequence[int]) -> list[Entry]:
        """Enter a launch before anything is submitted; a rank's attempts go on counting."""

        def add(book: Book | None) -> Book:
            before = book.entries if book is not None else ()
            launch = before[-1].launch + 1 if before else 0
            new = tuple(_next(before, rank, launch=launch) for rank in ranks)
            return Book(executor, job, _this_process(), (*before, *new))

        return self._change(add).current()

    def again(self, rank: int) -> Entry:
        """Enter another start of a replica before it is submitted."""

        def add(book: Book | None) -> Book:
            assert book is not None
            new = _next(book.entries, rank, launch=book.entries[-1].launch)
            return replace(book, entries=(*book.entries, new))

        return self._change(add).entries[-1]

    def submitted(self, handle: JobHandle) -> None:
        """Enter the service's id."""
        facts = {name: value for name, value in handle.facts.items() if name != RUN_DIR}
        self._each([(handle, lambda entry: replace(entry, id=handle.id, facts=facts))])

    def note(self, found: Sequence[tuple[JobHandle, JobStatus]]) -> list[JobStatus]:
        """Enter where replicas stand; where they stand by now, in the same order. Unchanged, nothing is written."""
        moment = time.time()
        book = self._each([(handle, partial(Entry.now, status=status, moment=moment)) for handle, status in found])
        return [_find(book, handle).status() for handle, _ in found]

    def handle(self, book: Book, entry: Entry) -> JobHandle:
        """By which the executor knows the replica."""
        facts = {**entry.facts, RUN_DIR: str(self._run_dir)}
        return JobHandle(book.executor, entry.rank, entry.id, entry.attempt, facts)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _each(self, changes: Sequence[tuple[JobHandle, Callable[[Entry], Entry]]]) -> Book:
        def change(book: Book | None) -> Book:
            assert book is not None
            entries = list(book.entries)
            places = {(entry.rank, entry.attempt): place for place, entry in enumerate(entries)}
            for handle, make in changes:
                place = places[handle.rank, handle.attempt]
                entries[place] = make(entries[place])
            return replace(book, entries=tuple(entries))

        return self._change(change)

    def _change(self, change: Callable[[Book | None], Book]) -> Book:
        with self._alone():
            before = self.read()
            after = change(before)
            if after != before:
                # without indents json is written in C: ten times faster, for hundreds of replicas
                write_text(self._run_dir / LEDGER, json.dumps(_document(after)) + "\n")
        return after

    @contextmanager
    def _alone(self) -> Iterator[None]:
        folder = self._run_dir / REPLICAS
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel lets go when a process dies
            yield
        finally:
            os.close(descriptor)

    def _book(self, document: Mapping[str, Any]) -> Book:
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}")
        job = document["job"]
        tuples = {name: tuple(job[name]) for name in ("argv", "secrets")}
        return Book(
            document["executor"],
            Job(**{**job, **tuples, "run_dir": self._run_dir}),
            document["launcher"],
            tuple(Entry.from_json(entry) for entry in document[REPLICAS]),
        )


def _find(book: Book, handle: JobHandle) -> Entry:
    return next(entry for entry in book.entries if (entry.rank, entry.attempt) == (handle.rank, handle.attempt))


def _next(entries: Sequence[Entry], rank: int, *, launch: int) -> Entry:
    return Entry(rank, sum(entry.rank == rank for entry in entries), launch, time.time())


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "process_start": process_start(os.getpid()), "host": socket.gethostname()}


def _document(book: Book) -> dict[str, Any]:
    job = {one.name: getattr(book.job, one.name) for one in fields(Job) if one.name != "run_dir"}
    return {
        "version": VERSION,
        "executor": book.executor,
        "job": {**job, "env": dict(job["env"])},
        "launcher": book.launcher,
        REPLICAS: [{**vars(entry), "facts": dict(entry.facts)} for entry in book.entries],
    }
