"""`composer-run reap`: end replicas that run for nobody."""

from __future__ import annotations

from typing import Annotated

import typer

from composer_core.cli.common import build_registry
from composer_core.cli.run import RunsOption

ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", metavar="NAME", help="Ask this one alone; default: those of the folder's runs."),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="List them, and end nothing.")]
UnknownOption = Annotated[
    bool, typer.Option("--unknown", help="End those too whose run is not in the folder; it may be somebody's.")
]


def reap(
    ctx: typer.Context,
    runs: RunsOption = None,
    executor: ExecutorOption = None,
    dry_run: DryOption = False,
    unknown: UnknownOption = False,
) -> None:
    """List what executors still run in your name, and end what no run needs.

    A replica is left over when its run is over, when the command that waited for it is gone, or when another one was
    started in its place. A detached run is waited for by nobody and goes on.
    Example: composer-run reap --executor slurm --dry-run
    """
    from composer_core.run.directory import runs_root
    from composer_core.run.launched import reaping, why_left_over
    from composer_core.run.status import all_runs

    root, count = runs_root(runs), 0
    for name, place in reaping(build_registry(ctx), all_runs(root), executor):
        for handle in place.leftovers():
            count += 1
            why = why_left_over(handle, root, place)
            if why is None:
                why = "its run is not in this folder" if unknown else ""
                said = why or f"left alone, its run is not in {root}: --runs DIR, or --unknown"
            else:
                said = why or "goes on, its run is not over"
            typer.echo(f"{name} {handle.id}: replica {handle.rank} of {handle.facts['job']}: {said}")
            if why and not dry_run:
                place.cancel(handle)
                typer.echo("  ended, nothing of it is left")
    if not count:
        typer.echo("nothing runs")
