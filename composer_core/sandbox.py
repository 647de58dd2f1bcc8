"""What code that nobody vouches for runs in, and what comes back of it.

    candidate   one program to run: arguments, stdin, files
    limits      what each candidate may use
    result      how it ended; one per candidate, in their order

A sandbox has no network and a read-only file system but for `/tmp`; a candidate finds its files in its working folder,
`WORK`, and is killed with all that it started. Who offers one is a plugin's business (`SandboxPlugin`). Light: standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

WORK = "/candidate"
"""Where a candidate starts and finds its files; read-only. It may write to /tmp."""


@dataclass(frozen=True)
class Limits:
    """What one candidate may use before it is ended."""

    seconds: float = 10.0
    """On the clock; and of processor time, for each of its processes or for all of them, as the sandbox can."""
    memory_mb: int = 512
    """What it holds in memory and in /tmp; MB are 2^20 bytes."""
    processes: int = 64
    """Processes and threads at a time."""
    output_kb: int = 256
    """Of stdout and stderr together; kB are 2^10 bytes."""
    disk_mb: int = 64
    """What /tmp holds."""


@dataclass(frozen=True)
class Candidate:
    """One program to run."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name, relative to `WORK`, -> content."""


@dataclass(frozen=True)
class Result:
    """How a candidate ended."""

    exit: int
    """As a shell gives it: 128 + n after signal n."""
    stdout: str
    """Bytes that are no UTF-8 are replaced."""
    stderr: str
    timed_out: bool
    """It used up its seconds."""
    oom: bool
    """It met its memory limit: the kernel killed a process of it; or, where the sandbox can only limit each process,
    it ended with an error and its last words were of memory."""
    truncated: bool
    """It wrote more than it may, and was ended."""
    seconds: float
    """On the clock, from its start to its end."""

    @property
    def why(self) -> str:
        """What ended it, in words."""
        if self.timed_out:
            return "ran out of time"
        if self.oom:
            return "ran out of memory"
        if self.truncated:
            return "wrote too much"
        return f"ended with exit code {self.exit}"


class Sandbox(Protocol):
    """Runs candidates. Made with `SandboxSettings`; raises MissingError then if it cannot work here."""

    python: str
    """The Python interpreter inside."""

    def run_batch(self, candidates: Sequence[Candidate], limits: Limits, *, workers: int | None = None) -> list[Result]:
        """Run all of them, `workers` at a time (default: one per processor), and wait for their ends.

        Raises:
            RunFailed: the sandbox itself broke; no candidate can make it.
        """
        ...
