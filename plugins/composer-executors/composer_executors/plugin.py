"""What this package contributes."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.plugins.contributions import ExecutorPlugin, Feature
from composer_core.plugins.hookspecs import hookimpl
from composer_executors.sandbox.offer import composer_sandboxes
from composer_executors.settings import LocalSettings, RaySettings, SlurmSettings

__all__ = ["composer_executors", "composer_sandboxes"]

_SERVED = frozenset({Feature.LOGS, Feature.CANCEL, Feature.MULTI_REPLICA, Feature.REPLICAS_REACH_EACH_OTHER})


@hookimpl
def composer_executors() -> Iterable[ExecutorPlugin]:
    yield ExecutorPlugin(
        name="local",
        summary="Processes of this machine, which can outlive the command",
        target="composer_executors.local:local_executor",
        settings=LocalSettings,
        features=_SERVED | {Feature.SHARED_DISK},
    )
    yield ExecutorPlugin(
        name="slurm",
        summary="Jobs of a Slurm cluster",
        target="composer_executors.slurm:slurm_executor",
        settings=SlurmSettings,
        features=_SERVED | {Feature.SHARED_DISK},
    )
    yield ExecutorPlugin(
        name="ray",
        summary="Jobs of a Ray cluster",
        target="composer_executors.ray:ray_executor",
        settings=RaySettings,
        features=_SERVED,
    )
