"""`composer-run status`: all runs of a folder in a table, or one in detail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, build_registry, show_json
from composer_core.cli.run import RunsOption
from composer_core.cli.runs import run_names, shown
from composer_core.errors import ComposerError

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry
    from composer_core.run.directory import RunDirectory
    from composer_core.run.status import Status

NOTHING = "-"
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs to show; default: all of the folder.", autocompletion=run_names),
]


def status(
    ctx: typer.Context, names: NamesArgument = None, runs: RunsOption = None, as_json: JsonOption = False
) -> None:
    """Say where runs stand: done, running, stopped, failed; step, reward, age and time left.

    Example: composer-run status latest
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.status import all_runs, status_of, status_of_each

    root = runs_root(runs)
    directories = [find_run(name, root) for name in names] if names else all_runs(root)
    replicas = _replicas(ctx, directories)  # first: it may find that a run is over
    found = [status_of(directory) for directory in directories] if names else status_of_each(directories)
    if as_json:
        show_json([{**asdict(one), **_replicas_json(replicas.get(one.run))} for one in found])
    elif not found:
        typer.echo(f"no runs in {shown(root)}")
    elif len(names or ()) == 1:
        _details(found[0])
        for line in replicas.get(found[0].run, ()):
            typer.echo(f"{line.name:9} {line.text}")
    else:
        _table(found)


@dataclass(frozen=True)
class _Line:
    """A replica, or why it cannot be said where replicas stand."""

    name: str
    text: str
    facts: dict[str, Any]


def _replicas(ctx: typer.Context, directories: Sequence[RunDirectory]) -> dict[str, list[_Line]]:
    """Of runs that an executor with a ledger launched; it is asked only about those that are not over."""
    from composer_core.run.launched import was_launched

    launched = [directory for directory in directories if was_launched(directory)]
    registry = build_registry(ctx) if launched else None
    return {} if registry is None else {directory.name: _lines(directory, registry) for directory in launched}


def _lines(directory: RunDirectory, registry: Registry) -> list[_Line]:
    from composer_core.run.launched import replicas_of

    try:
        found = replicas_of(directory, registry)
    except (ComposerError, ValueError, LookupError) as error:  # one run must not hide the others
        return [_Line("replicas", str(error), {"error": str(error)})]
    return [
        _Line(
            f"replica {handle.rank}",
            f"{status.in_words()}; {handle.executor} {handle.id}",
            {
                "rank": handle.rank,
                "attempt": handle.attempt,
                "id": handle.id,
                "executor": handle.executor,
                "state": status.state.value,
                "exit_code": status.exit_code,
                "reason": status.reason,
            },
        )
        for handle, status in found
    ]


def _replicas_json(lines: Sequence[_Line] | None) -> dict[str, Any]:
    return {} if lines is None else {"replicas": [line.facts for line in lines]}


def _table(found: Sequence[Status]) -> None:
    """One line a run; a second one where there is a reason."""
    rows = [("RUN", "STATE", "STEP", "REWARD", "AGE", "LEFT")]
    rows += [(one.run, one.state, _steps(one, "/"), _reward(one), _age(one.started), _left(one)) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, one in zip(rows, [None, *found], strict=True):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if one is not None and one.reason:
            typer.echo(f"  {one.reason.splitlines()[0]}")


def _details(one: Status) -> None:
    facts = {
        "run": one.run,
        "state": one.state,
        "reason": one.reason.replace("\n", "\n" + " " * 10),
        "step": _steps(one, " of "),
        "reward": _reward(one),
        "step time": "" if one.step_s is None else f"{one.step_s:.3g} s",
        "started": "" if one.started is None else f"{_clock(one.started)} ({_age(one.started)} ago)",
        "last sign": "" if one.updated is None else f"{_age(one.updated)} ago",
        "left": _left(one),
        "folder": shown(Path(one.path)),
    }
    for name, value in facts.items():
        if value not in ("", NOTHING):
            typer.echo(f"{name:9} {value}")


def _steps(one: Status, of: str) -> str:
    return str(one.step) if one.total_steps is None else f"{one.step}{of}{one.total_steps}"


def _reward(one: Status) -> str:
    return NOTHING if one.reward is None else f"{one.reward:.3g}"


def _age(moment: float | None) -> str:
    from composer_core.run.progress import duration

    return NOTHING if moment is None else duration(max(0.0, time.time() - moment))


def _left(one: Status) -> str:
    from composer_core.run.progress import duration

    return NOTHING if one.left_s is None else duration(one.left_s)


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
