"""Waiting for a job: shows what rank 0 writes, restarts what failed, keeps deadlines, carries out Ctrl-C.

not started in time             all are ended: a part of a job is of no use
longer than its limit           ended, `timeout`; the service should have done it before
unknown to its service          failed after `unknown_minutes`, never a success
failed                          started again, `restarts` times, where that can help (`verdict.py`)
Ctrl-C once, SIGTERM            all are asked to stop, and ended after `stop_seconds`
Ctrl-C twice                    all are ended, 130
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_core.errors import ComposerError, RunFailed, Stopped
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.control import INTERRUPTED_TWICE
from composer_core.run.directory import ENDS, RunDirectory
from composer_core.run.files import read_jsonl
from composer_executors.again import is_worker, prepare_again, travels
from composer_executors.bringing import Courier
from composer_executors.ledger import Entry
from composer_executors.lines import Lines
from composer_executors.settings import JobSettings
from composer_executors.verdict import TIMEOUT, exit_code, worst, worth_another_try
from composer_executors.wishes import Wishes

if TYPE_CHECKING:
    from composer_executors.executor import ServiceExecutor

FIRST_PAUSE_S, SHOW_EVERY_S = 0.05, 1.0
MARGIN_S = 120.0
"""How much later than the service we end what is over its time."""
LAST_LINES = 20
_TERMINATED = (143, -15)


@dataclass
class _Watched:
    """One replica while it is waited for."""

    handle: JobHandle
    submitted: float
    started: float | None
    status: JobStatus
    unknown_since: float | None = None


class Waiting:
    """One call of `collect`."""

    def __init__(self, executor: ServiceExecutor, handles: Sequence[JobHandle], settings: JobSettings) -> None:
        self._executor = executor
        self._settings = settings
        book = executor.book(handles[0])
        self._job, self._executor_name = book.job, book.executor
        entries = {(entry.rank, entry.attempt): entry for entry in book.entries}
        self._watched = [_watched(handle, entries[handle.rank, handle.attempt]) for handle in handles]
        self._since = min(one.submitted for one in self._watched)
        self._lines = self._lines_of_first()
        self._courier = Courier(self._job, self._say) if travels(self._job) else None
        self._asked_to_stop: float | None = None

    def until_over(self) -> int:
        """The worst exit code."""
        pause = FIRST_PAUSE_S
        with Wishes() as wishes:
            while running := [one for one in self._watched if not one.status.state.over]:
                self._carry_out(wishes, running)
                changed = self._look(running, wishes)
                pause = FIRST_PAUSE_S if changed else min(1.5 * pause, self._settings.poll_seconds)
                if not all(one.status.state.over for one in self._watched):
                    self._wait(wishes, pause)
        self._show(last=True)
        brought = self._courier is None or self._courier.last()
        code = self._verdict(wishes)
        return code if brought else code or RunFailed.exit_code

    # -- look ----------------------------------------------------------------------------------------------------------

    def _wait(self, wishes: Wishes, pause: float) -> None:
        self._show()
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            if wishes.wait(min(left, SHOW_EVERY_S)):
                return
            self._show()
            if self._courier is not None:
                self._courier.look()

    def _look(self, running: Sequence[_Watched], wishes: Wishes) -> bool:
        """Ask, judge, restart; whether anything changed."""
        before = [(one.handle, one.status) for one in running]
        statuses = self._executor.poll_all([one.handle for one in running])
        for one, status in zip(running, statuses, strict=True):
            if one.status.state.over:
                continue  # ended with another one, a moment ago
            if status.state is JobState.PENDING and (status.state, status.reason) != (
                one.status.state,
                one.status.reason,
            ):
                self._say(f"replica {one.handle.rank} waits for {self._executor_name}: {status.reason or 'submitted'}")
            one.status = status
            self._judge(one, time.time())
            if one.status.state.over:
                self._again(one, wishes)
        return before != [(one.handle, one.status) for one in running]

    def _judge(self, one: _Watched, now: float) -> None:
        """End what is over one of its deadlines."""
        state, name = one.status.state, self._executor_name
        one.unknown_since = (one.unknown_since or now) if state is JobState.UNKNOWN else None
        if state is JobState.RUNNING:
            one.started = one.started or now
        if one.unknown_since is not None and now - one.unknown_since > 60 * self._settings.unknown_minutes:
            self._end([one], JobStatus(JobState.FAILED, reason=f"{name} no longer knows it: {one.status.reason}"))
        elif state is JobState.PENDING and self._too_late(one, now):
            waits = one.status.reason or "no reason given"
            reason = f"did not start within {self._settings.start_minutes:g} minutes: {waits}"
            self._end([other for other in self._watched if not other.status.state.over], _failed(reason))
        elif state is JobState.RUNNING and self._over_time(one, now):
            self._end([one], _failed(TIMEOUT))

    def _over_time(self, one: _Watched, now: float) -> bool:
        limit, started = self._job.time_limit_s, one.started
        if limit is None or started is None:
            return False
        return now - started > limit + self._settings.stop_seconds + MARGIN_S

    def _too_late(self, one: _Watched, now: float) -> bool:
        minutes = self._settings.start_minutes
        return minutes is not None and now - one.submitted > 60 * minutes

    def _end(self, these: Sequence[_Watched], status: JobStatus) -> None:
        try:
            self._executor.kill([one.handle for one in these], status)
        except ComposerError as error:
            self._say(str(error))
        for one in these:
            one.status = status

    # -- start again, stop ---------------------------------------------------------------------------------------------

    def _again(self, one: _Watched, wishes: Wishes) -> None:
        """Start a replica that failed once more, where it may and where that can help."""
        rank, stop_file = one.handle.rank, RunDirectory(self._job.run_dir).stop_file
        done = self._executor.book(one.handle).restarts(rank)
        if wishes.stop or stop_file.exists() or done >= self._settings.restarts or not worth_another_try(one.status):
            return
        if rank == 0:
            self._show(last=True)
        argv, where = prepare_again(self._job)
        count = f"{done + 1} of {self._settings.restarts}"
        self._say(f"replica {rank} {one.status.in_words()}; started again ({count}) from {where}")
        try:
            one.handle = self._executor.start_again(one.handle, argv)
        except ComposerError as error:
            self._say(str(error))
            return
        one.submitted, one.started, one.status = time.time(), None, JobStatus(JobState.PENDING)
        if rank == 0:
            self._lines = self._lines_of_first()

    def _carry_out(self, wishes: Wishes, running: Sequence[_Watched]) -> None:
        now = time.monotonic()
        if wishes.end:
            self._end(running, JobStatus(JobState.CANCELLED, reason="interrupted twice"))
        elif wishes.stop and self._asked_to_stop is None:
            self._asked_to_stop = now
            self._say(f"asked to stop; the worker saves and ends within {self._settings.stop_seconds:g} s")
            for one in running:
                self._executor.ask_to_stop(one.handle)
        elif self._asked_to_stop is not None and now - self._asked_to_stop > self._settings.stop_seconds:
            reason = f"did not stop within {self._settings.stop_seconds:g} s"
            self._end(running, JobStatus(JobState.CANCELLED, reason=reason))

    # -- say -----------------------------------------------------------------------------------------------------------

    def _lines_of_first(self) -> Lines | None:
        first = next((one for one in self._watched if one.handle.rank == 0), None)
        return None if first is None else self._executor.lines(first.handle)

    def _show(self, *, last: bool = False) -> None:
        """New lines of rank 0."""
        if self._lines is None:
            return
        try:
            found = [*self._lines.new(), *(self._lines.rest() if last else [])]
        except (ComposerError, OSError) as error:
            if last:
                print(f"the end of the log cannot be read: {error}", file=sys.stderr)
            return  # they come with a later look
        for line in found:
            print(line, file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if not self._job.quiet:
            print(text, file=sys.stderr, flush=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _verdict(self, wishes: Wishes) -> int:
        codes = [self._code(one) for one in self._watched]
        code = INTERRUPTED_TWICE if wishes.end else worst(codes)
        if code == 0:
            return 0
        first = max(zip(codes, self._watched, strict=True), key=lambda pair: pair[0] == worst(codes))[1]
        said = self._worker_said_it(first)
        if first.handle.rank != 0 and code != Stopped.exit_code:
            self._show_last_lines(first)
        if not said:
            self._conclude(f"replica {first.handle.rank} {first.status.in_words()}", code)
        return code

    def _code(self, one: _Watched) -> int:
        if self._asked_to_stop is not None and one.status.exit_code in _TERMINATED:
            return Stopped.exit_code  # it came before the worker could catch it
        own = one.status.exit_code
        died = own is None or own < 0 or own > 125
        if died and is_worker(self._job.argv) and self._ended_as() == "done":
            self._say(f"the worker {one.status.in_words()} after the run was done; the report may be missing")
            return 0
        return exit_code(one.status)

    def _ended_as(self) -> str | None:
        """How the worker of this launch said that the run ended."""
        events = read_jsonl(RunDirectory(self._job.run_dir).events)
        kinds = [event["event"] for event in events if event.get("time", 0) >= self._since]
        last = next((kind for kind in reversed(kinds) if kind in ENDS or kind in ("started", "resumed")), None)
        return ENDS.get(last) if last is not None else None

    def _worker_said_it(self, one: _Watched) -> bool:
        return is_worker(self._job.argv) and self._ended_as() is not None

    def _conclude(self, what: str, code: int) -> None:
        """Say for the worker, which could not, how it ended."""
        directory = RunDirectory(self._job.run_dir)
        if is_worker(self._job.argv):
            what = f"{what}; last complete checkpoint: {directory.newest_checkpoint()}"
            directory.event("stopped" if code == Stopped.exit_code else "failed", reason=what, exit_code=code)
        print(what, file=sys.stderr, flush=True)

    def _show_last_lines(self, one: _Watched) -> None:
        try:
            lines = list(self._executor.stream_logs(one.handle, follow=False, last=LAST_LINES))
        except ComposerError as error:
            lines = [str(error)]
        print(f"last lines of replica {one.handle.rank}:", *lines, sep="\n  ", file=sys.stderr, flush=True)


def _watched(handle: JobHandle, entry: Entry) -> _Watched:
    return _Watched(
        handle, entry.submitted, entry.started, JobStatus(JobState.RUNNING) if entry.started else entry.status()
    )


def _failed(reason: str) -> JobStatus:
    return JobStatus(JobState.FAILED, reason=reason)
