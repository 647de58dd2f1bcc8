"""Slurm for real: what is submitted, refused, cancelled, preempted, forgotten; and a controller that goes away."""

import getpass
import re
import sys
import time
from pathlib import Path

import pytest
from slurm_service import slurm, slurm_cluster  # noqa: F401

from composer_core.errors import MissingError, UsageError
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.doctor import Finding, Level
from composer_executors import slurm as service_module
from composer_executors.service import Replica
from composer_executors.settings import SlurmSettings
from composer_executors.slurm import SlurmService
from composer_executors.slurm_script import arrays, script

pytestmark = pytest.mark.usefixtures("slurm")
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
UNKNOWN = JobStatus(JobState.UNKNOWN, None, "Slurm does not know it any more, and it left no exit file")


@pytest.fixture
def replicas(tmp_path):
    """Makes the replicas of a job that runs this code."""

    def make(code, count=1, **changes):
        made = []
        for rank in range(count):
            folder = tmp_path / str(rank)
            folder.mkdir(exist_ok=True)
            env = {"COMPOSER_RANK": str(rank), "COMPOSER_ATTEMPT": "0"}
            values = {"env": env, "folder": folder, "time_limit_s": None, "gpu": None}
            command = (sys.executable, "-c", code)
            made.append(Replica(tmp_path.name, rank, count, 0, command, **{**values, **changes}))
        return made

    return make


@pytest.fixture
def service(slurm):  # noqa: F811
    """Makes services; ends what they started."""
    yield lambda **settings: SlurmService(SlurmSettings(stop_seconds=1, **settings))
    slurm.ask("scancel", "-u", getpass.getuser())


def until(service, handle, wanted, *, seconds=30.0):
    """Wait for a state (or for any of several)."""
    deadline = time.monotonic() + seconds
    while (status := service.poll([handle])[0]).state not in wanted:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def until_polled(service, handles, wanted):
    deadline = time.monotonic() + 30
    while (statuses := service.poll(handles)) != wanted:
        assert time.monotonic() < deadline, statuses
        time.sleep(0.1)


def until_up(service, handle):
    deadline = time.monotonic() + 30
    while b"up\n" not in service.log(handle, 0):
        assert time.monotonic() < deadline, service.poll([handle])
        time.sleep(0.1)


def until_over(service, handle):
    return until(service, handle, (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED))


# -- what is submitted -------------------------------------------------------------------------------------------------


def test_what_is_rendered_is_what_slurm_has_and_holds_no_secret(slurm, service, replicas):  # noqa: F811
    here = service(partition="debug", cpus_per_task=2, mem="100M", constraint="nvlink", gpu="H200:1")
    asked = replicas(SLEEP, 2, gpu=("h200", 1), time_limit_s=3600.0, secrets={"TOKEN": "s3cr3t-value"})
    (text,) = here.render(asked).values()
    handles = list(here.submit(asked))
    array = handles[0].id.partition("_")[0]
    assert [(handle.id, handle.rank, handle.attempt) for handle in handles] == [(f"{array}_{n}", n, 0) for n in (0, 1)]
    assert slurm.ask("scontrol", "write", "batch_script", array, "-").rstrip("\n") == text.rstrip("\n")
    shown = slurm.ask("scontrol", "show", "job", "-dd", array)
    assert "TimeLimit=01:00:00" in shown
    assert "TresPerNode=gres:gpu:h200:1" in shown
    assert "s3cr3t-value" not in shown + text


def test_gpus_are_set_aside(slurm, service, replicas):  # noqa: F811
    here = service()
    first, second, third = (next(iter(here.submit(replicas(SLEEP, gpu=("h200", 1))))) for _ in range(3))
    until(here, second, [JobState.RUNNING])
    until(here, first, [JobState.RUNNING])
    assert here.poll([third])[0].state is JobState.PENDING
    here.kill(first)
    until(here, third, [JobState.RUNNING])


