"""`composer-run doctor`: what of this machine and environment is in the way, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from composer_core.cli.common import JsonOption, build_registry, show_json
from composer_core.cli.run import RunsOption
from composer_core.errors import MissingError

DeepOption = Annotated[
    bool, typer.Option("--deep", help="Also import torch and every contribution, and run the backends' own checks.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", metavar="NAME", help="Look at this executor alone, with a harmless probe."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of that executor, e.g. address=http://HOST:8265."),
]


def doctor(
    ctx: typer.Context,
    runs: RunsOption = None,
    deep: DeepOption = False,
    executor: ExecutorOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at Python, memory, disk, threads, packages and plugins; 3 where something fails.

    Example: composer-run doctor --deep
    """
    from composer_core.hf.cache import cache_root
    from composer_core.run.directory import runs_root
    from composer_core.run.doctor import Level, examine

    registry = build_registry(ctx)
    if executor is None:
        findings = examine(registry, runs_root(runs), cache_root(), deep=deep)
    else:
        from composer_core.run.launched import examine_executor

        findings = examine_executor(registry, executor, settings or ())
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if as_json:
        show_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.level:4}  {finding.name:{width}}  {finding.found}")
            if finding.fix:
                typer.echo(f"{'':{width + 8}}fix: {finding.fix}")
    if failed:
        raise typer.Exit(MissingError.exit_code)
