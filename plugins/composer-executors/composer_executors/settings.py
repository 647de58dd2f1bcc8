"""What a block `executor:` may hold, per place. Light: a spec is checked with these.

What all places share stands in `JobSettings`; a new place adds a class here and its line in `plugin.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_core.plugins.settings import PathKind, Settings
from composer_executors.gpus import RAY, SLURM, in_words_of, parse_gpu

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = "COMPOSER_"
_SBATCH_NAME = re.compile(r"[a-z][a-z0-9-]*")
_OURS = {
    "array": "the executor makes one task of each replica",
    "comment": "it is the label by which leftovers are found",
    "export": "executor.env and executor.secrets",
    "gres": "executor.gpu",
    "gpus": "executor.gpu",
    "job-name": "it is the label by which leftovers are found",
    "output": "logs stand in the run directory",
    "error": "logs stand in the run directory",
    "open-mode": "logs stand in the run directory",
    "parsable": "the executor reads the answer",
    "time": "limits.hours",
    "signal": "executor.stop_seconds",
    "wrap": "the worker is what runs",
    "partition": "executor.partition",
    "account": "executor.account",
    "qos": "executor.qos",
    "cpus-per-task": "executor.cpus_per_task",
    "mem": "executor.mem",
    "constraint": "executor.constraint",
    "requeue": "executor.requeue",
    "no-requeue": "executor.requeue",
    "wait": "composer-run waits itself",
    "nodes": "one task is one replica, on one node",
    "ntasks": "one task is one replica",
}
"""Options of sbatch that a spec may not set, and what sets them."""


def _is_gpu(text: str | None) -> str | None:
    if text is not None:
        parse_gpu(text)
    return text


def _are_names(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name.startswith(_OWN):
            raise ValueError(f"{name}: names that begin with {_OWN} are Composer's own")
        if "${env:" in env[name]:
            raise ValueError(f"{name}: a value from the environment is passed on by its name: secrets: [{name}]")
    return env


def _are_variables(names: list[str]) -> list[str]:
    for name in names:
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    return names


def _are_options(options: dict[str, str]) -> dict[str, str]:
    for name, value in options.items():
        if not _SBATCH_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be the long name of an option of sbatch, without the two hyphens")
        if name in _OURS:
            raise ValueError(f"{name} is not for a spec to set: {_OURS[name]}")
        if "\n" in value:
            raise ValueError(f"{name}: one line")
    return options


Gpu = Annotated[str | None, AfterValidator(_is_gpu)]


class JobSettings(Settings):
    """Shared by all places."""

    python: Annotated[str | None, PathKind.IF_THERE] = None
    """Interpreter to run the worker with; default: the one of `composer-run`."""
    env: Annotated[dict[str, str], AfterValidator(_are_names)] = {}
    """More environment variables of the worker. They end up in files and listings, so nothing secret."""
    secrets: Annotated[list[str], AfterValidator(_are_variables)] = []
    """Names of variables of this environment that the worker gets too, such as HF_TOKEN; a value is written nowhere.
    Those that the spec asks for by `${env:NAME}` are passed on anyway."""
    restarts: int = Field(0, ge=0)
    """How often a replica that failed is started again, from its newest checkpoint. A mistake in the spec and a run
    that was asked to stop are not repaired by another try."""
    start_minutes: float | None = Field(None, gt=0)
    """How long a replica may wait for its machine; then all are cancelled and the run has failed. Default: for ever."""
    stop_seconds: float = Field(300, gt=0)
    """How long a worker that was asked to stop may take to finish its step and save, before it is ended. It has as much
    beyond `limits.hours`."""
    unknown_minutes: float = Field(10, gt=0)
    """How long a service may not answer or not know a replica, before the replica counts as failed."""
    poll_seconds: float = Field(1.0, gt=0)
    """Longest pause between two questions to the service."""
    store: Annotated[str | None, PathKind.STORE] = None
    """Where a run travels through if its directory is on no disk that the worker sees: a folder, or `s3://BUCKET/PREFIX`
    (needs `composer-executors[s3]`; the worker's credentials are its machine's own, or named under `secrets`). Default:
    the disk is shared."""

    def gpus(self) -> tuple[str, int] | None:
        """GPUs of each replica: the kind in the service's own words, and how many; None: not asked for."""
        return None


class LocalSettings(JobSettings):
    """Processes of this machine; each sees all its GPUs."""

    threads: int | None = Field(None, ge=1)
    """OMP_NUM_THREADS for each worker; tiny models are fastest with 1."""
    nice: int = Field(0, ge=0, le=19)
    """How much each worker steps back behind other programs."""


class Container(Settings):
    """An image that the worker runs in; it must hold the interpreter that `python` names."""

    image: str = Field(min_length=1)
    """As the runtime takes it: `docker://...`, `/images/train.sqsh`, `/images/train.sif`."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: a plugin of Slurm (`srun --container-image`); apptainer: `apptainer exec --nv`."""


class SlurmSettings(JobSettings):
    """Jobs of a Slurm cluster, which shares the disk of the run directory."""

    gpu: Gpu = None
    """GPUs of each replica: `H200:8`, `any:2`."""
    gpu_names: dict[str, str] = {}
    """What this cluster calls a kind, as in `sinfo -o %G`: `{H200: nvidia_h200}`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int | None = Field(None, ge=1)
    mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$")
    """Memory of each replica: `64G`."""
    constraint: str | None = None
    """Features that a node must have: `nvlink&ib`."""
    container: Container | None = None
    requeue: bool = False
    """Let Slurm start a replica again that was preempted or whose node failed."""
    sbatch: Annotated[dict[str, str], AfterValidator(_are_options)] = {}
    """More options of sbatch by their long names: `{reservation: maintenance, exclusive: ""}`."""
    poll_seconds: float = Field(10.0, gt=0)
    """Longest pause between two questions to the service."""

    def gpus(self) -> tuple[str, int] | None:
        """As `--gres` has them."""
        names = {**SLURM, **{kind.upper(): name for kind, name in self.gpu_names.items()}}
        return None if self.gpu is None else in_words_of(parse_gpu(self.gpu), names, service="slurm")

    @model_validator(mode="after")
    def _kind_is_known(self) -> Self:
        self.gpus()
        return self


class RaySettings(JobSettings):
    """Jobs of a Ray cluster. Variables named by `secrets` must also be set where `ray start` runs: Ray shows what a job
    is sent.
    """

    address: str = "http://127.0.0.1:8265"
    """Of the dashboard. A token comes from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, as with Ray's own
    client."""
    gpu: Gpu = None
    """GPUs of each replica: `H200:8`, `any:2`."""
    num_cpus: float | None = Field(None, ge=0)
    """CPUs that Ray sets aside for each replica."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory that Ray sets aside for each replica."""
    resources: dict[str, float] = {}
    """Custom resources of the cluster that each replica takes."""
    label_selector: dict[str, str] = {}
    """Labels that a node must have: `{ray.io/market-type: spot}`."""
    poll_seconds: float = Field(3.0, gt=0)
    """Longest pause between two questions to the service."""

    def gpus(self) -> tuple[str, int] | None:
        """As Ray's accelerator types have them."""
        return None if self.gpu is None else in_words_of(parse_gpu(self.gpu), RAY, service="ray")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        self.gpus()
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"address {self.address!r} must be the dashboard's URL: http://HOST:8265")
        return self
