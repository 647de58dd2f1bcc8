"""From a job to its replicas: interpreter, environment contract, secrets, folders, limits.

    COMPOSER_RUN_ID       the job's name        COMPOSER_RANK       0 .. world size - 1
    COMPOSER_WORLD_SIZE   how many replicas     COMPOSER_ATTEMPT    how often this one was started before
    COMPOSER_STORE_URI    where results go

These five are all that a replica can rely on, wherever it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from composer_core.errors import MissingError
from composer_core.jobs import Job
from composer_core.run.inline import QUIET_LIBRARIES
from composer_executors.ledger import REPLICAS, Entry
from composer_executors.service import Replica
from composer_executors.settings import JobSettings


def contract(job: Job, *, rank: int, attempt: int) -> dict[str, str]:
    """The five variables."""
    return {
        "COMPOSER_RUN_ID": job.name,
        "COMPOSER_RANK": str(rank),
        "COMPOSER_WORLD_SIZE": str(job.replicas),
        "COMPOSER_ATTEMPT": str(attempt),
        "COMPOSER_STORE_URI": job.store or job.run_dir.absolute().as_uri(),
    }


def placed(job: Job, settings: JobSettings) -> Job:
    """The job with its own part of the settings' store."""
    if settings.store is None or job.store:
        return job
    return replace(job, store=f"{settings.store.rstrip('/')}/{job.name}")


def replica_of(
    job: Job,
    settings: JobSettings,
    *,
    rank: int,
    attempt: int,
    secrets: Mapping[str, str],
    argv: Sequence[str] | None = None,
) -> Replica:
    """One start of one replica; `argv` where it differs from the job's."""
    plain = {name: value for name, value in QUIET_LIBRARIES.items() if name not in os.environ}
    # else what a worker prints waits in a buffer, and is lost when it is killed
    plain["PYTHONUNBUFFERED"] = "1"
    limit = None if job.time_limit_s is None else job.time_limit_s + settings.stop_seconds
    return Replica(
        job=job.name,
        rank=rank,
        world=job.replicas,
        attempt=attempt,
        command=(settings.python or sys.executable, *(job.argv if argv is None else argv)),
        env={**plain, **settings.env, **job.env, **contract(job, rank=rank, attempt=attempt)},
        folder=folder_of(job.run_dir, rank=rank, attempt=attempt),
        time_limit_s=limit,
        gpu=settings.gpus(),
        secrets=secrets,
        detached=job.detached,
    )


def folder_of(run_dir: Path, *, rank: int, attempt: int) -> Path:
    """Of one start of a replica: what an earlier one left there must not be taken for its own."""
    return run_dir.absolute() / REPLICAS / str(rank) / f"attempt_{attempt}"


def make_folder(run_dir: Path, entry: Entry) -> None:
    """Before the service is asked to start it."""
    folder_of(run_dir, rank=entry.rank, attempt=entry.attempt).mkdir(parents=True, exist_ok=True)


def secrets_of(job: Job, settings: JobSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that the job and the settings name.

    Raises:
        MissingError: one of them is not set.
    """
    names = dict.fromkeys([*job.secrets, *settings.secrets])
    for name in names:
        if name not in environ:
            raise MissingError(f"the environment variable {name} is not set", at="executor", fix=f"export {name}=...")
    return {name: environ[name] for name in names}
