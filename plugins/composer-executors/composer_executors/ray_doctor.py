"""`composer-run doctor --executor ray`: the dashboard, the nodes, and a job that does nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from composer_core.errors import ComposerError, RunFailed
from composer_core.run.doctor import Finding, Level
from composer_executors.ray_client import Dashboard
from composer_executors.settings import RaySettings

TESTED = "2.60.0"
"""Release of Ray that the suite runs against; others may work."""
PATIENCE_S = 120.0
PAUSE_S = 0.3


def examine(dashboard: Dashboard, settings: RaySettings) -> Iterator[Finding]:
    """One after another; without an answer from the first ones, there is no use in the rest."""
    for name, look in (
        ("ray dashboard", lambda: _dashboard(dashboard, settings)),
        ("ray nodes", lambda: _nodes(dashboard, settings)),
        ("ray job", lambda: _job(dashboard)),
    ):
        finding = _try(name, look)
        yield finding
        if finding.level is Level.FAIL:
            return


def _try(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except ComposerError as error:
        return Finding(name, Level.FAIL, f"{error.at}: {error.problem}" if error.at else error.problem, error.fix)


def _dashboard(dashboard: Dashboard, settings: RaySettings) -> Finding:
    there = dashboard.get("/api/version")["ray_version"]
    found = f"Ray {there} at {settings.address} (tested with {TESTED})"
    try:
        here = metadata.version("ray")
    except metadata.PackageNotFoundError:
        here = there  # it is not needed here
    if here == there:
        return Finding("ray dashboard", Level.OK, found)
    found = f"{found}; {here} is installed here"
    return Finding("ray dashboard", Level.WARN, found, f"a run that itself uses Ray needs the cluster's: {there}")


def _nodes(dashboard: Dashboard, settings: RaySettings) -> Finding:
    answer = dashboard.get("/api/v0/nodes?detail=1&limit=1000")
    if not answer["result"]:
        raise RunFailed(answer["msg"])
    nodes = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
    found = f"{len(nodes)}: {_sum(nodes, 'CPU'):g} CPUs, {_sum(nodes, 'GPU'):g} GPUs"
    wanted = _wanted(settings)
    if any(all(node["resources_total"].get(name, 0) >= much for name, much in wanted.items()) for node in nodes):
        return Finding("ray nodes", Level.OK, found)
    words = ", ".join(f"{name} {much:g}" for name, much in wanted.items())
    fix = "less of it, or nodes that have it; executor.start_minutes ends a run that waits in vain"
    return Finding("ray nodes", Level.WARN, f"{found}; none has {words}, so a replica would wait", fix)


def _job(dashboard: Dashboard) -> Finding:
    """On the head's node, without any resources."""
    path = f"/api/jobs/composer-doctor-{secrets.token_hex(4)}"
    started = time.monotonic()
    dashboard.post("/api/jobs/", {"submission_id": path.rpartition("/")[2], "entrypoint": "true"})
    while (job := dashboard.get(path))["status"] in ("PENDING", "RUNNING"):
        if time.monotonic() - started > PATIENCE_S:
            dashboard.post(f"{path}/stop")
            raise RunFailed(f"a job that does nothing did not end in {PATIENCE_S:g} s: {job['message']}")
        time.sleep(PAUSE_S)
    if job["status"] != "SUCCEEDED":
        raise RunFailed(f"a job that does nothing is {job['status']}: {job['message']}")
    dashboard.delete(path)
    return Finding("ray job", Level.OK, f"one that does nothing took {time.monotonic() - started:.1f} s")


def _wanted(settings: RaySettings) -> dict[str, float]:
    """Of one node, by Ray's names."""
    kind, count = settings.gpus() or ("", 0)
    memory = 0.0 if settings.memory_gb is None else settings.memory_gb * 1e9
    wanted = {"GPU": count, "CPU": settings.num_cpus or 0, "memory": memory, **settings.resources}
    if kind:
        wanted[f"accelerator_type:{kind}"] = 0.001
    return {name: much for name, much in wanted.items() if much}


def _sum(nodes: list[dict[str, Any]], name: str) -> float:
    return float(sum(node["resources_total"].get(name, 0) for node in nodes))
