"""Calls of Slurm's commands, and what their complaints mean: whose mistake, which field, what to do.

Not here: what is asked (`slurm.py`). To explain one more complaint, add a row to `REFUSALS`; Slurm's own words are kept
in any case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from composer_core.errors import ComposerError, MissingError, RunFailed, UsageError
from composer_core.run.control import PARENT_VARIABLE

AT = "executor slurm"
CONF = "SLURM_CONF"
DEFAULT_CONF = "/etc/slurm/slurm.conf"
PATIENCE_S = 120.0
"""How long a command may take. A controller that is busy or down makes them wait and retry for about a minute."""
_INPUT_VARIABLES = ("SBATCH_", "SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
"""They change what a command does, and come from an allocation or a site's profile."""
_NO_ANSWER = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "backup controller not responding",
)
_NOT_LET_IN = ("authentication", "Unauthorized credential", "munge", "Access/permission denied", "Invalid user id")


@dataclass(frozen=True)
class Refusal:
    """A complaint of sbatch that a field of the settings causes."""

    words: str
    field: str
    """Of the block `executor:`."""
    look: str = ""
    """Format of sinfo that lists what there is; "" where it does not."""
    fix: str = ""


_RESOURCES = "%P gres=%G cpus=%c memory=%mM nodes=%D"
REFUSALS = (
    Refusal("Invalid partition name", "partition", "%P", "one of"),
    Refusal("Invalid account", "account", fix="sacctmgr show associations user=$USER lists yours"),
    Refusal("Invalid qos", "qos", fix="sacctmgr show qos lists them"),
    Refusal("Invalid feature specification", "constraint", "%f", "features of nodes here"),
    Refusal("Invalid generic resource", "gpu", "%G", "executor.gpu_names says what this cluster calls a kind; it has"),
    Refusal("Memory specification can not be satisfied", "mem", "%P memory=%mM", "what nodes have"),
    Refusal("Invalid job array specification", "replicas", fix="scontrol show config | grep MaxArraySize is the bound"),
    Refusal("time limit", "limits.hours", "%P time=%l", "limits here"),
    Refusal("unrecognized option", "sbatch", fix="sbatch --help lists its options"),
    Refusal("unknown option", "sbatch", fix="sbatch --help lists its options"),
    # the last two are general; what is more special stands before them
    Refusal("Requested node configuration is not available", "gpu, cpus_per_task or mem", _RESOURCES, "nodes here"),
    Refusal("More processors requested than permitted", "cpus_per_task", _RESOURCES, "nodes here"),
)


def call(*argv: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands in this process's environment with these variables added; its exit code is the
    caller's to judge.

    Raises:
        MissingError: the command is not installed, or Slurm does not answer or does not let us in.
    """
    environment = {**plain_environment(os.environ), **(more or {})}
    _find(argv[0], environment)
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise _no_answer(f"{argv[0]} did not end within {PATIENCE_S:.0f} s", environment) from error
    said = _said(done)
    if done.returncode and any(words in said for words in _NO_ANSWER):
        raise _no_answer(said, environment)
    if done.returncode and any(words in said for words in _NOT_LET_IN):
        raise MissingError(f"Slurm does not let us in: {said}", at=AT, fix="is munged running, with the cluster's key?")
    return done


def plain_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Without what steers Slurm's commands, except where its configuration is, and without this run's own parent."""
    return {
        name: value
        for name, value in env.items()
        if name == CONF or not (name.startswith(_INPUT_VARIABLES) or name == PARENT_VARIABLE)
    }


def refused(done: subprocess.CompletedProcess[str]) -> ComposerError:
    """Why sbatch did not take a job, in its own words, with the field that is wrong where one is known."""
    said = _said(done)
    for refusal in REFUSALS:
        if refusal.words.lower() in said.lower():
            at = refusal.field if "." in refusal.field else f"executor.{refusal.field}"
            return UsageError(f"Slurm refuses: {said}", at=at, fix=_fix(refusal))
    return RunFailed(f"Slurm refuses: {said}", at=AT)


def complaint(done: subprocess.CompletedProcess[str]) -> RunFailed:
    """Of any other command, which should have worked."""
    return RunFailed(f"{done.args[0]}: {_said(done)}", at=AT)


def partitions(pattern: str) -> list[str]:
    """What sinfo says of each partition or kind of node in this format; empty where it says nothing."""
    done = call("sinfo", "-h", "-a", "-o", pattern)
    return sorted({line.strip() for line in done.stdout.splitlines()}) if not done.returncode else []


def _fix(refusal: Refusal) -> str:
    there = ", ".join(partitions(refusal.look)) if refusal.look else ""
    return f"{refusal.fix}: {there or 'nothing'}" if refusal.look else refusal.fix


def _find(command: str, environment: Mapping[str, str]) -> None:
    if shutil.which(command, path=environment.get("PATH")) is None:
        raise MissingError(f"{command} is not installed here", at=AT, fix="start it on a login node of the cluster")
    conf = environment.get(CONF)
    if conf is not None and not Path(conf).is_file():  # Slurm's commands wait a minute for it
        raise MissingError(f"{CONF} is {conf}, where there is no file", at=AT, fix=f"unset it, or export {CONF}=...")


def _no_answer(said: str, environment: Mapping[str, str]) -> MissingError:
    conf = environment.get(CONF)
    where = f"{CONF} is {conf}" if conf else f"{CONF} is not set, so {DEFAULT_CONF} counts"
    return MissingError(f"no controller of Slurm answers: {said} ({where})", at=AT, fix="scontrol ping asks it")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return "; ".join(_sentences(done.stderr)) or f"exit code {done.returncode}"


def _sentences(text: str) -> Iterator[str]:
    for line in text.splitlines():
        _, mark, said = line.rpartition("error: ")
        if mark or not line.startswith("Try "):
            yield (said if mark else line).strip()
