"""A cluster that keeps accounts: how jobs ended that the controller has forgotten, from sacct."""

import sys
import time
from pathlib import Path

import pytest
from slurm_service import slurm_cluster_with_accounts, slurm_with_accounts  # noqa: F401

from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_executors.service import Replica
from composer_executors.settings import SlurmSettings
from composer_executors.slurm import SlurmService

pytestmark = pytest.mark.slow  # the database takes its time
SERVICE = SlurmService(SlurmSettings(stop_seconds=1))


@pytest.fixture
def ended(tmp_path, slurm_with_accounts):  # noqa: F811
    """Four replicas, ended and forgotten, their exit files gone: rank -> handle."""
    code = "import os, time; rank = int(os.environ['COMPOSER_RANK']); time.sleep(60 * (rank == 2)); exit(rank)"
    replicas = []
    for rank in range(4):
        folder = tmp_path / str(rank)
        folder.mkdir()
        command = (sys.executable, "-c", code)
        replicas.append(Replica("accounts", rank, 4, 0, command, {"COMPOSER_RANK": str(rank)}, folder, None, None))
    handles = list(SERVICE.submit(replicas))
    patiently(lambda: SERVICE.poll(handles[2:3])[0].state is JobState.RUNNING)
    slurm_with_accounts.ask("scancel", handles[2].id)
    patiently(lambda: all(status.state.over for status in SERVICE.poll(handles)))
    patiently(lambda: not slurm_with_accounts.ask("squeue", "-h", "-t", "all"))
    for handle in handles:
        Path(handle.facts["exit"]).unlink(missing_ok=True)
    return handles


def patiently(true):
    deadline = time.monotonic() + 40
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_sacct_remembers_what_squeue_has_forgotten(ended):
    stranger = JobHandle("slurm", 0, ended[0].id, 0, {"job": "of another name"})
    assert SERVICE.poll(ended) == [
        JobStatus(JobState.SUCCEEDED, 0),
        JobStatus(JobState.FAILED, 1),
        JobStatus(JobState.CANCELLED, None, "cancelled"),
        JobStatus(JobState.FAILED, 3),
    ]
    assert SERVICE.poll([stranger]) == [
        JobStatus(JobState.UNKNOWN, None, "Slurm does not know it any more, and it left no exit file")
    ]
    (accounting,) = (one for one in SERVICE.examine() if one.name == "slurm accounting")
    assert accounting.found == "on (accounting_storage/slurmdbd)"
