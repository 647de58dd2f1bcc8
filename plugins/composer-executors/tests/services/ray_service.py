"""A Ray cluster of one node on the loopback: ports and folder of its own, with or without a token.

Other clusters of the machine are not touched: nothing is looked for, and the head is stopped by its own process id.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from slurm_service import free_ports

REQUIRED = os.environ.get("COMPOSER_REQUIRE_SERVICES") == "1"
PATIENCE_S = 120.0
TRIES = 3
"""Ray gives a node 30 seconds to come up, which a busy machine may not do."""
SECRET = "CONTRACT_SECRET"


class RayCluster:
    """A head, which is also the only node."""

    def __init__(self, folder: Path, *, token: str = "") -> None:
        self.folder = folder
        self.token = token
        self.secret = secrets.token_hex(16)
        """What the variable SECRET holds on the node."""
        self.address = ""
        self._head: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it takes jobs."""
        for _ in range(TRIES):
            self._start_once()
            if self._is_up():
                return
            self.stop()
        raise RuntimeError(f"the Ray cluster did not come up:\n{self._log().read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        """The head and all that it started; a head that is asked to end takes half a minute."""
        if self._head is None or self._head.poll() is not None:
            return
        family = psutil.Process(self._head.pid).children(recursive=True)
        self._head.kill()
        self._head.wait()
        for process in family:
            if process.is_running():
                process.kill()

    def _start_once(self) -> None:
        main, dashboard, agent, agent_grpc, metrics, client = free_ports(6)
        self.address = f"http://127.0.0.1:{dashboard}"
        command = [
            *("setpriv", "--pdeathsig", "TERM"),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", f"--port={main}", f"--temp-dir={self.folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
            *(f"--ray-client-server-port={client}", "--object-store-memory=80000000", "--num-cpus=2", "--num-gpus=2"),
            *('--resources={"accelerator_type:H200": 1}', "--labels=market=spot"),
        ]
        with self._log().open("wb") as log:
            self._head = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {"RAY_AUTH_MODE": "disabled"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray makes an interface's address of 127.0.0.1
        return {**plain, **mode, **loopback, "PATH": path, "OMP_NUM_THREADS": "1", SECRET: self.secret}

    def _is_up(self) -> bool:
        assert self._head is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._head.poll() is None:
            if self._takes_jobs():
                return True
            time.sleep(0.5)
        return False

    def _takes_jobs(self) -> bool:
        """The dashboard answers some seconds before jobs can be submitted."""
        body = json.dumps({"entrypoint": "true"}).encode()
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.address}/api/jobs/", body, headers), timeout=30):
                return True
        except OSError:
            return False

    def _log(self) -> Path:
        return self.folder / "head.log"


@contextmanager
def cluster(*, token: str = "") -> Iterator[RayCluster]:
    """A running cluster; without Ray the test is skipped, or fails where services are required."""
    missing = [] if importlib.util.find_spec("ray") and importlib.util.find_spec("aiohttp") else ["ray[default]"]
    missing += [] if shutil.which("setpriv") else ["setpriv"]
    if missing:
        reason = f"no Ray here: {', '.join(missing)} not installed"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: those of sockets are bounded
    running = RayCluster(folder, token=token)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """One that lets everybody in."""
    with cluster() as running:
        yield running


@pytest.fixture(scope="session")
def ray_cluster_with_token() -> Iterator[RayCluster]:
    """One that asks for a token."""
    with cluster(token=secrets.token_hex(32)) as running:
        yield running


@pytest.fixture
def ray_head(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, for a process that has no token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return ray_cluster


@pytest.fixture
def ray_head_with_token(ray_cluster_with_token: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, for a process that has its token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster_with_token.token)
    return ray_cluster_with_token
