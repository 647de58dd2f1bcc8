"""What a Ray job of ours runs: pure functions from a replica to the request that submits it, and what it is found by.

Ray gives an entrypoint to a shell. Ours says its environment itself, since Ray would expand `${NAME}` in variables of
a runtime environment, hand them on to every Ray program that the worker starts, and refuse one that the worker sets
otherwise. Everything is one command by `exec`, so that a signal reaches it and its exit code comes back.

Secrets do not travel: Ray keeps what a job is given, shows it to whoever may see its dashboard, and writes parts of it
to logs. A replica finds them on its node, from the environment in which `ray start` ran, or it ends with exit code 3.
"""

from __future__ import annotations

import getpass
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import MissingError
from composer_core.jobs import JobHandle
from composer_executors.service import LABEL, Replica
from composer_executors.settings import RaySettings

MARK = "COMPOSER_RAY_JOB"
"""Variable of every process of a replica, by which those are found that left its process group."""
KILLED_AT_LIMIT = (124, 137)
"""Exit codes of `timeout`: it ended after SIGTERM, or not before SIGKILL. A command that dies otherwise has another."""
_USER, _RANK, _ATTEMPT, _LIMIT = "user", "rank", "attempt", "limit_s"
_A_LITTLE = 0.001
"""How much of the resource `accelerator_type:H200` is asked for; a node with the kind has 1, however many it has."""
_ACTOR, _NAMESPACE = "_ray_internal_job_actor_", "SUPERVISOR_ACTOR_RAY_NAMESPACE"
"""Ray's own names (2.60) for what starts a job. Where they change, a job that waits can be stopped no more, which
`test_a_job_that_waits_for_a_machine_is_ended` finds."""
_FORGET = (
    "import sys, ray; ray.init(log_to_driver=False); "
    f"ray.kill(ray.get_actor({_ACTOR!r} + sys.argv[1], namespace={_NAMESPACE!r}))"
)
_SWEEP = (
    "for file in /proc/[0-9]*/environ; do "
    'if grep -zqxF {mark} "$file" 2>/dev/null; then pid=${{file#/proc/}}; kill -KILL "${{pid%/environ}}"; fi; '
    "done; true"
)


def id_of(replica: Replica) -> str:
    """The same whoever asks, so that Ray refuses to start it twice."""
    return f"{replica.job}-{replica.rank}-{replica.attempt}"


def request(replica: Replica, settings: RaySettings) -> dict[str, Any]:
    """The body that submits it."""
    # whole seconds: Ray ends what was asked to stop after so many
    wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(settings.stop_seconds))}
    return {
        "submission_id": id_of(replica),
        "entrypoint": entrypoint(replica, settings),
        "metadata": label(replica),
        "runtime_env": {"env_vars": wait},
        **dict(_resources(replica, settings)),
    }


def entrypoint(replica: Replica, settings: RaySettings) -> str:
    """One command, for a shell."""
    variables = [f"{name}={value}" for name, value in {**replica.env, MARK: id_of(replica)}.items()]
    command = shlex.join(["exec", "env", *variables, *_timeout(replica, settings), *replica.command])
    return "".join([*(_needs(name) for name in replica.secrets), command])


def label(replica: Replica) -> dict[str, str]:
    """By which it is found as ours, with all that a handle needs."""
    limit = {} if replica.time_limit_s is None else {_LIMIT: f"{replica.time_limit_s:g}"}
    whose = {LABEL: replica.job, _USER: getpass.getuser()}
    return {**whose, _RANK: str(replica.rank), _ATTEMPT: str(replica.attempt), **limit}


def read_label(job: Mapping[str, Any]) -> JobHandle | None:
    """The handle of a job as Ray lists it; None for one that is not this user's replica."""
    metadata = job.get("metadata") or {}
    if LABEL not in metadata or metadata.get(_USER) != getpass.getuser():
        return None
    facts = {"job": metadata[LABEL]}
    return JobHandle("ray", int(metadata[_RANK]), job["submission_id"], int(metadata[_ATTEMPT]), facts)


def had_limit(job: Mapping[str, Any]) -> bool:
    """Whether it was started with a time limit."""
    return _LIMIT in (job.get("metadata") or {})


def body_of(log: str, job: Mapping[str, Any]) -> str:
    """A job's log without what Ray writes into it before the entrypoint starts, which includes the entrypoint."""
    _, found, rest = log.partition(f"Running entrypoint for job {job['submission_id']}: {job['entrypoint']}\n")
    return rest if found else ""


def sweep(job: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a job that kills all processes of a running one, on its node."""
    mark = shlex.quote(f"{MARK}={job['submission_id']}")
    node = {"ray.io/node-id": job["driver_node_id"]}
    return {"entrypoint": _SWEEP.format(mark=mark), "entrypoint_label_selector": node}


def forget(job: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a job that takes one that waits out of Ray's queue: stop alone would have Ray start it later."""
    return {"entrypoint": shlex.join(["exec", "python", "-c", _FORGET, job["submission_id"]])}


def _resources(replica: Replica, settings: RaySettings) -> Iterator[tuple[str, Any]]:
    resources = dict(settings.resources)
    if replica.gpu is not None:
        kind, count = replica.gpu
        yield "entrypoint_num_gpus", count
        if kind:
            resources[f"accelerator_type:{kind}"] = _A_LITTLE
    if settings.num_cpus is not None:
        yield "entrypoint_num_cpus", settings.num_cpus
    if settings.memory_gb is not None:
        yield "entrypoint_memory", int(settings.memory_gb * 1e9)
    if resources:
        yield "entrypoint_resources", resources
    if settings.label_selector:
        yield "entrypoint_label_selector", settings.label_selector


def _timeout(replica: Replica, settings: RaySettings) -> list[str]:
    """Ray has no time limits. The command alone is asked to end: it knows what its own processes need."""
    if replica.time_limit_s is None:
        return []
    notice = min(settings.stop_seconds, replica.time_limit_s / 2)
    return ["timeout", "--foreground", f"--kill-after={notice:g}", f"{replica.time_limit_s - notice:g}"]


def _needs(name: str) -> str:
    said = shlex.quote(
        f"the environment variable {name} is not set on this node: executor ray sends no secrets, since Ray would show "
        f"them; export {name} where `ray start` runs"
    )
    return f'if [ -z "${{{name}+x}}" ]; then echo {said} >&2; exit {MissingError.exit_code}; fi; '
