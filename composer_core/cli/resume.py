"""`composer-run resume`: go on with a run from its newest complete checkpoint, in its own directory."""

from __future__ import annotations

from typing import Annotated

import typer

from composer_core.cli.common import GlobalOptions, build_registry
from composer_core.cli.run import DetachOption, QuietOption, RunsOption, refuse_attached, say_how_it_ended, start
from composer_core.cli.runs import run_names, shown

OneRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name, the beginning of one, a path, or `latest`.", autocompletion=run_names
    ),
]
HarmlessArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides that leave it the same run: train.steps, train.log_every, checkpoint, limits, sinks, executor.",
    ),
]


def resume(
    ctx: typer.Context,
    run: OneRunArgument,
    overrides: HarmlessArgument = None,
    runs: RunsOption = None,
    quiet: QuietOption = False,
    detach: DetachOption = False,
) -> None:
    """Go on with RUN where its newest complete checkpoint ends, as if it had never been interrupted.

    Everything comes from the run's own plan; steps after the checkpoint are trained again. Refused when the run still
    runs, when nothing is left to do, or when an override would make it another run.
    Example: composer-run resume latest train.steps=400
    """
    from composer_core.data.preflight import preflight
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.launched import make_executor, replicas_of
    from composer_core.run.resume import plan_resume, write_resume
    from composer_core.run.sinks import check_sinks

    registry = build_registry(ctx)
    directory = find_run(run, runs_root(runs))
    replicas_of(directory, registry)  # of a worker that was killed elsewhere, only its executor knows
    planned = plan_resume(directory, registry, overrides or ())
    check_sinks(planned.spec.sinks)
    preflight(planned.spec, registry)
    _, contribution = registry.get(planned.spec.executor.kind, planned.spec.executor.use)
    executor = make_executor(contribution, planned.spec.executor.settings)
    if detach:
        refuse_attached(executor, planned.spec.executor.use)
    write_resume(directory, planned)
    if not quiet:
        said = [*planned.notes, f"run: {shown(directory.path)}", f"resuming after step {planned.step}"]
        typer.echo("\n".join(said), err=True)
    options = ctx.ensure_object(GlobalOptions)
    code = start(options, executor, directory, quiet=quiet, resume=planned.step, detach=detach)
    if not quiet and not detach:
        say_how_it_ended(directory)
    raise typer.Exit(code)
