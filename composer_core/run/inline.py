"""The executor `inline`: one child process on this machine, on the terminal of the command that started it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import FrameType

from composer_core.errors import RunFailed, Stopped, UsageError
from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_core.plugins.builtin_settings import InlineSettings
from composer_core.run.control import INTERRUPTED_TWICE, PARENT_VARIABLE
from composer_core.run.directory import RunDirectory
from composer_core.run.processes import death

QUIET_LIBRARIES = {
    # progress bars and chatter would tear our own display apart
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    # the trainer forks data workers after tokenising; the tokenizer's threads would deadlock there
    "TOKENIZERS_PARALLELISM": "false",
}
SHOW_CURSOR = "\x1b[?25h"
LOG_POLL_SECONDS = 0.2


class InlineExecutor:
    """Implements `protocols.Executor`. Knows the jobs it started itself, no others."""

    def __init__(self, settings: InlineSettings) -> None:
        self._settings = settings
        self._started: dict[str, tuple[subprocess.Popen[bytes], RunDirectory]] = {}
        self._cancelled: set[str] = set()

    def render(self, job: Job) -> Mapping[str, str]:
        """The command line, with the variables that it adds."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self._added(job).items()]
        return {"command": " ".join([*added, shlex.join(self._command(job))])}

    def launch(self, job: Job) -> list[JobHandle]:
        """Start the worker.

        Raises:
            UsageError: the interpreter of the settings cannot be run.
        """
        environment = {**QUIET_LIBRARIES, **os.environ, **self._added(job), PARENT_VARIABLE: str(os.getpid())}
        try:
            process = subprocess.Popen(self._command(job), env=environment, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise UsageError(f"cannot run {self._command(job)[0]}: {error.strerror}", at="executor.python") from error
        handle = JobHandle("inline", 0, str(process.pid))
        self._started[handle.id] = process, RunDirectory(job.run_dir)
        return [handle]

    def poll(self, handle: JobHandle) -> JobStatus:
        """From the child's exit code; a job of another process is UNKNOWN."""
        if handle.id not in self._started:
            return JobStatus(JobState.UNKNOWN, reason="not started by this process")
        code = self._started[handle.id][0].poll()
        if code is None:
            return JobStatus(JobState.RUNNING)
        if handle.id in self._cancelled:
            return JobStatus(JobState.CANCELLED, code)
        return JobStatus(JobState.SUCCEEDED if code == 0 else JobState.FAILED, code)

    def stream_logs(self, handle: JobHandle, *, follow: bool = True, last: int | None = None) -> Iterator[str]:
        """Of logs/worker.log."""
        known = list(self._lines(handle, follow=False))
        yield from known if last is None else known[max(0, len(known) - last) :]
        if follow:
            yield from islice(self._lines(handle, follow=True), len(known), None)

    def _lines(self, handle: JobHandle, *, follow: bool) -> Iterator[str]:
        _, directory = self._started[handle.id]
        log, offset, rest = directory.logs / "worker.log", 0, ""
        while True:
            # before reading: what came last is still read
            over = not follow or self.poll(handle).state is not JobState.RUNNING
            if log.is_file():
                with log.open(encoding="utf-8", errors="replace") as file:
                    file.seek(offset)
                    *lines, rest = (rest + file.read()).split("\n")
                    offset = file.tell()
                yield from lines
            if over:
                break
            time.sleep(LOG_POLL_SECONDS)
        if rest and self.poll(handle).state is not JobState.RUNNING:  # else it is half a line
            yield rest

    def cancel(self, handle: JobHandle) -> None:
        """Ask the worker to stop after its step."""
        process, _ = self._started[handle.id]
        self._cancelled.add(handle.id)
        process.terminate()  # does nothing once the child has been waited for

    def collect(self, handles: Sequence[JobHandle]) -> int:
        """Wait; results are in the run directory already. The worst exit code, 4 for a worker that was killed."""
        return max((self._wait(handle) for handle in handles), default=0)

    def _wait(self, handle: JobHandle) -> int:
        process, directory = self._started[handle.id]
        with _hand_on_signals(process) as interrupts:
            code = process.wait()
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)  # a killed worker could not give it back
        if interrupts[signal.SIGINT] >= 2:
            return _ended(directory, "interrupted twice", INTERRUPTED_TWICE)
        if code == -signal.SIGTERM and (interrupts[signal.SIGTERM] or handle.id in self._cancelled):
            # it came before the worker could catch it
            return _ended(directory, "stopped before the worker was up", Stopped.exit_code, event="stopped")
        if code < 0 and directory.state().state == "done":
            # all its work was done; what follows is the report
            print(f"the worker {death(code)} after the run was done; the report may be missing", file=sys.stderr)
            return 0
        if code < 0:
            return _ended(directory, f"the worker {death(code)}", RunFailed.exit_code)
        return code

    def _command(self, job: Job) -> list[str]:
        return [self._settings.python or sys.executable, *job.argv]

    def _added(self, job: Job) -> dict[str, str]:
        threads = {} if self._settings.threads is None else {"OMP_NUM_THREADS": str(self._settings.threads)}
        return {**job.env, **threads}


def _ended(directory: RunDirectory, reason: str, exit_code: int, *, event: str = "failed") -> int:
    """Say for the worker, which could not, how it ended."""
    message = f"{reason}; last complete checkpoint: {directory.newest_checkpoint()}"
    directory.event(event, reason=message, exit_code=exit_code)
    print(message, file=sys.stderr)
    return exit_code


@contextmanager
def _hand_on_signals(process: subprocess.Popen[bytes]) -> Iterator[dict[signal.Signals, int]]:
    """While waiting, this process outlives Ctrl-C and passes the wish to stop on; yields how often each came.

    On a terminal Ctrl-C reaches the child too. One sent to this process alone does not, hence SIGTERM, which a worker
    that has the Ctrl-C already takes for the same wish.
    """
    received = {signal.SIGINT: 0, signal.SIGTERM: 0}

    def hand_on(number: int, frame: FrameType | None) -> None:
        received[signal.Signals(number)] += 1
        if received[signal.SIGINT] >= 2:
            process.kill()
        else:
            process.terminate()

    before = {number: signal.signal(number, hand_on) for number in received}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
