"""How a replica ended, as an exit code and in words; and whether starting it again can help. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.errors import MissingError, RunFailed, Stopped, UsageError
from composer_core.jobs import JobState, JobStatus

TIMEOUT = "timeout"
NO_USE = (UsageError.exit_code, MissingError.exit_code, Stopped.exit_code)
"""Exit codes that another try does not change."""
_BEYOND = 125
"""Higher exit codes are a shell's, for signals and commands that are not there."""


def exit_code(status: JobStatus) -> int:
    """Of a replica that is over: its own where it has one to say, else the one for failed or stopped."""
    if status.state is JobState.SUCCEEDED:
        return 0
    own = status.exit_code
    if own is not None and 0 < own <= _BEYOND:
        return own
    return Stopped.exit_code if status.state is JobState.CANCELLED else RunFailed.exit_code


def worst(codes: Iterable[int]) -> int:
    """Of several replicas: any failure is worse than a stop, and a stop worse than an end."""
    return max(codes, key=lambda code: (code != 0, code != Stopped.exit_code, code), default=0)


def worth_another_try(status: JobStatus) -> bool:
    """Whether a failure may be one of the machine: not a mistake, not a stop, not the end of the time it was given."""
    return status.state is JobState.FAILED and exit_code(status) not in NO_USE and status.reason != TIMEOUT
