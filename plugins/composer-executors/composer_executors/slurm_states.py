"""What Slurm's states mean to us: squeue's lines, sacct's, and the file that the batch script leaves.

squeue knows a job until MinJobAge after its end (five minutes, as a rule), sacct where the cluster keeps accounts, the
file for ever. A state that is not in the table is UNKNOWN, never a success; new ones are entered there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from composer_core.jobs import JobState, JobStatus
from composer_core.run.processes import death
from composer_executors.slurm_script import CANCELLED, TERMINATED, TIMEOUT

_PENDING, _RUNNING, _FAILED = JobState.PENDING, JobState.RUNNING, JobState.FAILED
STATES = {
    "PENDING": _PENDING,
    "CONFIGURING": _PENDING,
    "REQUEUED": _PENDING,
    "REQUEUE_FED": _PENDING,
    "REQUEUE_HOLD": _PENDING,
    "SPECIAL_EXIT": _PENDING,
    "RESV_DEL_HOLD": _PENDING,
    "SUSPENDED": _PENDING,
    "RUNNING": _RUNNING,
    "COMPLETING": _RUNNING,
    "STOPPED": _RUNNING,
    "SIGNALING": _RUNNING,
    "RESIZING": _RUNNING,
    "STAGE_OUT": _RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": _FAILED,
    "TIMEOUT": _FAILED,
    "OUT_OF_MEMORY": _FAILED,
    "NODE_FAIL": _FAILED,
    "BOOT_FAIL": _FAILED,
    "DEADLINE": _FAILED,
    "LAUNCH_FAILED": _FAILED,
    "RECONFIG_FAIL": _FAILED,
    "REVOKED": _FAILED,
    "PREEMPTED": _FAILED,
}
REASONS = {
    "TIMEOUT": "timeout",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node could not be booted",
    "DEADLINE": "its deadline passed",
    "REVOKED": "another cluster of the federation took it",
}
NEVER_STARTS = frozenset(
    {"BadConstraints", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "InvalidAccount", "InvalidQOS"}
)
"""Reasons to wait that no passing of time ends."""
NEVER_RAN = "-"
"""First word of an exit file, in place of a code, of a replica that we took out of the queue."""
QUEUE_FORMAT = ",".join(
    f"{name}:|" for name in ("ArrayJobID", "ArrayTaskID", "State", "Reason", "exit_code", "Comment", "Name")
)
"""For `squeue -O`; the name last, since it alone may hold a bar. `--json` differs from release to release."""
ACCOUNT_FORMAT = "JobID,State,ExitCode,JobName"


@dataclass(frozen=True)
class Record:
    """One task as Slurm knows it."""

    id: str
    """`ARRAY_RANK`; `ARRAY` of tasks that were cancelled while they waited."""
    state: str
    reason: str
    code: int | None
    """As `subprocess` has it: below 0 for a signal."""
    comment: str
    name: str

    @property
    def rank(self) -> int:
        """The number of the task."""
        return int(self.id.partition("_")[2])


def read_queue(text: str) -> list[Record]:
    """Of `squeue -h -r -O QUEUE_FORMAT`."""
    fields = [line.removesuffix("|").split("|", 6) for line in text.splitlines()]
    return [
        Record(f"{array}_{task}" if task.isdigit() else array, state, reason, exit_code(code), comment, name)
        for array, task, state, reason, code, comment, name in fields
    ]


def read_accounts(text: str) -> list[Record]:
    """Of `sacct -X -P -n -o ACCOUNT_FORMAT`."""
    fields = [line.split("|", 3) for line in text.splitlines()]
    return [
        # "CANCELLED by 1000" says who
        Record(id, state.split(" ")[0], "", exit_code(code), "", name)
        for id, state, code, name in fields
        if id.partition("_")[2].isdigit()
    ]


def exit_code(text: str) -> int | None:
    """From `3:0` or `0:15` (code, signal), or from the status as `wait` gives it: `768`."""
    if ":" in text:
        code, signal = (int(part) for part in text.split(":"))
        return -signal if signal else _of_shell(code)
    return _of_shell(os.waitstatus_to_exitcode(int(text))) if text.isdigit() and int(text) & 0x7F < 0x7F else None


def status_of(record: Record, exit_file: Path | None, *, requeue: bool) -> JobStatus:
    """What squeue said.

    Args:
        record: of one task.
        exit_file: the batch script's; tells a replica that we cancelled from one that failed.
        requeue: whether Slurm starts a replica again that it preempted.
    """
    state = STATES.get(record.state)
    if state is None:
        return JobStatus(JobState.UNKNOWN, reason=f"Slurm says {record.state}")
    if record.state == "PREEMPTED" and requeue:
        return JobStatus(JobState.PENDING, reason="preempted")
    if not state.over:
        waits = record.reason if state is JobState.PENDING and record.reason != "None" else ""
        return JobStatus(state, reason=f"unschedulable: {waits}" if waits in NEVER_STARTS else waits)
    if record.state == "FAILED":
        return _failed(record, exit_file)
    if state is JobState.SUCCEEDED:
        return JobStatus(state, 0)
    # the code of one that Slurm ended says how far it came with that, and differs from time to time
    return JobStatus(state, None, REASONS.get(record.state, record.state))


def status_of_file(exit_file: Path | None) -> JobStatus | None:
    """What the batch script wrote; None where it wrote nothing."""
    try:
        text = exit_file.read_text() if exit_file is not None else ""
        code, wish = text.split()
        return _by_script(None if code == NEVER_RAN else _of_shell(int(code)), wish)
    except (OSError, ValueError):
        return None  # it never came so far: whoever asks says what else is known


def _failed(record: Record, exit_file: Path | None) -> JobStatus:
    """Of the script's own end, if it came to that."""
    if record.reason in NEVER_STARTS:
        return JobStatus(JobState.FAILED, reason=f"unschedulable: {record.reason}")
    if record.reason == "JobLaunchFailure":
        return JobStatus(JobState.FAILED, reason="Slurm could not start it: does the node see the run directory?")
    by_script = status_of_file(exit_file)
    if by_script is not None and by_script.state is not JobState.SUCCEEDED:
        return by_script
    return _by_script(record.code, "-")


def _by_script(code: int | None, wish: str) -> JobStatus:
    if code == 0:
        return JobStatus(JobState.SUCCEEDED, 0)
    if wish == CANCELLED:
        return JobStatus(JobState.CANCELLED, code, "cancelled")
    if wish == TIMEOUT:
        return JobStatus(JobState.FAILED, code, "timeout")
    if wish == TERMINATED:
        return JobStatus(JobState.FAILED, code, "Slurm asked it to end, as before a preemption")
    return JobStatus(JobState.FAILED, code, death(code) if code is not None and code < 0 else "")


def _of_shell(code: int) -> int:
    """A shell says 128 + N of a command that signal N killed."""
    return 128 - code if 128 < code < 128 + 65 else code
