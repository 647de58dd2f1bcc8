"""`jobs.Executor` over any `Service`: launches all or none, keeps the ledger, and leaves nothing behind.

What waits for a job (restarts, deadlines, Ctrl-C) stands in `waiting.py`. Nothing is kept in memory: a handle says
where its ledger is, so a later process can do all that the one that launched can.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from composer_core.errors import ComposerError, MissingError, RunFailed, UsageError
from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_core.run.doctor import Finding
from composer_executors.again import travels
from composer_executors.bringing import Courier
from composer_executors.contract_env import make_folder, placed, replica_of, secrets_of
from composer_executors.ledger import RUN_DIR, Book, Entry, Ledger
from composer_executors.lines import Lines, stream
from composer_executors.service import Service
from composer_executors.settings import JobSettings
from composer_executors.shipping import bootstrap_argv, input_of, ship
from composer_executors.waiting import Waiting

GONE_S = 45.0
"""How long a service may take until nothing is left of what was killed."""
PAUSE_S = 0.2
LOST = "the launcher ended while it was submitted"


class ServiceExecutor:
    """Implements `jobs.Executor`, `jobs.Attaches`, `jobs.Reaps` and `jobs.Examines`."""

    def __init__(self, service: Service, settings: JobSettings) -> None:
        self.service = service
        self._settings = settings

    def render(self, job: Job) -> Mapping[str, str]:
        """What the service would get, without any secret's value."""
        job = placed(job, self._settings)
        names = dict.fromkeys([*job.secrets, *self._settings.secrets], "")
        argv = bootstrap_argv(job, "...") if travels(job) else None
        return self.service.render(
            [
                replica_of(job, self._settings, rank=rank, attempt=0, secrets=names, argv=argv)
                for rank in range(job.replicas)
            ]
        )

    # -- start ---------------------------------------------------------------------------------------------------------

    def launch(self, job: Job) -> list[JobHandle]:
        """Start all replicas or none.

        Raises:
            UsageError: a setting is wrong, or replicas of an earlier launch of this run are not over.
            MissingError: a secret is not set; the service or the store is not there or does not let us in.
            RunFailed: the service refuses; what had been started is ended.
        """
        job = placed(job, self._settings)
        secrets = secrets_of(job, self._settings, os.environ)
        ledger = Ledger(job.run_dir)
        self._refuse_second(ledger, job)
        if travels(job):
            ship(job)
        if job.detached and not job.quiet and (self._settings.restarts or self._settings.start_minutes is not None):
            print("nobody waits for a detached job: restarts and start_minutes are not kept", file=sys.stderr)
        entries = ledger.begin(self.service.name, job, ranks=range(job.replicas))
        return self._submit(job, ledger, entries, secrets=secrets)

    def start_again(self, handle: JobHandle, argv: Sequence[str]) -> JobHandle:
        """Start a replica that is over once more, with these arguments."""
        ledger = Ledger(_run_dir(handle))
        job = _read(ledger).job
        secrets = secrets_of(job, self._settings, os.environ)
        return self._submit(job, ledger, [ledger.again(handle.rank)], secrets=secrets, argv=argv)[0]

    def _submit(
        self,
        job: Job,
        ledger: Ledger,
        entries: Sequence[Entry],
        *,
        secrets: Mapping[str, str],
        argv: Sequence[str] | None = None,
    ) -> list[JobHandle]:
        for entry in entries:
            make_folder(job.run_dir, entry)
        if travels(job):
            argv = bootstrap_argv(job, input_of(job))
        replicas = [
            replica_of(job, self._settings, rank=one.rank, attempt=one.attempt, secrets=secrets, argv=argv)
            for one in entries
        ]
        handles: list[JobHandle] = []
        try:
            for handle in self.service.submit(replicas):
                handles.append(replace(handle, facts={**handle.facts, RUN_DIR: str(job.run_dir)}))
                ledger.submitted(handles[-1])
            if len(handles) != len(replicas):
                raise RunFailed(f"{self.service.name} started {len(handles)} of {len(replicas)} replicas")
        except BaseException as error:
            self._undo(job, ledger, entries, handles, error)
            raise
        return handles

    def _undo(
        self, job: Job, ledger: Ledger, entries: Sequence[Entry], handles: Sequence[JobHandle], why: BaseException
    ) -> None:
        """End what was started before the failure, with or without an id."""
        wanted = {(entry.rank, entry.attempt) for entry in entries}
        known = {handle.id for handle in handles}
        try:
            found = [one for one in self.service.leftovers(job.name) if (one.rank, one.attempt) in wanted]
            left = self._end([*handles, *(one for one in found if one.id not in known)])
        except ComposerError as error:  # a service that fails twice: say both, unless it was never reached
            reached = bool(handles) or not isinstance(why, MissingError)
            left = f"whether anything runs is unknown: {error.problem}" if reached else ""
        state = JobStatus(JobState.CANCELLED, reason=left or "not all replicas could be started")
        places = [JobHandle(self.service.name, entry.rank, "", entry.attempt) for entry in entries]
        ledger.note([(place, state) for place in places])
        if left:
            raise RunFailed(f"{why}; {left}", fix="composer-run reap") from why

    def _refuse_second(self, ledger: Ledger, job: Job) -> None:
        book = ledger.read()
        if book is None or book.executor != self.service.name:
            return  # one of another place has no business with this one: its own lock says whether the run is on
        running = [handle for handle, status in self._look(ledger, book) if not status.state.over]
        if running:
            ranks = ", ".join(str(handle.rank) for handle in running)
            raise UsageError(
                f"run {job.run_dir.name} is not over: replica {ranks} of an earlier launch",
                fix=f"composer-run stop {job.run_dir.name} --kill",
            )

    # -- look ----------------------------------------------------------------------------------------------------------

    def poll(self, handle: JobHandle) -> JobStatus:
        """What the ledger says of one that is over, else what the service says."""
        return self.poll_all([handle])[0]

    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """The same for several replicas of one run, by one question."""
        if RUN_DIR not in handles[0].facts:  # found by its label
            return self.service.poll(handles)
        ledger = Ledger(_run_dir(handles[0]))
        book = _read(ledger)
        # an end stays as it was booked, whatever a service forgets; and one being submitted has no id to ask for
        booked = [entry for entry in book.entries if entry.state.over or not entry.id]
        known = {(entry.rank, entry.attempt): entry.status() for entry in booked}
        asked = [handle for handle in handles if _place(handle) not in known]
        found = dict(zip(map(_place, asked), self.service.poll(asked) if asked else (), strict=True))
        before = {(entry.rank, entry.attempt): entry.status() for entry in book.entries}
        news = [(handle, found[_place(handle)]) for handle in asked if before[_place(handle)] != found[_place(handle)]]
        noted = dict(zip((_place(handle) for handle, _ in news), ledger.note(news) if news else (), strict=True))
        statuses = {**known, **found, **noted}
        return [statuses[_place(handle)] for handle in handles]

    def attach(self, run_dir: Path) -> list[tuple[JobHandle, JobStatus]]:
        """The replicas of the last launch, by rank; what they put into the run's store is brought first."""
        ledger = Ledger(run_dir)
        book = ledger.read()
        if book is None:
            return []
        found = self._look(ledger, book)
        if travels(book.job):
            Courier(book.job, partial(print, file=sys.stderr)).last()
        return found

    def _look(self, ledger: Ledger, book: Book) -> list[tuple[JobHandle, JobStatus]]:
        if any(not entry.id and not entry.state.over for entry in book.entries):
            book = self._adopt(ledger, book)
        handles = [ledger.handle(book, entry) for entry in book.current()]
        return list(zip(handles, self.poll_all(handles), strict=True))

    def _adopt(self, ledger: Ledger, book: Book) -> Book:
        """Find by their label replicas whose launcher ended before it could write down their id."""
        there = {(one.rank, one.attempt): one for one in self.service.leftovers(book.job.name)}
        for entry in book.entries:
            if entry.id or entry.state.over:
                continue
            if (found := there.get((entry.rank, entry.attempt))) is not None:
                ledger.submitted(found)
            elif book.launcher_gone():
                ledger.note([(ledger.handle(book, entry), JobStatus(JobState.FAILED, reason=LOST))])
        return _read(ledger)

    def stream_logs(self, handle: JobHandle, *, follow: bool = True, last: int | None = None) -> Iterator[str]:
        """Of this start of the replica; where the service fails, it asks again."""
        return stream(
            self.lines(handle),
            lambda: self.poll(handle).state.over,
            follow=follow,
            last=last,
            patience_s=60 * self._settings.unknown_minutes,
        )

    def book(self, handle: JobHandle) -> Book:
        """The ledger that a handle stands in."""
        return _read(Ledger(_run_dir(handle)))

    def lines(self, handle: JobHandle) -> Lines:
        """A reader from the first line on."""
        return Lines(self.service, handle)

    # -- end -----------------------------------------------------------------------------------------------------------

    def ask_to_stop(self, handle: JobHandle) -> None:
        """SIGTERM, once: the worker saves."""
        self.service.terminate(handle)

    def cancel(self, handle: JobHandle) -> None:
        """Ask it to stop, end it after `stop_seconds`, and see that nothing is left.

        Raises:
            RunFailed: something is left; with what, and how to end it by hand.
        """
        self.end([handle], at_once=False)

    def end(self, handles: Sequence[JobHandle], *, at_once: bool) -> None:
        """The same for several of one run."""
        running = [one for one, status in zip(handles, self.poll_all(handles), strict=True) if not status.state.over]
        if not at_once:
            for handle in running:
                self.service.terminate(handle)
            self._wait_for(running)
        self.kill(handles, JobStatus(JobState.CANCELLED, reason="cancelled"))

    def _wait_for(self, handles: Sequence[JobHandle]) -> None:
        pause, deadline = PAUSE_S, time.time() + self._settings.stop_seconds
        while handles and not all(status.state.over for status in self.poll_all(handles)):
            if time.time() > deadline:
                return
            time.sleep(pause)
            pause = min(1.5 * pause, self._settings.poll_seconds)

    def kill(self, handles: Sequence[JobHandle], as_status: JobStatus) -> None:
        """End replicas at once, and enter those that were not over as this.

        Raises:
            RunFailed: something is left.
        """
        left = self._end(handles)
        if booked := [handle for handle in handles if RUN_DIR in handle.facts]:
            Ledger(_run_dir(booked[0])).note([(handle, as_status) for handle in booked])
        if left:
            raise RunFailed(left, at=self.service.name)

    def _end(self, handles: Sequence[JobHandle]) -> str:
        """Kill, and wait until nothing is left; what is, in words."""
        for handle in handles:
            self.service.kill(handle)
        deadline = time.time() + GONE_S
        while left := [said for handle in handles if (said := self.service.remains(handle))]:
            if time.time() > deadline:
                return "still there: " + "; ".join(left)
            time.sleep(PAUSE_S)
        return ""

    def leftovers(self) -> list[JobHandle]:
        """Of any run, by their label."""
        return self.service.leftovers(None)

    def deserted(self, run_dir: Path) -> bool:
        """By the ledger; a detached job has nobody who waits."""
        book = Ledger(run_dir).read()
        return book is not None and book.deserted()

    def examine(self) -> Iterable[Finding]:
        """The service's own findings."""
        return self.service.examine()

    # -- wait ----------------------------------------------------------------------------------------------------------

    def collect(self, handles: Sequence[JobHandle]) -> int:
        """Wait for the end of all replicas of one run, and start again those that may be; the worst exit code.

        Rank 0's lines go to stderr. The first Ctrl-C asks the replicas to stop, the second ends them (130).
        """
        if not handles:
            return 0
        return Waiting(self, handles, self._settings).until_over()


def _place(handle: JobHandle) -> tuple[int, int]:
    """Its key in a ledger."""
    return handle.rank, handle.attempt


def _run_dir(handle: JobHandle) -> Path:
    return Path(handle.facts[RUN_DIR])


def _read(ledger: Ledger) -> Book:
    book = ledger.read()
    if book is None:
        raise RunFailed("the run's ledger is gone", fix="composer-run reap finds what still runs")
    return book
