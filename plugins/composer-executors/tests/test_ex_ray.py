"""Ray for real: where jobs are placed, how one is ended that waits or that does not want to, and tokens."""

import re
import secrets
import sys
import time

import psutil
import pytest
from ray_service import ray_cluster, ray_cluster_with_token, ray_head, ray_head_with_token  # noqa: F401

from composer_core.errors import MissingError
from composer_core.jobs import JobState, JobStatus
from composer_core.run.doctor import Finding, Level
from composer_executors.ray import RayService
from composer_executors.service import Replica
from composer_executors.settings import RaySettings

# a cluster comes up in 15 seconds, and in some minutes where the machine is busy
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OVER = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" {mark} &', sys.executable, code])
time.sleep(600)
"""
"""Leaves a process to another parent, in a session of its own; neither ends by SIGTERM."""


def submit(service, tmp_path, code, **changes):
    values = {"env": {}, "folder": tmp_path, "time_limit_s": None, "gpu": None}
    job = f"run-{secrets.token_hex(4)}"
    (handle,) = service.submit([Replica(job, 0, 1, 0, (sys.executable, "-c", code), **{**values, **changes})])
    return handle


def until(true):
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_in(service, handle, *states):
    return service.poll([handle])[0].state in states


def test_a_job_that_waits_for_a_machine_is_ended(ray_head, tmp_path):  # noqa: F811
    here = RayService(RaySettings(address=ray_head.address, stop_seconds=3, gpu="H200:1"))
    gone = submit(here, tmp_path, "print('on a B200')", gpu=("B200", 1))
    placed = submit(here, tmp_path, "print('on a H200')", gpu=("H200", 1))
    until(lambda: is_in(here, placed, *OVER))
    assert here.poll([placed, placed]) == [JobStatus(JobState.SUCCEEDED, 0)] * 2
    (status,) = here.poll([gone])
    assert status.state is JobState.PENDING
    assert "waiting for resources" in status.reason
    assert here.remains(gone) == f"job {gone.id} of Ray (PENDING)"
    here.terminate(gone)
    until(lambda: not here.remains(gone))
    assert here.leftovers(gone.facts["job"]) == []
    assert [id for id in here._jobs() if "-end-" in id] == []


def test_what_left_its_group_and_its_parent_is_ended_too(ray_head, tmp_path):  # noqa: F811
    here = RayService(RaySettings(address=ray_head.address, stop_seconds=600))
    mark = secrets.token_hex(8)
    handle = submit(here, tmp_path, FAMILY.format(mark=mark))
    until(lambda: here.log(handle, 0) == b"up\n")
    (left,) = (one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[-1] == mark)
    here.kill(handle)
    until(lambda: not here.remains(handle))
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE  # its new parent buries it when it likes
    assert here.poll([handle]) == [JobStatus(JobState.CANCELLED, None, "cancelled")]


def test_the_name_of_a_job_is_taken_once(ray_head, tmp_path):  # noqa: F811
    here = RayService(RaySettings(address=ray_head.address))
    asked = Replica("run-" + secrets.token_hex(4), 0, 1, 0, ("true",), {}, tmp_path, None, None)
    list(here.submit([asked]))
    taken = f"Job with submission_id {asked.job}-0-0 already exists"
    with pytest.raises(Exception, match=taken):
        list(here.submit([asked]))


def test_doctor_says_that_no_node_has_what_is_wanted(ray_head):  # noqa: F811
    settings = RaySettings(address=ray_head.address, gpu="B200:8", num_cpus=64)
    nodes = list(RayService(settings).examine())[1]
    assert nodes == Finding(
        "ray nodes",
        Level.WARN,
        "1: 2 CPUs, 2 GPUs; none has GPU 8, CPU 64, accelerator_type:B200 0.001, so a replica would wait",
        "less of it, or nodes that have it; executor.start_minutes ends a run that waits in vain",
    )


def test_a_cluster_with_a_token_lets_in_who_has_it(ray_head_with_token, tmp_path, monkeypatch):  # noqa: F811
    here = RayService(RaySettings(address=ray_head_with_token.address))
    found = list(here.examine())
    assert [(one.name, one.level) for one in found] == [
        ("ray dashboard", Level.OK),
        ("ray nodes", Level.OK),
        ("ray job", Level.OK),
    ]
    assert re.fullmatch(r"one that does nothing took \d+\.\d s", found[2].found)
    handle = submit(here, tmp_path, "print('let in')")
    until(lambda: is_in(here, handle, *OVER))
    assert here.log(handle, 0) == b"let in\n"
    for token, said in (("f" * 64, "Forbidden: Invalid authentication token"), ("", "Missing authentication token")):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        with pytest.raises(MissingError, match=said):
            submit(here, tmp_path, "pass")
