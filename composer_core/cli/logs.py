"""`composer-run logs`: what a run's worker wrote, and what it goes on to write."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from composer_core.cli.common import build_registry
from composer_core.cli.run import RunsOption
from composer_core.cli.runs import RunArgument
from composer_core.errors import UsageError

if TYPE_CHECKING:
    from composer_core.run.directory import RunDirectory

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run is over.")]
LinesOption = Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="Show the last N lines of a file.")]


ReplicaOption = Annotated[
    int | None,
    typer.Option("--replica", min=0, metavar="RANK", help="What this replica printed, asked of its executor."),
]


def logs(
    ctx: typer.Context,
    run: RunArgument = "latest",
    runs: RunsOption = None,
    follow: FollowOption = False,
    lines: LinesOption = 100,
    replica: ReplicaOption = None,
) -> None:
    """Show the log files of RUN; where they are not on this disk, what its replica 0 printed.

    Example: composer-run logs latest --follow
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.launched import was_launched
    from composer_core.run.logs import LogReader

    directory = find_run(run, runs_root(runs))
    reader = LogReader(directory)
    if replica is not None or (was_launched(directory) and not reader.files()):
        _printed(ctx, directory, replica or 0, follow=follow, lines=lines)
        return
    for line in reader.last(lines):
        typer.echo(line)
    if follow:
        with suppress(KeyboardInterrupt):  # how one leaves it
            for line in reader.follow():
                typer.echo(line)


def _printed(ctx: typer.Context, directory: RunDirectory, rank: int, *, follow: bool, lines: int) -> None:
    from composer_core.run.launched import executor_of, launcher_of

    registry = build_registry(ctx)
    handles = {handle.rank: handle for handle, _ in launcher_of(directory, registry).attach(directory.path)}
    if rank not in handles:
        raise UsageError(f"run {directory.name} has no replica {rank}; there are {len(handles)}", at="--replica")
    with suppress(KeyboardInterrupt):
        for line in executor_of(directory, registry).stream_logs(handles[rank], follow=follow, last=lines):
            typer.echo(line)
