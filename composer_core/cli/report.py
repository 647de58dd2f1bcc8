"""`composer-run report`: write the page of a run, or its figures as JSON."""

from __future__ import annotations

from dataclasses import asdict

import typer

from composer_core.cli.common import JsonOption, show_json
from composer_core.cli.run import RunsOption
from composer_core.cli.runs import RunArgument


def report(run: RunArgument = "latest", runs: RunsOption = None, as_json: JsonOption = False) -> None:
    """Write report.html for RUN, finished or not.

    Example: composer-run report latest --json
    """
    from composer_core.run.directory import find_run, runs_root
    from composer_core.run.report import build_report  # heavy: matplotlib

    made = build_report(find_run(run, runs_root(runs)))
    if as_json:
        show_json(asdict(made))
    else:
        typer.echo(made.report)
