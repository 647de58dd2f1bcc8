"""`composer-run logs`: what a run's worker wrote, and what it goes on to write."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from composer_core.cli.run import RunsOption
from composer_core.cli.runs import RunArgument

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run is over.")]
LinesOption = Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="Show the last N lines of a file.")]


def logs(
    run: RunArgument = "latest", runs: RunsOption = None, follow: FollowOption = False, lines: LinesOption = 100
) -> None:
    """Show the log files of RUN.

    Example: composer-run logs latest --follow
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.logs import LogReader

    reader = LogReader(find_run(run, runs_root(runs)))
    for line in reader.last(lines):
        typer.echo(line)
    if follow:
        with suppress(KeyboardInterrupt):  # how one leaves it
            for line in reader.follow():
                typer.echo(line)
