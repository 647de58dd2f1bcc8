"""The service `slurm`: the replicas of a job are tasks of one array of a Slurm cluster.

It calls Slurm's own commands and needs no library. The disk of the run directory is shared with the nodes: a task's log
and the file that says how it ended stand in the replica's folder. A handle's id is `ARRAY_RANK`.

A task gets the environment of sbatch, which is this process's own with what the replica adds, secrets among it; the
script holds names, no values. Slurm keeps that environment in its own spool, readable for its administrator, and, where
the cluster is set so (AccountingStoreFlags=job_env), in its database, where `sacct --env-vars` shows it to the user.

Not here: the script (`slurm_script.py`), what states mean (`slurm_states.py`), what complaints mean
(`slurm_commands.py`), `doctor` (`slurm_doctor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from composer_core.errors import MissingError, RunFailed
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.files import write_text
from composer_executors.executor import ServiceExecutor
from composer_executors.service import Replica
from composer_executors.slurm_commands import call, complaint, refused
from composer_executors.slurm_doctor import examine
from composer_executors.slurm_script import ASK, CANCELLED, END, Array, arrays, read_label, script
from composer_executors.slurm_states import (
    ACCOUNT_FORMAT,
    NEVER_RAN,
    QUEUE_FORMAT,
    STATES,
    Record,
    read_accounts,
    read_queue,
    status_of,
    status_of_file,
)

if TYPE_CHECKING:
    from composer_core.run.doctor import Finding
    from composer_executors.settings import SlurmSettings

CHUNK_BYTES = 1 << 20
UNHEARD_OF = "Invalid job id specified"
NO_ACCOUNTS = "accounting storage is disabled"


def slurm_executor(settings: SlurmSettings) -> ServiceExecutor:
    """The executor of `use: slurm`."""
    return ServiceExecutor(SlurmService(settings), settings)


class SlurmService:
    """Implements `Service`. Keeps nothing in memory."""

    name = "slurm"

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    def render(self, replicas: Sequence[Replica]) -> Mapping[str, str]:
        """The script of each array, which `sbatch FILE` would take as it is."""
        return {_script_name(array): script(array, self._settings) for array in arrays(replicas)}

    def submit(self, replicas: Sequence[Replica]) -> Iterator[JobHandle]:
        """One array, which starts as a whole; several where the replicas differ by more than their rank.

        Raises:
            UsageError: a field of the settings, with what the cluster has instead.
            MissingError: no sbatch, no controller that answers, or none that lets us in.
            RunFailed: another refusal, in Slurm's words.
        """
        for array in arrays(replicas):
            first = array.replicas[0]
            file = first.folder / _script_name(array)
            write_text(file, script(array, self._settings))
            done = call("sbatch", "--parsable", str(file), more={**first.env, **first.secrets})
            if done.returncode:
                raise refused(done)
            job = done.stdout.strip().split(";")[0]  # the cluster's name follows where there are several
            for replica in array.replicas:
                facts = {
                    "job": replica.job,
                    "log": str(array.file(job, replica.rank, "log")),
                    "exit": str(array.file(job, replica.rank, "exit")),
                }
                yield JobHandle(self.name, replica.rank, f"{job}_{replica.rank}", replica.attempt, facts)

    def poll(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """By one call of squeue; of those that it has forgotten, by one of sacct, and then by their exit files."""
        found: dict[str, JobStatus] = {}
        unknown = "Slurm does not know it any more, and it left no exit file"
        try:
            found = self._statuses(handles, _queue(_arrays_of(handles)))
            if forgotten := [handle for handle in handles if handle.id not in found]:
                found |= self._statuses(forgotten, _accounts(forgotten))
        except (MissingError, RunFailed) as error:
            unknown = error.problem
        return [
            found.get(handle.id) or status_of_file(_exit_file(handle)) or JobStatus(JobState.UNKNOWN, reason=unknown)
            for handle in handles
        ]

    def log(self, handle: JobHandle, offset: int) -> bytes:
        """At most a megabyte at once."""
        if "log" not in handle.facts:
            return b""  # found by its label, and gone before Slurm could say where it writes
        try:
            with Path(handle.facts["log"]).open("rb") as file:
                file.seek(offset)
                return file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""

    def terminate(self, handle: JobHandle) -> None:
        """SIGTERM to the command, by way of the script; a task that waits is taken out of the queue."""
        record = _active(handle)
        if record is not None and _waits(record):
            _take_out(handle)
        elif record is not None:
            _cancel(handle, "--batch", f"--signal={ASK}")

    def kill(self, handle: JobHandle) -> None:
        """The script ends the command at once; what is left ends as Slurm ends a job, SIGKILL after its KillWait."""
        record = _active(handle)
        if record is not None and _waits(record):
            _take_out(handle)
        elif record is not None:
            _cancel(handle, "--batch", f"--signal={END}")
            _cancel(handle)

    def remains(self, handle: JobHandle) -> str:
        """A task that has a node or waits for one."""
        try:
            record = _active(handle)
        except (MissingError, RunFailed) as error:
            return f"perhaps job {handle.id} of Slurm: {error.problem}"
        return f"job {handle.id} of Slurm ({record.state})" if record is not None else ""

    def leftovers(self, job: str | None) -> list[JobHandle]:
        """By the comment of this user's jobs that wait or run."""
        done = call("squeue", "-a", "-r", "-h", "--me", "-O", QUEUE_FORMAT)
        if done.returncode:
            raise complaint(done)
        found = [(record, read_label(record.comment)) for record in read_queue(done.stdout)]
        return [self._found(record, *ours) for record, ours in found if ours is not None and job in (None, ours[0])]

    def examine(self) -> Iterable[Finding]:
        """Commands, controller, partitions, accounts, and whether it would take a job with these settings."""
        return examine(self._settings)

    def _statuses(self, handles: Sequence[JobHandle], records: Sequence[Record]) -> dict[str, JobStatus]:
        found = [(handle, _record_of(handle, records)) for handle in handles]
        return {
            handle.id: status_of(record, _exit_file(handle), requeue=self._settings.requeue)
            for handle, record in found
            if record is not None
        }

    def _found(self, record: Record, job: str, attempt: int) -> JobHandle:
        facts = {"job": job}
        for line in call("scontrol", "show", "job", record.id).stdout.splitlines():
            name, _, value = line.strip().partition("=")
            if name == "StdOut":
                facts |= {"log": value, "exit": str(Path(value).with_suffix(".exit"))}
        return JobHandle(self.name, record.rank, record.id, attempt, facts)


