"""The service `ray`: each replica is a job of a Ray cluster, by the REST interface of its dashboard.

A handle's id is the job's submission id, `JOB-RANK-ATTEMPT`. Ray keeps state, exit code and log of a job, each for as
long as the head lives; a cluster that starts anew knows nothing of earlier jobs, and they are UNKNOWN.

To be asked to stop is Ray's own `stop`: SIGTERM to the command and all that it started, SIGKILL to what is left after
`stop_seconds`. Ray has no way to end a job at once, nor one that waits for a machine: a small job of ours does it
(`ray_entry.py`) and is forgotten.

Not here: requests and refusals (`ray_client.py`), what a job runs (`ray_entry.py`), `doctor` (`ray_doctor.py`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from composer_core.errors import MissingError, RunFailed
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.processes import death
from composer_executors.executor import ServiceExecutor
from composer_executors.ray_client import AT, Dashboard, NotThere, last_line
from composer_executors.ray_doctor import examine
from composer_executors.ray_entry import KILLED_AT_LIMIT, body_of, forget, had_limit, id_of, read_label, request, sweep
from composer_executors.service import Replica

if TYPE_CHECKING:
    from composer_core.run.doctor import Finding
    from composer_executors.settings import RaySettings

JOBS = "/api/jobs/"
STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "STOPPED": JobState.CANCELLED,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
}
"""A state that is not here is UNKNOWN, never a success."""
NO_PROGRAM = 127
"""What `env` and `timeout` say of a command that is not there."""
TRIES, AT_ONCE_S, HELP_S, SETTLE_S = 3, 3.0, 60.0, 15.0
"""How long a job may take to end by SIGTERM before we help; the job that helps, to end; and Ray, to notice."""
PAUSE_S = 0.2


def ray_executor(settings: RaySettings) -> ServiceExecutor:
    """The executor of `use: ray`."""
    return ServiceExecutor(RayService(settings), settings)


class RayService:
    """Implements `Service`. Keeps nothing in memory."""

    name = "ray"

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._dashboard = Dashboard(settings.address)

    def render(self, replicas: Sequence[Replica]) -> Mapping[str, str]:
        """The body of each request."""
        bodies = {f"rank-{replica.rank}.json": request(replica, self._settings) for replica in replicas}
        return {name: json.dumps(body, indent=2) + "\n" for name, body in bodies.items()}

    def submit(self, replicas: Sequence[Replica]) -> Iterator[JobHandle]:
        """One job for each.

        Raises:
            UsageError: Ray finds something wrong with the request.
            MissingError: no dashboard that answers, or none that lets us in.
            RunFailed: another refusal, in Ray's words.
        """
        for replica in replicas:
            self._dashboard.post(JOBS, request(replica, self._settings))
            yield JobHandle(self.name, replica.rank, id_of(replica), replica.attempt, {"job": replica.job})

    def poll(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """By one question: for the job, or for the list of all where several are asked for."""
        try:
            jobs = self._jobs() if len(handles) > 1 else self._one(handles[0].id)
        except (MissingError, RunFailed) as error:
            return [JobStatus(JobState.UNKNOWN, reason=error.problem)] * len(handles)
        unknown = JobStatus(JobState.UNKNOWN, reason="Ray does not know it any more")
        return [status_of(jobs[handle.id]) if handle.id in jobs else unknown for handle in handles]

    def log(self, handle: JobHandle, offset: int) -> bytes:
        """What Ray has of it; always sent whole, without Ray's own first lines. Ray has line breaks alone: a carriage
        return arrives as one.
        """
        job = self._one(handle.id).get(handle.id)
        if job is None:
            return b""
        text: str = self._dashboard.get(f"{_path(handle.id)}/logs")["logs"]
        return body_of(text, job).encode()[offset:]

    def terminate(self, handle: JobHandle) -> None:
        """SIGTERM to the command and what it started. One that waits for a machine ends at once."""
        job = self._active(handle)
        if job is not None and job["status"] == "PENDING":
            self.kill(handle)
        elif job is not None:
            self._stop(handle.id)

    def kill(self, handle: JobHandle) -> None:
        """By Ray's stop; if that does not do at once, by a job that ends it. Which one, can change meanwhile."""
        for _ in range(TRIES):
            if self._active(handle) is None:
                return
            self._stop(handle.id)
            if self._until(lambda: self._active(handle) is None, AT_ONCE_S):
                return
            job = self._active(handle)
            if job is not None:
                self._help(forget(job) if job["status"] == "PENDING" else sweep(job), handle)
                self._until(lambda: self._active(handle) is None, SETTLE_S)

    def remains(self, handle: JobHandle) -> str:
        """A job that runs or waits."""
        try:
            job = self._active(handle)
        except (MissingError, RunFailed) as error:
            return f"perhaps job {handle.id} of Ray: {error.problem}"
        return "" if job is None else f"job {handle.id} of Ray ({job['status']})"

    def leftovers(self, job: str | None) -> list[JobHandle]:
        """By the metadata of jobs."""
        found = [read_label(one) for one in self._jobs().values() if not status_of(one).state.over]
        return [handle for handle in found if handle is not None and job in (None, handle.facts["job"])]

    def examine(self) -> Iterable[Finding]:
        """Dashboard, nodes, and a job that does nothing."""
        return examine(self._dashboard, self._settings)

    # -- questions and orders ------------------------------------------------------------------------------------------

    def _jobs(self) -> dict[str, Mapping[str, Any]]:
        """By submission id. Ray lists programs that connected without one, too."""
        return {job["submission_id"]: job for job in self._dashboard.get(JOBS) if job["submission_id"]}

    def _one(self, id: str) -> dict[str, Mapping[str, Any]]:
        try:
            return {id: self._dashboard.get(_path(id))}
        except NotThere:
            return {}

    def _active(self, handle: JobHandle) -> Mapping[str, Any] | None:
        """None where it is over or forgotten."""
        job = self._one(handle.id).get(handle.id)
        return None if job is None or status_of(job).state.over else job

    def _stop(self, id: str) -> None:
        with suppress(NotThere):
            self._dashboard.post(f"{_path(id)}/stop")

    def _help(self, body: Mapping[str, Any], handle: JobHandle) -> None:
        """Run a job that ends another one; whether it did, `remains` says."""
        id = f"{handle.id}-end-{secrets.token_hex(4)}"
        self._dashboard.post(JOBS, {**body, "submission_id": id})
        helper = JobHandle(self.name, handle.rank, id)
        if not self._until(lambda: self._active(helper) is None, HELP_S):
            self._stop(id)
            raise RunFailed(f"job {id} of Ray, which was to end {handle.id}, did not end", at=AT)
        self._dashboard.delete(_path(id))

    @staticmethod
    def _until(true: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True


def status_of(job: Mapping[str, Any]) -> JobStatus:
    """What Ray says of one of ours."""
    state = STATES.get(job["status"])
    if state is None:
        return JobStatus(JobState.UNKNOWN, reason=f"Ray says {job['status']}")
    if state is JobState.FAILED:
        return _failed(job)
    if state is JobState.PENDING:
        return JobStatus(state, reason=job["message"] or "")
    return JobStatus(state, job["driver_exit_code"], "cancelled" if state is JobState.CANCELLED else "")


def _failed(job: Mapping[str, Any]) -> JobStatus:
    code = job["driver_exit_code"]
    if code is None:  # it did not come so far, or its node went away
        return JobStatus(JobState.FAILED, reason=last_line(job["message"] or "") or str(job["error_type"]))
    if code in KILLED_AT_LIMIT and had_limit(job):
        return JobStatus(JobState.FAILED, code, "timeout")
    if code == NO_PROGRAM:
        return JobStatus(JobState.FAILED, code, "no such program on its node: see executor.python")
    return JobStatus(JobState.FAILED, code, death(code) if code < 0 else "")


def _path(id: str) -> str:
    return JOBS + quote(id, safe="")
