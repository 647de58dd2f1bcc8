"""A thin front for programs of one's own: `launch_replicas` starts a module or a file N times, anywhere.

    handles = launch_replicas(2, "train.py", {"steps": 100}, executor="slurm", gpu="H200:8")
    code = collect(handles)

Underneath stands the same executor that `composer-run` uses, with the same environment contract (`contract_env.py`).
Nothing is pickled: what runs is code that lies where the replica runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_core.errors import UsageError
from composer_core.jobs import Executor, Job, JobHandle, JobState
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Registry
from composer_core.run.directory import create_run, runs_root
from composer_core.run.launched import make_executor

STOP_SECONDS = 30.0
"""From SIGTERM to SIGKILL, where the settings do not say: a program of one's own seldom saves for longer."""
Value = str | int | float | bool


@dataclass(frozen=True)
class ReplicaHandle:
    """One started replica; JSON-able, so another process can use it."""

    rank: int
    backend_name: str
    """Of the executor."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`id`, `attempt` and `facts` of the job's handle, and `settings` of the executor."""

    def poll(self) -> JobState:
        """Where it stands."""
        return self._executor().poll(self._handle()).state

    def logs(self, *, follow: bool = False, last: int | None = 200) -> Iterator[str]:
        """Its lines."""
        return self._executor().stream_logs(self._handle(), follow=follow, last=last)

    def cancel(self) -> None:
        """End it; nothing of it is left.

        Raises:
            RunFailed: something is.
        """
        self._executor().cancel(self._handle())

    def _executor(self) -> Executor:
        return _executor(self.backend_name, self.metadata["settings"])

    def _handle(self) -> JobHandle:
        known = self.metadata
        return JobHandle(self.backend_name, self.rank, known["id"], known["attempt"], known["facts"])


def launch_replicas(
    n_replicas: int,
    entrypoint: str,
    entrypoint_args: Mapping[str, Value] | None = None,
    *,
    executor: str = "local",
    gpu: str | None = None,
    timeout: float = 3600,
    settings: Mapping[str, Any] | None = None,
    secrets: Sequence[str] = (),
    run_dir: Path | None = None,
    detach: bool = False,
) -> list[ReplicaHandle]:
    """Start all replicas or none.

    Args:
        n_replicas: how many; each finds its number in COMPOSER_RANK.
        entrypoint: a `.py` file or the name of a module.
        entrypoint_args: what it gets as `--key value`.
        executor: where, as in a spec.
        gpu: of each replica, such as `H200:8`.
        timeout: seconds that each may run.
        settings: more of the spec's block `executor:`.
        secrets: names of variables of this environment that replicas get; values are written nowhere.
        run_dir: a folder for ledger and logs that is there; default: a new one where runs are.
        detach: whether replicas live on when this process ends.

    Raises:
        TypeError: `entrypoint` is a function.
        UsageError: a setting is wrong; MissingError, RunFailed: as the executor says.
    """
    if n_replicas < 1:
        raise UsageError(f"n_replicas must be 1 or more, got {n_replicas}")
    block = {"stop_seconds": STOP_SECONDS, **(settings or {}), **({} if gpu is None else {"gpu": gpu})}
    place = _executor(executor, block)
    argv = (*_program(entrypoint), *_arguments(entrypoint_args or {}))
    folder = create_run(runs_root(None), "replicas").path if run_dir is None else run_dir.absolute()
    job = Job(
        folder.name,
        argv,
        folder,
        secrets=tuple(secrets),
        replicas=n_replicas,
        time_limit_s=timeout,
        detached=detach,
    )
    return [_front(handle, block) for handle in place.launch(job)]


def collect(handles: Sequence[ReplicaHandle]) -> int:
    """Wait for all of one launch; the worst exit code."""
    return handles[0]._executor().collect([handle._handle() for handle in handles]) if handles else 0


def _front(handle: JobHandle, settings: Mapping[str, Any]) -> ReplicaHandle:
    facts = {"id": handle.id, "attempt": handle.attempt, "facts": dict(handle.facts), "settings": dict(settings)}
    return ReplicaHandle(handle.rank, handle.executor, facts)


def _executor(use: str, settings: Mapping[str, Any]) -> Executor:
    _, contribution = Registry.discover().get(Kind.EXECUTOR, use)
    try:
        return make_executor(contribution, contribution.settings.model_validate(dict(settings)))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(first["msg"], at=".".join(["executor", *map(str, first["loc"])])) from None


def _program(entrypoint: str) -> tuple[str, ...]:
    if not isinstance(entrypoint, str):
        raise TypeError(
            f"entrypoint must be a file or the name of a module, got {type(entrypoint).__name__}: a function would "
            "have to be pickled, and a pickle runs whatever code stands in it"
        )
    if not entrypoint.endswith(".py"):
        return ("-m", entrypoint)
    path = Path(entrypoint).absolute()
    if not path.is_file():
        raise UsageError("no such file", at=str(path))
    return (str(path),)


def _arguments(values: Mapping[str, Value]) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(value, Value):
            raise TypeError(f"argument {name!r} must be text, a number or a bool, got {type(value).__name__}")
        yield f"--{name}"
        yield str(value).lower() if isinstance(value, bool) else str(value)