def test_variables_of_an_allocation_around_do_not_steer_it(service, replicas, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    here = service(mem="10M")
    (handle,) = here.submit(replicas("import os; print(os.environ.get('SLURM_MEM_PER_CPU'))"))
    assert until_over(here, handle) == JobStatus(JobState.SUCCEEDED, 0)
    assert here.log(handle, 0) == b"None\n"


def test_one_question_for_all_replicas(service, replicas, monkeypatch):
    here = service()
    handles = list(here.submit(replicas("pass", 3)))
    asked, call = [], service_module.call
    monkeypatch.setattr(service_module, "call", lambda *argv: asked.append(argv[0]) or call(*argv))
    here.poll(handles)
    assert asked == ["squeue"]


# -- what is refused ---------------------------------------------------------------------------------------------------

NODES = "nodes here: debug* gres=gpu:h200:2 cpus=8 memory=4000M nodes=1, short gres=gpu:h200:2 cpus=8 memory=4000M"
NODES += " nodes=1, spot gres=gpu:h200:2 cpus=8 memory=4000M nodes=1"
UNAVAILABLE = "Batch job submission failed: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (
            {"partition": "nowhere"},
            {},
            "executor.partition: Slurm refuses: invalid partition specified: nowhere; Batch job submission failed: "
            "Invalid partition name specified\n  fix: one of: debug*, short, spot",
        ),
        (
            {},
            {"gpu": ("b200", 1)},
            f"executor.gpu, cpus_per_task or mem: Slurm refuses: {UNAVAILABLE}\n  fix: {NODES}",
        ),
        (
            {},
            {"gpu": ("h200", 5)},
            f"executor.gpu, cpus_per_task or mem: Slurm refuses: {UNAVAILABLE}\n  fix: {NODES}",
        ),
        (
            {"cpus_per_task": 99},
            {},
            "executor.cpus_per_task: Slurm refuses: Batch job submission failed: More processors requested than "
            f"permitted\n  fix: {NODES}",
        ),
        (
            {"constraint": "nofeat"},
            {},
            "executor.constraint: Slurm refuses: Batch job submission failed: Invalid feature specification\n"
            "  fix: features of nodes here: nvlink",
        ),
        (
            {"partition": "short"},
            {"time_limit_s": 600.0},
            "limits.hours: Slurm refuses: Batch job submission failed: Requested time limit is invalid (missing or "
            "exceeds some limit)\n  fix: limits here: debug* time=infinite, short time=2:00, spot time=infinite",
        ),
        (
            {"sbatch": {"frobnicate": "1"}},
            {},
            "executor.sbatch: Slurm refuses: sbatch: unrecognized option '--frobnicate=1'\n"
            "  fix: sbatch --help lists its options",
        ),
    ],
    ids=["partition", "gpu-kind", "gpu-count", "cpus", "constraint", "time", "option"],
)
def test_a_refusal_names_the_field_and_what_there_is(service, replicas, settings, changes, message):
    here, asked = service(**settings), replicas("pass", **changes)
    with pytest.raises(UsageError) as refusal:
        list(here.submit(asked))
    assert str(refusal.value) == message
    assert here.leftovers(asked[0].job) == []


def test_no_configuration_is_missing(service, replicas, monkeypatch, tmp_path):
    here = service()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
    with pytest.raises(MissingError) as missing:
        list(here.submit(replicas("pass")))
    assert str(missing.value) == (
        f"executor slurm: SLURM_CONF is {tmp_path}/nowhere.conf, where there is no file\n"
        "  fix: unset it, or export SLURM_CONF=..."
    )


def test_no_sbatch_is_missing(slurm, replicas, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError) as missing:
        list(SlurmService(SlurmSettings()).submit(replicas("pass")))
    assert str(missing.value) == (
        "executor slurm: sbatch is not installed here\n  fix: start it on a login node of the cluster"
    )


# -- cancelled, by us and by others ------------------------------------------------------------------------------------


def test_only_the_replica_that_was_meant_is_taken_out_of_the_queue(service, replicas):
    here = service(sbatch={"begin": "now+1hour"})
    first, second, third = here.submit(replicas(SLEEP, 3))
    waits = JobStatus(JobState.PENDING, None, "BeginTime")
    until_polled(here, [first], [waits])
    here.terminate(first)
    gone = JobStatus(JobState.CANCELLED, None, "cancelled")
    until_polled(here, [first, second, third], [gone, waits, waits])
    here.kill(second)
    until_polled(here, [first, second, third], [gone, gone, waits])
    assert (here.remains(second), here.remains(third)) == ("", f"job {third.id} of Slurm (PENDING)")
    here.kill(third)
    until_polled(here, [first, second, third], [gone, gone, gone])


