"""What an executor starts, how it names what it started, and what it must be able to do with it later.

    launch    all replicas of a job, or none of them
    poll      where one stands, asked by any process: a handle is JSON, and a ledger in the run directory keeps them
    collect   wait, start failed replicas again, bring results back

One replica is one worker process (`run/worker.py`) and what that starts. What only some executors can do has a
protocol of its own (`Attaches`, `Reaps`, `Examines`); commands ask for it by isinstance. Light.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from composer_core.errors import Stopped

if TYPE_CHECKING:
    from composer_core.run.doctor import Finding

LEDGER = "jobs.json"
"""In a run directory: which replicas were launched, kept by executors that later processes can ask."""


@dataclass(frozen=True)
class Job:
    """What an executor starts: the same command once for each replica."""

    name: str
    """Of the run, unique: what it is called at a service, and the label by which leftovers are found."""
    argv: tuple[str, ...]
    """Arguments behind the interpreter, which is the executor's choice: `-m composer_core.run.worker ...`."""
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of environment variables to pass on; values never travel in a plan."""
    replicas: int = 1
    time_limit_s: float | None = None
    """After which the service ends it, and so do we; None: no limit."""
    store: str = ""
    """Where results travel to without a shared disk, a URI; "": the disk is shared."""
    detached: bool = False
    """Whether it lives on when the process that launches it ends."""
    quiet: bool = False
    """Whether the executor says errors only."""


class JobState(StrEnum):
    """Where a replica stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The service does not know it, or does not answer: it may run, and it has not succeeded."""

    @property
    def over(self) -> bool:
        """Whether it will not change any more."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class JobHandle:
    """A started replica, as JSON-able facts: a later process can attach to it."""

    executor: str
    rank: int
    id: str
    """The service's own."""
    attempt: int = 0
    """How often this replica was started before."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the executor needs to find it again: a log file, a start time."""


@dataclass(frozen=True)
class JobStatus:
    """What `poll` found."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    """Why it waits or how it ended: `timeout`, `oom`, `preempted`, `unschedulable`, `cancelled`, or the service's own
    words."""

    def in_words(self) -> str:
        """`failed (oom), exit code 137`; a worker that was asked to stop, and did, has not failed."""
        stopped = self.state is JobState.FAILED and self.exit_code == Stopped.exit_code
        word = "stopped" if stopped else self.state.value
        reason = f" ({self.reason})" if self.reason else ""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        return f"{word}{reason}{code}"


class Executor(Protocol):
    """A place to run a job. Constructed with its settings, it runs in the control process."""

    def render(self, job: Job) -> Mapping[str, str]:
        """The files or commands it would use, name -> text; changes nothing."""
        ...

    def launch(self, job: Job) -> list[JobHandle]:
        """Start all replicas or none."""
        ...

    def poll(self, handle: JobHandle) -> JobStatus:
        """Ask the service."""
        ...

    def stream_logs(self, handle: JobHandle, *, follow: bool = True, last: int | None = None) -> Iterator[str]:
        """The last lines so far, all where `last` is None; then new ones until the job ends, where `follow`. None
        twice, none left out.
        """
        ...

    def cancel(self, handle: JobHandle) -> None:
        """Ask the job to stop (the worker saves and ends with exit code 5); nothing of it is left afterwards."""
        ...

    def collect(self, handles: Sequence[JobHandle]) -> int:
        """Wait for the end, bring results into the run directory, return the worst exit code."""
        ...


@runtime_checkable
class Attaches(Protocol):
    """An executor whose jobs outlive the process that launched them: `composer-run run --detach`."""

    def attach(self, run_dir: Path) -> list[tuple[JobHandle, JobStatus]]:
        """The replicas of a run that any process launched, and where each stands now; empty where none was."""
        ...

    def end(self, handles: Sequence[JobHandle], *, at_once: bool) -> None:
        """`cancel` several of one run together; `at_once`: without asking them to save.

        Raises:
            RunFailed: something is left, with how to end it by hand.
        """
        ...


@runtime_checkable
class Reaps(Protocol):
    """An executor that finds what carries our label, with or without a run directory."""

    def leftovers(self) -> list[JobHandle]:
        """Replicas of this user that are not over, of any run, whose name is the handle's fact `job`."""
        ...

    def deserted(self, run_dir: Path) -> bool:
        """Whether the process that was to wait for a run's replicas is gone."""
        ...

    def cancel(self, handle: JobHandle) -> None:
        """As an executor does, also without a ledger."""
        ...


@runtime_checkable
class Examines(Protocol):
    """An executor that can say whether it works here: `composer-run doctor --executor`."""

    def examine(self) -> Iterable[Finding]:
        """What is installed, reachable and authorised, each with what to do; starts nothing that lasts or costs."""
        ...
