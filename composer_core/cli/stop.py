"""`composer-run stop`: leave a STOP file, which the worker reads after each step, wherever it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from composer_core.cli.common import build_registry
from composer_core.cli.run import RunsOption
from composer_core.cli.runs import RunArgument
from composer_core.errors import Stopped, UsageError
from composer_core.jobs import JobState

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry
    from composer_core.run.directory import RunDirectory

POLL_SECONDS = 0.3
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; the run's events and report keep it.")
]
KillOption = Annotated[
    bool, typer.Option("--kill", help="End it at once, without saving, by the executor that launched it.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the run is over.")]


def stop(
    ctx: typer.Context,
    run: RunArgument = "latest",
    runs: RunsOption = None,
    reason: ReasonOption = "composer-run stop",
    wait: WaitOption = False,
    kill: KillOption = False,
) -> None:
    """Ask RUN to finish its step, save, and end with exit code 5.

    Example: composer-run stop latest --reason "the reward collapsed" --wait
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.files import write_text
    from composer_core.run.launched import was_launched
    from composer_core.run.progress import duration
    from composer_core.run.status import UNFINISHED, status_of

    directory = find_run(run, runs_root(runs))
    registry = build_registry(ctx) if kill or was_launched(directory) else None
    if registry is not None and _ended_by_executor(directory, registry, kill=kill, reason=reason.strip()):
        return
    now = status_of(directory)
    if now.state not in UNFINISHED:
        raise UsageError(f"run {now.run} is over already: {now.state}", fix="composer-run status shows what still runs")
    write_text(directory.stop_file, reason.strip() + "\n")
    pace = "" if now.step_s is None or now.step_s < 1 else f", which takes about {duration(now.step_s)}"
    typer.echo(f"{now.run}: asked to stop after step {now.step + 1}{pace}; it saves and ends with exit code 5")
    if wait:
        _wait(directory)


def _ended_by_executor(directory: RunDirectory, registry: Registry, *, kill: bool, reason: str) -> bool:
    """Where the STOP file would not do: no time to save is wanted, nothing runs yet, or no disk is shared."""
    from composer_core.plugins.contributions import ExecutorPlugin, Feature, Kind
    from composer_core.run.launched import executor_block, launcher_of, replicas_of, said_how_it_ended

    executor = launcher_of(directory, registry)
    running = [(handle, status) for handle, status in replicas_of(directory, registry) if not status.state.over]
    waiting = all(status.state is JobState.PENDING for _, status in running)
    use, settings = executor_block(directory)
    _, contribution = registry.get(Kind.EXECUTOR, use)
    shared = isinstance(contribution, ExecutorPlugin) and Feature.SHARED_DISK in contribution.features
    shared = shared and not settings.get("store")
    if not running or not (kill or waiting or not shared):
        return False
    executor.end([handle for handle, _ in running], at_once=kill or waiting)
    if not said_how_it_ended(directory):
        directory.event("stopped", reason=reason, exit_code=Stopped.exit_code)
    typer.echo(f"{directory.name}: ended, nothing of it is left")
    return True


def _wait(directory: RunDirectory) -> None:
    from composer_core.run.status import UNFINISHED

    while (state := directory.state()).state in UNFINISHED:
        time.sleep(POLL_SECONDS)
    typer.echo(f"{state.state}: {state.reason}" if state.reason else state.state)
