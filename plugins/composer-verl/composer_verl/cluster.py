"""The Ray cluster of a run: one of its own on this machine, started and stopped with it, or one that runs already.

Ours listens on the loopback only, as Ray runs what whoever reaches it sends. Its files stand in a short temporary
folder, since paths of sockets may not be long; when the run fails, what its processes wrote goes to `logs/ray/`. Its
processes end with this one, whatever ends it (after SIGKILL two of Ray's agents look for the rest for a minute); the
folder that a killed run leaves is removed when the run is resumed.
Nothing here stops a cluster that is not ours.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from composer_core.errors import ComposerError, MissingError, RunFailed, Stopped

LOCAL = "local"
_OBJECTS = 500_000_000
"""Bytes of the local object store, which weights and batches pass through."""
_KNOCK_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"
_SETTINGS = {
    # a token in the user's home would make Ray ask for it
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def cluster(options: Mapping[str, Any], *, logs: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Ray inside.

    Args:
        options: arguments of `ray.init`; the `address` `LOCAL` is a cluster of our own.
        logs: of the run, one folder for each; its processes' output goes there when the run fails.
        environment: variables of all its processes.

    Raises:
        MissingError: nothing answers at the address.
        RunFailed: our own does not start.
        Stopped: a SIGTERM came while Ray started.
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
        _knock(wanted["address"])
        _init(wanted)
    except (OSError, ValueError, RuntimeError) as error:
        raise MissingError(
            f"no Ray cluster answers at {wanted['address']}: {_sentence(error)}", at="backend.ray", fix="ray: local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()  # leaves it; the cluster goes on


@contextmanager
def _own(options: Mapping[str, Any], logs: Path) -> Iterator[None]:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    _stay_on_loopback()
    folder = _fresh_folder(logs)
    own = {"object_store_memory": _OBJECTS, "_node_ip_address": _LOOPBACK, "_temp_dir": str(folder)}
    failed = True
    try:
        _start({**own, **options})
        folder.chmod(0o700)  # Ray has opened it to everybody
        yield
        failed = False
    finally:
        ray.shutdown()
        if failed:
            _keep(folder, logs)
        shutil.rmtree(folder, ignore_errors=True)


def _start(options: Mapping[str, Any]) -> None:
    try:
        _init(options)
    except ComposerError:
        raise
    except Exception as error:  # Ray raises no narrower one when its processes are not up within 30 s
        fix = "start it again; a machine that is too busy makes Ray give up after 30 s"
        raise RunFailed(f"Ray did not start: {_sentence(error)}", fix=fix) from error


def _init(options: Mapping[str, Any]) -> None:
    """`ray.init`, which takes SIGTERM for itself: the run's own handler comes back."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:  # what Ray's handler raises
            raise
        raise Stopped("received SIGTERM before the first step") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _knock(address: str) -> None:
    """Ray itself would try again for minutes where nothing listens.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # not `auto`, which Ray finds at once or not at all
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


def _stay_on_loopback() -> None:
    """Keep Ray from making the address of a network interface of 127.0.0.1, and listening on all of them.

    It does so wherever clusters are supported, which is decided when it is imported: this process has done that, its
    children have not.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _fresh_folder(logs: Path) -> Path:
    """A new folder for the run of `logs`, in place of what a killed worker of that run left."""
    prefix = f"composer-ray-{hashlib.sha256(str(logs.resolve()).encode()).hexdigest()[:8]}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if not left.is_symlink() and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix))


def _keep(folder: Path, logs: Path) -> None:
    """What Python processes said, not Ray's own bookkeeping."""
    target = logs / "ray"
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("session_2*/logs/worker-*"):
        if file.stat().st_size:
            shutil.copyfile(file, target / file.name)


def _sentence(error: Exception) -> str:
    """The first of what Ray says, which goes on for paragraphs."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
