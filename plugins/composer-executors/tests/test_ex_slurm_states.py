"""What Slurm's words mean to us, without Slurm."""

import subprocess

import pytest

from composer_core.errors import RunFailed, UsageError
from composer_core.jobs import JobState, JobStatus
from composer_executors import slurm_commands
from composer_executors.slurm_commands import plain_environment, refused
from composer_executors.slurm_states import (
    STATES,
    Record,
    exit_code,
    read_accounts,
    read_queue,
    status_of,
    status_of_file,
)


def status(state, *, reason="None", code=0, file=None, requeue=False):
    return status_of(Record("7_0", state, reason, code, "", "run"), file, requeue=requeue)


def test_lines_of_squeue():
    # as 22.05 prints them; the second are tasks cancelled while they waited, and the name of the third has a bar
    text = (
        "3|0|FAILED|NonZeroExitCode|1280|composer-run:a:0|a|\n"
        "7|N/A|CANCELLED|BeginTime|0|(null)|a|\n"
        "20|2|RUNNING|None|0|(null)|b|c|\n"
    )
    assert read_queue(text) == [
        Record("3_0", "FAILED", "NonZeroExitCode", 5, "composer-run:a:0", "a"),
        Record("7", "CANCELLED", "BeginTime", 0, "(null)", "a"),
        Record("20_2", "RUNNING", "None", 0, "(null)", "b|c"),
    ]


def test_lines_of_sacct():
    text = "3_0|FAILED|3:0|a\n3_1|CANCELLED by 1000|0:15|a\n4_[0-3]|PENDING|0:0|a\n5|COMPLETED|0:0|sh\n"
    assert read_accounts(text) == [
        Record("3_0", "FAILED", "", 3, "", "a"),
        Record("3_1", "CANCELLED", "", -15, "", "a"),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0:0", 0),
        ("3:0", 3),
        ("0:15", -15),
        ("768", 3),  # 3 * 256
        ("15", -15),
        # the script says 128 + 9 of a command that was killed: as it is, and times 256
        ("137:0", -9),
        ("35072", -9),
        # neither an end nor a signal: a stopped process
        ("127", None),
        ("", None),
    ],
)
def test_exit_codes_are_those_of_subprocess(text, code):
    assert exit_code(text) == code


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected"),
    [
        ("PENDING", "Resources", 0, JobStatus(JobState.PENDING, None, "Resources")),
        ("PENDING", "PartitionConfig", 0, JobStatus(JobState.PENDING, None, "unschedulable: PartitionConfig")),
        ("SUSPENDED", "None", 0, JobStatus(JobState.PENDING)),
        ("RUNNING", "None", 0, JobStatus(JobState.RUNNING)),
        # how it ended is not said before it is done
        ("COMPLETING", "NonZeroExitCode", 3, JobStatus(JobState.RUNNING)),
        ("COMPLETED", "None", 0, JobStatus(JobState.SUCCEEDED, 0)),
        ("FAILED", "NonZeroExitCode", 3, JobStatus(JobState.FAILED, 3)),
        (
            "FAILED",
            "NonZeroExitCode",
            -9,
            JobStatus(JobState.FAILED, -9, "was killed by SIGKILL (by the system when memory runs out)"),
        ),
        ("FAILED", "BadConstraints", -1, JobStatus(JobState.FAILED, None, "unschedulable: BadConstraints")),
        ("TIMEOUT", "TimeLimit", 0, JobStatus(JobState.FAILED, None, "timeout")),
        ("OUT_OF_MEMORY", "OutOfMemory", -9, JobStatus(JobState.FAILED, None, "oom")),
        ("NODE_FAIL", "NodeDown", 0, JobStatus(JobState.FAILED, None, "its node failed")),
        ("PREEMPTED", "None", 0, JobStatus(JobState.FAILED, None, "preempted")),
        ("CANCELLED", "None", -15, JobStatus(JobState.CANCELLED, None, "cancelled")),
        ("BRAND_NEW", "None", 0, JobStatus(JobState.UNKNOWN, None, "Slurm says BRAND_NEW")),
    ],
)
def test_states(state, reason, code, expected):
    assert status(state, reason=reason, code=code) == expected


