"""A whole Slurm cluster of one node in a temporary folder: real daemons, own ports, own munge; with accounts if wanted.

Nothing of the machine's own Slurm or munge is used or touched. Every daemon is a child of this process, stopped by its
id, and ended by the kernel where this process is killed.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
ACCOUNT_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
PATIENCE_S = 30.0
REQUIRED = os.environ.get("COMPOSER_REQUIRE_SERVICES") == "1"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

SLURM_CONF = """\
ClusterName=composer
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
{accounts}
MinJobAge={min_job_age}
MessageTimeout=2
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 Gres=gpu:h200:2 Feature=nvlink State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ANY
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2 State=UP
PartitionName=spot Nodes=ALL MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=short Nodes=ALL MaxTime=2 PriorityTier=2 State=UP
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdPort={accounts_port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct_db
"""
NO_ACCOUNTS = "AccountingStorageType=accounting_storage/none"
ACCOUNTS = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={accounts_port}
AccountingStoragePass={folder}/munge.sock
AccountingStorageTRES=gres/gpu"""


class SlurmCluster:
    """Daemons and configuration of one cluster."""

    def __init__(self, folder: Path, *, accounts: bool = False, min_job_age: int = 300) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._accounts = accounts
        self._min_job_age = min_job_age
        self._ports = dict(
            zip(("controller_port", "node_port", "accounts_port", "database_port"), free_ports(4), strict=True)
        )
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Everything, until the node takes jobs."""
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        for name in ("gpu0", "gpu1"):
            (self.folder / name).touch()  # plain files pass for GPUs
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=h200 File={self.folder}/gpu[0-1]\n")
        self.configure()
        self._start_munge()
        if self._accounts:
            self._start_accounts()
        self.start_controller()
        self._start("slurmd", "-D", "-f", str(self.conf), "-N", "localhost")
        self.until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%t"), "the node is not idle")

    def configure(self, *, min_job_age: int | None = None) -> None:
        """Write slurm.conf; a running controller is told."""
        self._min_job_age = min_job_age or self._min_job_age
        text = SLURM_CONF.format(
            folder=self.folder,
            user=getpass.getuser(),
            accounts=ACCOUNTS.format(folder=self.folder, **self._ports) if self._accounts else NO_ACCOUNTS,
            min_job_age=self._min_job_age,
            **self._ports,
        )
        self.conf.write_text(text)
        if "slurmctld" in self._daemons:
            self.ask("scontrol", "reconfigure")

    def start_controller(self) -> None:
        """Until it answers; it goes on where it stopped."""
        self._start("slurmctld", "-D", "-f", str(self.conf))
        self.until(lambda: "is UP" in self.ask("scontrol", "ping"), "the controller is not up")

    def stop_controller(self) -> None:
        """As for maintenance."""
        _end(self._daemons.pop("slurmctld"))

    def stop(self) -> None:
        """Jobs first, then daemons in the reverse order of their start."""
        if "slurmctld" in self._daemons:
            self.ask("scancel", "--full", "--signal=KILL", "-u", getpass.getuser())
        node = self._daemons.get("slurmd")
        steps = psutil.Process(node.pid).children(recursive=True) if node is not None and node.poll() is None else []
        for name in reversed(list(self._daemons)):
            _end(self._daemons.pop(name))
        for process in steps:
            if process.is_running():
                process.kill()

    def ask(self, *argv: str) -> str:
        """What one of Slurm's commands answers; "" where it fails."""
        environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    def until(self, true: Callable[[], bool], complaint: str) -> None:
        """Wait for something."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = [path.read_text()[-1500:] for path in sorted((self.folder / "log").iterdir())]
                raise RuntimeError("\n".join([complaint, f"ended: {dead}", *logs]))
            time.sleep(0.1)

    def _start(self, program: str, *arguments: str) -> None:
        log = (self.folder / "log" / f"{program}.out").open("wb")
        environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.conf)}
        command = ["setpriv", "--pdeathsig", "KILL", program, *arguments]
        with log:
            self._daemons[program] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "sock", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]
        self._start("munged", "--foreground", *options)
        self.until((self.folder / "munge.sock").exists, "munge is not up")

    def _start_accounts(self) -> None:
        data, socket_path, user = self.folder / "database", self.folder / "database.sock", getpass.getuser()
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", f"--user={user}", "--skip-test-db"]
        subprocess.run(install, env={**os.environ, "PATH": PATH}, check=True, capture_output=True)
        self._start(
            "mariadbd",
            "--no-defaults",
            f"--user={user}",
            f"--datadir={data}",
            f"--socket={socket_path}",
            "--bind-address=127.0.0.1",
            f"--port={self._ports['database_port']}",
            "--skip-name-resolve",
            "--innodb-flush-log-at-trx-commit=0",
        )
        grant = "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'x'; GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';"
        client = ["mariadb", "--no-defaults", f"--socket={socket_path}", "-e", grant]
        self.until(lambda: subprocess.run(client, capture_output=True).returncode == 0, "the database is not up")
        conf = self.folder / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(SLURMDBD_CONF.format(folder=self.folder, user=user, **self._ports))
        self._start("slurmdbd", "-D")
        self.until(lambda: "Cluster" in self.ask("sacctmgr", "show", "cluster"), "slurmdbd is not up")
        self.ask("sacctmgr", "-i", "add", "cluster", "composer")


def free_ports(count: int) -> list[int]:
    """All at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


@contextmanager
def cluster(*, accounts: bool = False, min_job_age: int = 300) -> Iterator[SlurmCluster]:
    """A running cluster; without the programs the test is skipped, or fails where services are required."""
    needed = (*PROGRAMS, *(ACCOUNT_PROGRAMS if accounts else ()))
    if missing := [name for name in needed if shutil.which(name, path=PATH) is None]:
        reason = f"no Slurm here: {', '.join(missing)} not installed"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    # a short path: those of sockets are bounded
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munge wants its socket reachable for all
    running = SlurmCluster(folder, accounts=accounts, min_job_age=min_job_age)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Without accounts."""
    with cluster() as running:
        yield running


@pytest.fixture(scope="session")
def slurm_cluster_with_accounts() -> Iterator[SlurmCluster]:
    """With slurmdbd; the controller itself forgets jobs after two seconds."""
    with cluster(accounts=True, min_job_age=2) as running:
        yield running


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster that Slurm's commands find."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    return slurm_cluster


@pytest.fixture
def slurm_with_accounts(slurm_cluster_with_accounts: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The same with accounts."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster_with_accounts.conf))
    return slurm_cluster_with_accounts
