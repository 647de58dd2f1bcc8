"""`composer-run doctor --executor slurm`: commands, controller, partitions, accounts, and a job that is not queued."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_core.errors import ComposerError
from composer_core.run.doctor import Finding, Level
from composer_core.run.files import write_text
from composer_executors.service import Replica
from composer_executors.settings import SlurmSettings
from composer_executors.slurm_commands import call, complaint, partitions, refused
from composer_executors.slurm_script import arrays, script

TESTED = "22.05"
"""Release of Slurm that the suite runs against; others may work."""


def examine(settings: SlurmSettings) -> Iterator[Finding]:
    """One after another; without an answer from the first ones, there is no use in the rest."""
    for name, look in (
        ("slurm version", _version),
        ("slurm controller", _controller),
        ("slurm partitions", _partitions),
        ("slurm accounting", _accounting),
        ("slurm job", lambda: _job(settings)),
    ):
        finding = _try(name, look)
        yield finding
        if finding.level is Level.FAIL:
            return


def _try(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, Level.OK, look())
    except ComposerError as error:
        return Finding(name, Level.FAIL, f"{error.at}: {error.problem}" if error.at else error.problem, error.fix)


def _version() -> str:
    return f"{_answer('sbatch', '--version')} (tested with {TESTED})"


def _controller() -> str:
    return " ".join(_answer("scontrol", "ping").split())


def _partitions() -> str:
    return ", ".join(partitions("%P (%a, %D nodes %t, gres %G, time %l)"))


def _accounting() -> str:
    config = dict(re.findall(r"^(\w+) *= (.*)$", _answer("scontrol", "show", "config"), re.MULTILINE))
    store, age = config["AccountingStorageType"], config["MinJobAge"]
    if store.endswith("/none"):
        return f"off: how a job ended is in Slurm for {age}, then in the run directory alone"
    return f"on ({store})"


def _job(settings: SlurmSettings) -> str:
    """Options as a run would have them; `--test-only` asks when it would start, and queues nothing."""
    with tempfile.TemporaryDirectory() as folder:
        nothing = Replica(
            job="composer-doctor",
            rank=0,
            world=1,
            attempt=0,
            command=("true",),
            env={},
            folder=Path(folder, "replicas", "0", "attempt_0"),
            time_limit_s=60,
            gpu=settings.gpus(),
        )
        file = Path(folder, "doctor.sh")
        write_text(file, script(arrays([nothing])[0], settings))
        done = call("sbatch", "--test-only", str(file))
    if done.returncode:
        raise refused(done)
    return done.stderr.strip().removeprefix("sbatch: ")


def _answer(*argv: str) -> str:
    done = call(*argv)
    if done.returncode:
        raise complaint(done)
    return done.stdout.strip()
