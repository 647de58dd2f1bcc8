"""What every place to run has to be able to do; all else (`executor.py`) is shared.

A `Service` starts one process per replica and answers questions about it. It keeps nothing in memory that another
process would need: a handle says everything, with the job's name under `job` in its facts. It retries nothing, books
nothing and waits for nobody: ledger, restarts, deadlines, log streams and the verdict over a whole job are the
executor's. To add a place, write a `Service`, its settings and its line in `plugin.py`; the contract suite
(`composer_core.testing.executor_contract`) then runs on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from composer_core.jobs import JobHandle, JobStatus
from composer_core.run.doctor import Finding

LABEL = "composer-run"
"""Under which a job's name stands at a service that has labels; where it has none, the name begins so."""


@dataclass(frozen=True)
class Replica:
    """One process to start."""

    job: str
    """Of the job, unique."""
    rank: int
    world: int
    attempt: int
    command: tuple[str, ...]
    """Program and arguments, the interpreter included."""
    env: Mapping[str, str]
    """All that it is to get beside what the machine has, the contract's `COMPOSER_*` among it and no secret."""
    folder: Path
    """Of this replica, on this machine, for what the service writes: scripts, logs, exit codes. It is there."""
    time_limit_s: float | None
    gpu: tuple[str, int] | None
    """Kind in the service's own words ("" for any), and how many; None: none."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More of its environment: never written to a file, a command line or a listing that others can read, and not to
    a file that stays. `render` gets them with empty values."""
    detached: bool = False
    """Whether it must live on when the process that submits it is gone. One that must not may do so only where the
    service has no means to end it then; `composer-run reap` finds it."""


class Service(Protocol):
    """A place where replicas run. Made with its settings."""

    name: str
    """As a spec calls it."""

    def render(self, replicas: Sequence[Replica]) -> Mapping[str, str]:
        """What it would submit: file or command -> text, without any secret's value; changes nothing."""
        ...

    def submit(self, replicas: Sequence[Replica]) -> Iterator[JobHandle]:
        """Start them, and give each one's handle as soon as it is started: whoever asks cancels those before a failure.

        Raises:
            UsageError: a field of the settings, such as an unknown kind of GPU: with the field and the fix.
            MissingError: the service is not installed, not reachable or does not let us in.
            RunFailed: it refuses, in its own words.
        """
        ...

    def poll(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """Where each stands, by as few questions as the service allows. One that it does not know is UNKNOWN, unless
        something in the replica's folder tells how it ended; so are all when it does not answer.
        """
        ...

    def log(self, handle: JobHandle, offset: int) -> bytes:
        """What the replica wrote, stdout and stderr as they came, from this byte on; b"" where there is nothing new."""
        ...

    def terminate(self, handle: JobHandle) -> None:
        """Ask its processes to end (SIGTERM); nothing where it is over."""
        ...

    def kill(self, handle: JobHandle) -> None:
        """End its processes, all of them; nothing where it is over."""
        ...

    def remains(self, handle: JobHandle) -> str:
        """What of it still runs or still costs something, in words; "" where nothing does."""
        ...

    def leftovers(self, job: str | None) -> list[JobHandle]:
        """What carries our label and is not over, of this job or of any; in this user's name only. Needs no ledger:
        the job's name, the rank and the attempt come from the service.
        """
        ...

    def examine(self) -> Iterable[Finding]:
        """For `composer-run doctor --executor`: what is installed, reachable and authorised, and one harmless real
        probe; each with what to do.
        """
        ...
