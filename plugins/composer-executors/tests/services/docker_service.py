"""A docker daemon of the tests' own, with an image made here: no registry, no bridge, nothing outside its folder.

The image holds links alone; programs come from this machine's /usr, which tests make readable.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

IMAGE = "composer-test:links"
_UP_SECONDS = 30.0


@contextmanager
def docker_daemon() -> Iterator[str]:
    """Start dockerd, and give what DOCKER_HOST must be for it; skip where it is not installed or does not start."""
    try:
        with _daemon() as host:
            yield host
    except LookupError as error:
        missing(str(error))


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where services are required."""
    if os.environ.get("COMPOSER_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def _daemon() -> Iterator[str]:
    for program in ("dockerd", "docker", "containerd", "setpriv"):
        if shutil.which(program) is None:
            raise LookupError(f"{program} is not installed (apt-get install docker.io)")
    if os.getuid() != 0:
        raise LookupError("dockerd wants root")
    folder = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/tmp"))  # a socket's path must be short
    log = (folder / "log").open("wb")
    process = subprocess.Popen(_command(folder), stdout=log, stderr=log, start_new_session=True)
    host = f"unix://{folder}/docker.sock"
    try:
        _wait_until_up(process, host, folder / "log")
        _import_image(host)
        yield host
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its containerd, and that its shims
        try:
            process.wait(_UP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
        shutil.rmtree(folder)


def _command(folder: Path) -> list[str]:
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    alone = ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--storage-driver", "vfs"]
    # where this process is killed, the kernel asks it to end
    return ["setpriv", "--pdeathsig", "TERM", "dockerd", "-H", f"unix://{folder}/docker.sock", *places, *alone]


def _wait_until_up(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while subprocess.run(["docker", "-H", host, "version"], capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise LookupError(f"dockerd does not start: {last}")
        time.sleep(0.1)


def _import_image(host: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("usr", "proc", "sys", "dev", "tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    command = ["docker", "-H", host, "import", "-", IMAGE]
    subprocess.run(command, input=archive.getvalue(), check=True, capture_output=True)
