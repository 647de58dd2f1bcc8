"""Stand-ins for S3 on a free port of this machine: moto's server, and localbucket, which keeps objects as files.

localbucket checks no credentials, and knows of conditions only `If-None-Match: *` on a single put: what it is given in
several parts is overwritten. moto knows all that a run's store needs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

BUCKET = "runs"
_UP_SECONDS = 60.0


@contextmanager
def s3_server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start `moto` or `localbucket`, with a bucket, and give the environment for clients; skip where it is missing."""
    program = {"moto": "moto_server", "localbucket": "localbucket"}[kind]
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        _missing(f"{program} is not installed (pip install 'moto[server,s3]' localbucket)")
    port = _free_port()
    options = ["-H", "127.0.0.1", "-p", str(port)] if kind == "moto" else ["--port", str(port), str(folder)]
    with (folder / f"{kind}.log").open("wb") as log:
        process = subprocess.Popen([found, *options], stdout=log, stderr=log, start_new_session=True)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(endpoint, process)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _UP_SECONDS
    while True:
        try:
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"{endpoint} does not come up: {error}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _missing(reason: str) -> NoReturn:
    if os.environ.get("COMPOSER_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
