"""Where metrics go besides metrics.jsonl: TensorBoard, trackio, wandb. The spec's `sinks:` says which.

A sink's package is imported when the run starts and checked for (without importing it) before that. What a sink needs
beyond a name (project, host, key) it takes from its own environment variables. To add one: a class with `name`,
`log`, `close`, and a row in `_SINKS`; the spec's model lists the names.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from composer_core.errors import MissingError
from composer_core.run.directory import RunDirectory

PROJECT = "composer"
"""Of runs whose environment names no project (WANDB_PROJECT, TRACKIO_PROJECT)."""


class Sink(Protocol):
    """Takes the metrics of logged steps, in the main process."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One logged step. What it raises switches the sink off and is reported."""
        ...

    def close(self) -> None:
        """Send what is held back."""
        ...


class _Kind(NamedTuple):
    package: str
    """What must be importable."""
    open: Callable[[RunDirectory, bool], Sink]


def check_sinks(names: Sequence[str]) -> None:
    """Look for the packages of all sinks, without importing them.

    Raises:
        MissingError: one is not installed.
    """
    for name in names:
        package = _SINKS[name].package
        if importlib.util.find_spec(package) is None:
            raise MissingError(f"sink {name!r} needs the package {package}", at="sinks", fix=_install(name))


def open_sinks(names: Sequence[str], directory: RunDirectory, *, resumed: bool) -> list[Sink]:
    """The sinks of a run.

    Args:
        names: as the spec lists them.
        directory: the run's; its name is the run's name everywhere.
        resumed: it goes on after a checkpoint, and may log some steps again.

    Raises:
        MissingError: a package is missing, or its service does not take the run.
    """
    check_sinks(names)
    opened = []
    for name in names:
        try:
            opened.append(_SINKS[name].open(directory, resumed))
        except Exception as error:  # somebody else's client, whatever its type
            raise MissingError(
                f"sink {name!r} cannot be opened: {type(error).__name__}: {error}", at="sinks", fix=_install(name)
            ) from error
    return opened


def _install(name: str) -> str:
    return f"pip install 'composer-core[{name}]'"


class TensorBoard:
    """Event files in `tensorboard/`: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self, directory: RunDirectory, resumed: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._session_start = SessionLog(status=SessionLog.START) if resumed else None
        self._writer = EventFileWriter(str(directory.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with a scalar per metric."""
        if self._session_start is not None:  # TensorBoard then drops this and later steps of earlier files
            self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=self._session_start))
            self._session_start = None
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary={"value": values}))

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class Wandb:
    """A wandb run of the same name and id; WANDB_PROJECT, WANDB_MODE and the other variables of wandb hold."""

    name = "wandb"

    def __init__(self, directory: RunDirectory, resumed: bool) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=directory.name,
            name=directory.name,
            dir=str(_made(directory.path / "wandb").parent),
            config=_config(directory),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps that are not later than the last wandb drops: after a resume, those it has already."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


class Trackio:
    """A trackio run of the same name; TRACKIO_PROJECT, TRACKIO_SPACE_ID and TRACKIO_DIR hold."""

    name = "trackio"

    def __init__(self, directory: RunDirectory, resumed: bool) -> None:
        with redirect_stdout(sys.stderr):  # it has much to say, and standard output is ours
            import trackio

            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=directory.name,
                space_id=os.environ.get("TRACKIO_SPACE_ID"),
                config=_config(directory),
                resume="allow" if resumed else "never",
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; trackio takes no NaN."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Send the rest."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _config(directory: RunDirectory) -> dict[str, Any]:
    """The run's spec as the plan has it: placeholders, never the values of the environment."""
    config: dict[str, Any] = (directory.read_json("plan.json") or {}).get("spec", {})
    return config


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


_SINKS: dict[str, _Kind] = {
    "tensorboard": _Kind("tensorboard", TensorBoard),
    "trackio": _Kind("trackio", Trackio),
    "wandb": _Kind("wandb", Wandb),
}
