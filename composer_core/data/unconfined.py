"""`sandbox: none`: programs run as this user, who can be robbed; only time and output are limited."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.run.bounded import Ended, Start, in_parallel, run_bounded
from composer_core.sandbox import Candidate, Limits, Result


class Unconfined:
    """Implements `sandbox.Sandbox` without a sandbox. What leaves its process group (`setsid`) outlives it."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.python = sys.executable

    def run_batch(self, candidates: Sequence[Candidate], limits: Limits, *, workers: int | None = None) -> list[Result]:
        """Run each in a new folder, which is removed afterwards; memory, processes and /tmp are not limited."""
        return in_parallel(lambda candidate: _run(candidate, limits), candidates, workers=workers)


def _run(candidate: Candidate, limits: Limits) -> Result:
    with tempfile.TemporaryDirectory(prefix="composer-") as folder:
        write_files(candidate, Path(folder))
        start = Start(candidate.argv, candidate.stdin, env={**os.environ, "TMPDIR": folder}, cwd=folder)
        try:
            ended = run_bounded(start, seconds=limits.seconds, output_bytes=limits.output_kb * 1024)
        except OSError as error:  # as a shell says it
            return Result(127, "", f"{candidate.argv[0]}: {error.strerror}\n", False, False, False, 0.0)
    return as_result(ended, oom=False)


def write_files(candidate: Candidate, folder: Path) -> None:
    """Its files under `folder`, readable by anybody who gets there."""
    for name, content in candidate.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o444)


def as_result(ended: Ended, *, oom: bool, timed_out: bool = False) -> Result:
    """The end of a program as the end of a candidate; what the sandbox knows beside is added."""
    return Result(
        exit=ended.code,
        stdout=ended.stdout.decode("utf-8", "replace"),
        stderr=ended.stderr.decode("utf-8", "replace"),
        timed_out=ended.timed_out or timed_out,
        oom=oom,
        truncated=ended.truncated,
        seconds=ended.seconds,
    )
