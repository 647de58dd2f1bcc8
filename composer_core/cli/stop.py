"""`composer-run stop`: leave a STOP file, which the worker reads after each step, wherever it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from composer_core.cli.run import RunsOption
from composer_core.cli.runs import RunArgument
from composer_core.errors import UsageError

if TYPE_CHECKING:
    from composer_core.run.directory import RunDirectory

POLL_SECONDS = 0.3
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; the run's events and report keep it.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the run is over.")]


def stop(
    run: RunArgument = "latest",
    runs: RunsOption = None,
    reason: ReasonOption = "composer-run stop",
    wait: WaitOption = False,
) -> None:
    """Ask RUN to finish its step, save, and end with exit code 5.

    Example: composer-run stop latest --reason "the reward collapsed" --wait
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.files import write_text
    from composer_core.run.progress import duration
    from composer_core.run.status import UNFINISHED, status_of

    directory = find_run(run, runs_root(runs))
    now = status_of(directory)
    if now.state not in UNFINISHED:
        raise UsageError(f"run {now.run} is over already: {now.state}", fix="composer-run status shows what still runs")
    write_text(directory.stop_file, reason.strip() + "\n")
    pace = "" if now.step_s is None or now.step_s < 1 else f", which takes about {duration(now.step_s)}"
    typer.echo(f"{now.run}: asked to stop after step {now.step + 1}{pace}; it saves and ends with exit code 5")
    if wait:
        _wait(directory)


def _wait(directory: RunDirectory) -> None:
    from composer_core.run.status import UNFINISHED

    while (state := directory.state()).state in UNFINISHED:
        time.sleep(POLL_SECONDS)
    typer.echo(f"{state.state}: {state.reason}" if state.reason else state.state)
