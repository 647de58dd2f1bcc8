"""The Ray cluster of a run: one of its own on this machine, started and stopped with it, or one that runs already.

Ours listens on the loopback only and keeps its files in a short temporary folder, since its sockets' paths may not be
long. When the run fails, what its processes wrote goes to `logs/ray/`. Nothing here stops a cluster that is not ours.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from composer_core.errors import MissingError

LOCAL = "local"
_OBJECTS = 500_000_000
"""Bytes of the local object store, which weights and batches pass through."""


@contextmanager
def cluster(options: Mapping[str, Any], *, logs: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Ray inside.

    Args:
        options: arguments of `ray.init`; the `address` `LOCAL` is a cluster of our own.
        logs: where its processes' output goes when the run fails.
        environment: variables of all its processes.

    Raises:
        MissingError: nothing answers at the address.
    """
    wanted = {
        **options,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": dict(environment)},
    }
    if wanted["address"] == LOCAL:
        with _own(wanted, logs):
            yield
        return
    try:
        ray.init(**wanted)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise MissingError(f"no Ray cluster answers: {error}", at="backend.ray", fix="ray: local") from error
    try:
        yield
    finally:
        ray.shutdown()  # leaves it; the cluster goes on


@contextmanager
def _own(options: Mapping[str, Any], logs: Path) -> Iterator[None]:
    # a token in the user's home would make Ray ask for it
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp(prefix="composer-ray-"))
    own = {"object_store_memory": _OBJECTS, "_node_ip_address": "127.0.0.1", "_temp_dir": str(folder)}
    failed = True
    try:
        ray.init(**{**own, **options})
        yield
        failed = False
    finally:
        ray.shutdown()
        if failed:
            _keep(folder, logs)
        shutil.rmtree(folder, ignore_errors=True)


def _keep(folder: Path, logs: Path) -> None:
    """What Python processes said, not Ray's own bookkeeping."""
    target = logs / "ray"
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("session_2*/logs/worker-*"):
        if file.stat().st_size:
            shutil.copyfile(file, target / file.name)