def test_one_of_two_is_asked_to_end_and_saves(service, replicas):
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(9)"
    here = service()
    first, second = here.submit(replicas(code, 2))
    until_up(here, first)
    until_up(here, second)
    here.terminate(second)
    assert until_over(here, second) == JobStatus(JobState.CANCELLED, 5, "cancelled")
    assert here.remains(first) == f"job {first.id} of Slurm (RUNNING)"
    assert here.poll([first, second])[0].state is JobState.RUNNING


def test_the_users_own_scancel_is_a_cancel(slurm, service, replicas):  # noqa: F811
    here = service()
    (handle,) = here.submit(replicas(SLEEP))
    until_up(here, handle)
    slurm.ask("scancel", handle.id)
    assert until_over(here, handle).state is JobState.CANCELLED


def test_orders_to_one_that_is_over_do_nothing(service, replicas):
    here = service()
    (handle,) = here.submit(replicas("pass"))
    until_over(here, handle)
    here.terminate(handle)
    here.kill(handle)
    assert here.poll([handle]) == [JobStatus(JobState.SUCCEEDED, 0)]


def test_a_job_of_the_same_id_and_another_name_is_left_alone(service, replicas):
    here = service()
    (handle,) = here.submit(replicas(SLEEP))
    until_up(here, handle)
    stranger = JobHandle("slurm", 0, handle.id, 0, {"job": "another"})
    here.terminate(stranger)
    here.kill(stranger)
    assert (here.poll([stranger]), here.remains(stranger)) == ([UNKNOWN], "")
    assert here.poll([handle])[0].state is JobState.RUNNING


@pytest.mark.parametrize("options", [{}, {"begin": "now+1hour"}], ids=["running", "waiting"])
def test_leftovers_tell_all_that_a_handle_does(service, replicas, options):
    here = service(sbatch=options)
    handles = list(here.submit(replicas(SLEEP, 2)))
    for handle in handles if not options else ():
        until_up(here, handle)
    name = handles[0].facts["job"]
    assert sorted(here.leftovers(name), key=lambda one: one.rank) == handles
    assert [one for one in here.leftovers(None) if one.facts["job"] == name]
    assert here.leftovers("another") == []


# -- started again, preempted, not started -----------------------------------------------------------------------------

ATTEMPT = (
    "import os, time; print('attempt', os.environ['COMPOSER_ATTEMPT'], 'up', sep='\\n', flush=True); time.sleep(9)"
)


def test_a_preempted_replica_has_failed(service, replicas):
    spot, high = service(partition="spot"), service(partition="debug")
    (low,) = spot.submit(replicas(ATTEMPT, gpu=("h200", 2)))
    until_up(spot, low)
    (other,) = high.submit(replicas(SLEEP, gpu=("h200", 1)))
    assert until_over(spot, low) == JobStatus(JobState.FAILED, None, "preempted")
    until(high, other, [JobState.RUNNING])


