"""What to start a replica with once more: a worker goes on from its newest checkpoint, anything else begins anew."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from composer_core.jobs import Job
from composer_core.run.directory import RunDirectory
from composer_core.run.resume import set_lines_aside

WORKER = "composer_core.run.worker"
RESUME = "--resume"


def is_worker(argv: Sequence[str]) -> bool:
    """Whether this trains a plan, in the run directory of its job."""
    return WORKER in argv


def travels(job: Job) -> bool:
    """Whether the run directory of this worker is on no disk that it sees."""
    return bool(job.store) and is_worker(job.argv)


def prepare_again(job: Job) -> tuple[tuple[str, ...], str]:
    """The arguments for another start, and in words where it goes on from. The one before must be over."""
    if not is_worker(job.argv):
        return job.argv, "the beginning"
    directory = RunDirectory(job.run_dir)
    # it named a process that is over; on another machine nobody else could tell
    (directory.path / "lock.json").unlink(missing_ok=True)
    if travels(job):
        return job.argv, "its newest checkpoint in the store"
    shutil.rmtree(directory.scratch, ignore_errors=True)
    complete = directory.complete_checkpoints()
    if not complete:
        set_lines_aside(directory, 0)
        return _without_resume(job.argv), "the beginning, as there is no checkpoint"
    step = complete[-1][0]
    return (*_without_resume(job.argv), RESUME, str(step)), f"the checkpoint of step {step}"


def _without_resume(argv: Sequence[str]) -> tuple[str, ...]:
    if RESUME not in argv:
        return tuple(argv)
    place = argv.index(RESUME)
    return (*argv[:place], *argv[place + 2 :])