def test_a_preempted_replica_that_may_come_back_waits():
    assert status("PREEMPTED", requeue=True) == JobStatus(JobState.PENDING, None, "preempted")


def test_only_one_state_is_a_success():
    assert [name for name, state in STATES.items() if state is JobState.SUCCEEDED] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 -", JobStatus(JobState.SUCCEEDED, 0)),
        ("0 cancelled", JobStatus(JobState.SUCCEEDED, 0)),
        ("3 -", JobStatus(JobState.FAILED, 3)),
        ("5 cancelled", JobStatus(JobState.CANCELLED, 5, "cancelled")),
        ("137 cancelled", JobStatus(JobState.CANCELLED, -9, "cancelled")),
        ("5 timeout", JobStatus(JobState.FAILED, 5, "timeout")),
        ("5 terminated", JobStatus(JobState.FAILED, 5, "Slurm asked it to end, as before a preemption")),
        ("- cancelled", JobStatus(JobState.CANCELLED, None, "cancelled")),
        ("", None),
        ("0", None),
    ],
)
def test_the_exit_file(tmp_path, text, expected):
    file = tmp_path / "exit"
    file.write_text(text)
    assert status_of_file(file) == expected


@pytest.mark.parametrize("file", [None, "missing"])
def test_no_exit_file_says_nothing(tmp_path, file):
    assert status_of_file(file and tmp_path / file) is None


def test_a_replica_that_we_cancelled_has_not_failed(tmp_path):
    (tmp_path / "exit").write_text("5 cancelled\n")
    assert status("FAILED", reason="NonZeroExitCode", code=5, file=tmp_path / "exit") == JobStatus(
        JobState.CANCELLED, 5, "cancelled"
    )


def test_a_file_that_says_success_does_not_hide_a_failure(tmp_path):
    (tmp_path / "exit").write_text("0 -\n")
    assert status("FAILED", reason="NonZeroExitCode", code=3, file=tmp_path / "exit") == JobStatus(JobState.FAILED, 3)


# -- complaints --------------------------------------------------------------------------------------------------------


def complained(stderr):
    return refused(subprocess.CompletedProcess(("sbatch",), 1, "", stderr))


@pytest.fixture
def _a_cluster(monkeypatch):
    monkeypatch.setattr(slurm_commands, "partitions", lambda pattern: [f"<{pattern}>"])


@pytest.mark.usefixtures("_a_cluster")
@pytest.mark.parametrize(
    ("said", "at", "fix"),
    [
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "executor.account",
            "sacctmgr show associations user=$USER lists yours",
        ),
        ("Batch job submission failed: Invalid qos specification", "executor.qos", "sacctmgr show qos lists them"),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "limits.hours",
            "limits here: <%P time=%l>",
        ),
    ],
    ids=["account", "qos", "time"],
)
def test_a_refusal_names_its_field(said, at, fix):
    error = complained(f"sbatch: error: {said}\n")
    assert isinstance(error, UsageError)
    assert str(error) == f"{at}: Slurm refuses: {said}\n  fix: {fix}"


def test_another_refusal_is_told_in_its_own_words():
    error = complained("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy\n")
    assert isinstance(error, RunFailed)
    assert str(error) == (
        "executor slurm: Slurm refuses: Batch job submission failed: Job violates accounting/QOS policy"
    )


def test_variables_that_steer_the_commands_do_not_reach_them():
    given = {"SBATCH_QOS": "a", "SLURM_JOB_ID": "5", "SQUEUE_FORMAT": "x", "COMPOSER_PARENT": "1"}
    assert plain_environment({**given, "SLURM_CONF": "/c", "HOME": "/h"}) == {"SLURM_CONF": "/c", "HOME": "/h"}
