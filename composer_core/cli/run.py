"""`composer-run run`: check everything, make the run directory, start the worker, wait, say how it ended."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_core.cli.common import GlobalOptions, OverridesArgument, SpecArgument, open_spec
from composer_core.errors import ComposerError, UsageError

if TYPE_CHECKING:
    from composer_core.jobs import Executor, Job
    from composer_core.run.directory import RunDirectory
    from composer_core.spec.load import LoadedSpec
    from composer_core.spec.plan import Plan

RunsOption = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="Folder that holds runs; default COMPOSER_RUNS, else ./runs."),
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Launch it, say how to come back to it, and do not wait.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only errors.")]


def run(
    ctx: typer.Context,
    spec: SpecArgument,
    overrides: OverridesArgument = None,
    runs: RunsOption = None,
    quiet: QuietOption = False,
    detach: DetachOption = False,
) -> None:
    """Train what SPEC describes, and end with the run's exit code.

    0 done, 2 the spec or data is wrong, 3 something is missing, 4 the run failed, 5 stopped on request.
    Example: composer-run run spec.yaml train.steps=5
    """
    from composer_core.data.preflight import preflight
    from composer_core.run.directory import create_run, runs_root
    from composer_core.run.launched import make_executor
    from composer_core.run.sinks import check_sinks

    registry, loaded, plan = open_spec(ctx, spec, overrides)
    check_sinks(loaded.spec.sinks)
    lines = preflight(loaded.spec, registry)
    _, contribution = registry.get(loaded.spec.executor.kind, loaded.spec.executor.use)
    executor = make_executor(contribution, loaded.spec.executor.settings)
    if detach:
        refuse_attached(executor, loaded.spec.executor.use)
    directory = create_run(runs_root(runs), loaded.spec.name)
    _write_inputs(directory, loaded, plan)
    if not quiet:
        typer.echo("\n".join([*lines, f"run: {_shown(directory.path)}"]), err=True)
    options = ctx.ensure_object(GlobalOptions)
    code = start(options, executor, directory, quiet=quiet, detach=detach)
    if not quiet and not detach:
        say_how_it_ended(directory)
    raise typer.Exit(code)


def refuse_attached(executor: Executor, use: str) -> None:
    """Before anything is written.

    Raises:
        UsageError: nobody could come back to a job of this executor.
    """
    from composer_core.jobs import Attaches

    if not isinstance(executor, Attaches):
        fix = "executor: {use: local}, or another one of `composer-run plugins list`"
        raise UsageError(f"executor {use!r} cannot outlive the command", at="--detach", fix=fix)


def start(
    options: GlobalOptions,
    executor: Executor,
    directory: RunDirectory,
    *,
    quiet: bool,
    resume: int | None = None,
    detach: bool = False,
) -> int:
    """Run the directory's plan on the executor, from the checkpoint of step `resume` where given; its exit code."""
    from composer_core.jobs import LEDGER, Attaches

    job = replace(_job(options, directory, quiet=quiet, resume=resume), detached=detach)
    if not isinstance(executor, Attaches):
        (directory.path / LEDGER).unlink(missing_ok=True)  # of an earlier part of the run, which went elsewhere
    try:
        handles = executor.launch(job)
        if not detach:
            return executor.collect(handles)
    except ComposerError as error:  # the directory is there by now, so it must say what happened
        directory.event("failed", reason=str(error), exit_code=error.exit_code)
        raise
    if not quiet:
        name = directory.name
        typer.echo(f"launched\ncomposer-run status {name}\ncomposer-run logs {name} --follow\ncomposer-run stop {name}")
    return 0


def _write_inputs(directory: RunDirectory, loaded: LoadedSpec, plan: Plan) -> None:
    from composer_core.run.provenance import control_facts
    from composer_core.spec.resolved import values

    resolved = {
        key: {"value": value, "source": loaded.sources.get(key, "default")}
        for key, value in values(loaded.spec).items()
    }
    directory.write_text("spec.yaml", loaded.text)
    directory.write_json("resolved.json", resolved)
    directory.write_json("provenance.json", {"control": control_facts(sys.argv, loaded.path.absolute().parent)})
    directory.write_json("plan.json", plan.to_json())  # last: with it the directory is a run


def _job(options: GlobalOptions, directory: RunDirectory, *, quiet: bool, resume: int | None) -> Job:
    from composer_core.jobs import Job
    from composer_core.plugins.registry import DISABLE_VARIABLE
    from composer_core.run.directory import DEBUG_VARIABLE
    from composer_core.run.resume import spent_seconds

    environment = {}
    if options.debug:
        environment[DEBUG_VARIABLE] = "1"
    if not options.third_party or options.disabled:
        environment[DISABLE_VARIABLE] = ",".join(sorted(options.disabled)) if options.third_party else "*"
    more = [*(["--quiet"] if quiet else []), *([] if resume is None else ["--resume", str(resume)])]
    plan = directory.read_json("plan.json")
    spent_s = 0.0 if resume is None else spent_seconds(directory)
    return Job(
        name=directory.name,
        argv=("-m", "composer_core.run.worker", str(directory.plan), *more),
        run_dir=directory.path,
        env=environment,
        secrets=tuple(plan.get("required_env", ())),
        time_limit_s=_seconds_left(plan["spec"]["limits"]["hours"], spent_s),
        quiet=quiet,
    )


def _seconds_left(hours: float | None, spent_s: float) -> float | None:
    """Of limits.hours. The worker keeps it itself, and needs a moment to find that nothing is left."""
    return None if hours is None else max(60.0, hours * 3600 - spent_s)


def say_how_it_ended(directory: RunDirectory) -> None:
    """The last lines of a run on standard output."""
    from composer_core.run.report import summarise

    summary = summarise(directory)
    reward = "" if summary.reward_first is None else f", reward {summary.reward_first:.3g} -> {summary.reward_last:.3g}"
    reason = f" ({summary.reason})" if summary.state == "stopped" else ""  # a failure's was printed when it happened
    typer.echo(f"{summary.state}{reason}: {summary.steps} of {summary.total_steps} steps{reward}")
    if directory.report.is_file():
        typer.echo(f"report: {_shown(directory.report)}")
    if summary.model is not None:
        typer.echo(f"model: {_shown(Path(summary.model))}")


def _shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