# -- questions and orders ----------------------------------------------------------------------------------------------


def _queue(jobs: str) -> list[Record]:
    done = call("squeue", "-a", "-r", "-h", "-t", "all", "-j", jobs, "-O", QUEUE_FORMAT)
    if done.returncode and UNHEARD_OF in done.stderr:
        return []  # all of them are forgotten
    if done.returncode:
        raise complaint(done)
    return read_queue(done.stdout)


def _accounts(handles: Sequence[JobHandle]) -> list[Record]:
    done = call("sacct", "-X", "-P", "-n", "-j", ",".join(handle.id for handle in handles), "-o", ACCOUNT_FORMAT)
    if done.returncode and NO_ACCOUNTS in done.stderr:
        return []
    if done.returncode:
        raise complaint(done)
    return read_accounts(done.stdout)


def _cancel(handle: JobHandle, *how: str) -> None:
    # no filter of scancel's, such as --name: with one, 22.05 cancels all tasks that wait where one was meant
    done = call("scancel", *how, handle.id)
    # of a job that is over it says nothing, or that there is none; one that is just starting it tries for some seconds
    if done.returncode and done.stderr.strip() and UNHEARD_OF not in done.stderr:
        raise complaint(done)


def _take_out(handle: JobHandle) -> None:
    """Out of the queue; of one of several tasks that wait, Slurm then knows nothing more, so we note it."""
    _cancel(handle)
    if (file := _exit_file(handle)) is not None:
        write_text(file, f"{NEVER_RAN} {CANCELLED}\n")


def _active(handle: JobHandle) -> Record | None:
    """None where it is over or forgotten."""
    record = _record_of(handle, _queue(_arrays_of([handle])))
    return None if record is None or _mapped(record).over else record


def _record_of(handle: JobHandle, records: Sequence[Record]) -> Record | None:
    """Of the task, or of those of its array that were cancelled before they had started. The name tells a job from a
    later one of the same id: a cluster that is set up anew counts from 1.
    """
    ours = [one for one in records if one.name == handle.facts["job"]]
    array = handle.id.partition("_")[0]
    return next((one for wanted in (handle.id, array) for one in ours if one.id == wanted), None)


def _waits(record: Record) -> bool:
    return _mapped(record) is JobState.PENDING


def _mapped(record: Record) -> JobState:
    return STATES.get(record.state, JobState.UNKNOWN)


def _arrays_of(handles: Sequence[JobHandle]) -> str:
    return ",".join(dict.fromkeys(handle.id.partition("_")[0] for handle in handles))


def _exit_file(handle: JobHandle) -> Path | None:
    return Path(handle.facts["exit"]) if "exit" in handle.facts else None


def _script_name(array: Array) -> str:
    return f"slurm-{array.replicas[0].rank}.sh"