def test_one_that_may_be_requeued_runs_again_as_another_attempt(slurm, service, replicas):  # noqa: F811
    here = service(requeue=True)
    (handle,) = here.submit(replicas(ATTEMPT))
    until_up(here, handle)
    slurm.ask("scontrol", "requeue", handle.id)
    until_polled(here, [handle], [JobStatus(JobState.PENDING, None, "BeginTime")])
    time.sleep(1.5)  # the node refuses a second start within the second of the first one's end
    slurm.ask("scontrol", "update", f"JobId={handle.id}", "StartTime=now")  # else in two minutes
    deadline = time.monotonic() + 30
    while here.log(handle, 0).count(b"up\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = [line for line in here.log(handle, 0).decode().splitlines() if re.fullmatch(r"[01]", line)]
    assert lines == ["0", "1"]
    assert here.poll([handle])[0].state is JobState.RUNNING


def test_a_node_that_does_not_see_the_folder_is_said(slurm, service, replicas):  # noqa: F811
    here = service(sbatch={"hold": ""})
    asked = replicas("pass")
    (handle,) = here.submit(asked)
    for file in asked[0].folder.iterdir():
        file.unlink()
    asked[0].folder.rmdir()
    slurm.ask("scontrol", "release", handle.id)
    assert until_over(here, handle) == JobStatus(
        JobState.FAILED, None, "Slurm could not start it: does the node see the run directory?"
    )


# -- forgotten, and a controller that is away --------------------------------------------------------------------------


@pytest.mark.slow  # Slurm forgets every few seconds
def test_what_slurm_forgot_is_known_from_the_exit_file_alone(slurm, service, replicas):  # noqa: F811
    here = service()
    slurm.configure(min_job_age=2)
    try:
        (handle,) = here.submit(replicas("raise SystemExit(3)"))
        until_over(here, handle)
        deadline = time.monotonic() + 20
        while handle.id.partition("_")[0] in slurm.ask("squeue", "-h", "-t", "all", "-o", "%F"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        slurm.configure(min_job_age=300)
    assert here.poll([handle]) == [JobStatus(JobState.FAILED, 3)]
    Path(handle.facts["exit"]).unlink()
    assert here.poll([handle]) == [UNKNOWN]


@pytest.mark.slow  # each question waits some seconds for an answer
def test_a_controller_that_goes_away_and_comes_back(slurm, service, replicas):  # noqa: F811
    here = service()
    (handle,) = here.submit(replicas(SLEEP))
    until_up(here, handle)
    slurm.stop_controller()
    try:
        (status,) = here.poll([handle])
        assert status.state is JobState.UNKNOWN
        assert status.reason == (
            "no controller of Slurm answers: Unable to contact slurm controller (connect failure) "
            f"(SLURM_CONF is {slurm.conf})"
        )
        assert here.remains(handle).startswith(f"perhaps job {handle.id} of Slurm: no controller")
        with pytest.raises(MissingError, match="no controller of Slurm answers"):
            here.kill(handle)
        assert [finding.level for finding in here.examine()] == [Level.OK, Level.FAIL]
    finally:
        slurm.start_controller()
    assert until(here, handle, [JobState.RUNNING]).reason == ""
    here.kill(handle)
    assert until_over(here, handle).state is JobState.CANCELLED


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_everything_and_queues_nothing(slurm, service):  # noqa: F811
    *others, job = service(gpu="H200:2").examine()
    version, controller, partitions, accounting = others
    assert version == Finding("slurm version", Level.OK, "slurm-wlm 22.05.8 (tested with 22.05)")
    assert re.fullmatch(r"Slurmctld\(primary\) at .* is UP", controller.found)
    assert partitions.found.startswith("debug* (up, 1 nodes ")
    assert accounting.found == "off: how a job ended is in Slurm for 300 sec, then in the run directory alone"
    assert job.level is Level.OK
    assert re.fullmatch(r"Job \d+ to start at .* using 1 processors on nodes localhost in partition debug", job.found)
    assert "composer-doctor" not in slurm.ask("squeue", "-h", "-u", getpass.getuser(), "-o", "%j")


def test_doctor_says_which_setting_is_refused(service):
    *_, job = service(partition="nowhere").examine()
    assert (job.level, job.fix) == (Level.FAIL, "one of: debug*, short, spot")
    assert job.found.startswith("executor.partition: Slurm refuses: ")


def test_a_script_is_readable_by_sbatch_whatever_the_path(slurm, service, replicas, tmp_path):  # noqa: F811
    folder = tmp_path / 'it\'s "odd" 100% $HOME'
    folder.mkdir()
    here, asked = service(), replicas("print('here')", folder=folder)
    (handle,) = here.submit(asked)
    assert until_over(here, handle) == JobStatus(JobState.SUCCEEDED, 0)
    assert here.log(handle, 0) == b"here\n"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["slurm-0.sh", f"slurm-{handle.id}.log", f"slurm-{handle.id}.exit"]
    )
    assert (folder / "slurm-0.sh").read_text() == script(arrays(asked)[0], SlurmSettings(stop_seconds=1))
