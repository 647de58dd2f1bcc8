"""`composer-run check`: find every mistake in a spec, from the file to what its backend can run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from composer_core.cli.common import JsonOption, OverridesArgument, SpecArgument, open_spec, show_json
from composer_core.errors import ComposerError, MissingError, Problem, SpecError


def check(
    ctx: typer.Context, spec: SpecArgument, overrides: OverridesArgument = None, as_json: JsonOption = False
) -> None:
    """Find every mistake in SPEC, without starting anything.

    Example: composer-run check spec.yaml train.steps=5
    """
    try:
        _, loaded, _ = open_spec(ctx, spec, overrides)
    except ComposerError as error:
        if not as_json:
            raise
        show_json({"ok": False, "problems": _problems(error)})
        raise typer.Exit(error.exit_code) from error
    if as_json:
        show_json({"ok": True, "problems": []})
        return
    loss = loaded.spec.loss
    objective = "-" if loss.objective is None else loss.objective.name
    channels = ", ".join(channel.name for channel in loss.channels) or "-"
    backend = loaded.spec.backend.name
    typer.echo(f"{spec}: ok (backend {backend}, objective {objective}, channels {channels})")


def _problems(error: ComposerError) -> list[dict[str, Any]]:
    if isinstance(error, SpecError):
        return [asdict(problem) for problem in error.problems]
    missing = isinstance(error, MissingError)
    return [asdict(Problem("", error.problem, error.fix, error.at, missing=missing))]
