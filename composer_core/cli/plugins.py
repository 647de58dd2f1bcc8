"""`composer-run plugins`: what is installed, who owns it, and what is wrong with the rest."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from composer_core.cli.common import JsonOption, build_registry, show_json

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def plugins() -> None:
    """What is installed, and what is wrong with it."""


@app.command("list")
def list_plugins(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List all contributions by kind, and the plugins that could not be used.

    Example: composer-run plugins list --json
    """
    registry = build_registry(ctx)
    if as_json:
        show_json({"plugins": _plugins(registry), "problems": _problems(registry)})
        return
    found = list(registry)
    width = max((len(contribution.name) for _, contribution in found), default=0)
    for kind, group in groupby(found, key=lambda item: item[1].kind):
        typer.echo(f"{kind}s")
        for owner, contribution in group:
            typer.echo(f"  {contribution.name:{width}}  {contribution.summary} [{owner}]")
    if registry.problems:
        typer.echo("problems")
    for problem in registry.problems:
        typer.echo(f"  {problem}" + (f"; fix: {problem.fix}" if problem.fix else ""))


def _plugins(registry: Registry) -> list[dict[str, Any]]:
    listed = []
    for owner in registry.owners:
        contributions = [
            {"kind": str(contribution.kind), "name": contribution.name, "summary": contribution.summary}
            for claimant, contribution in registry
            if claimant == owner
        ]
        facts = {"name": owner.name, "version": owner.version, "entry_point": owner.entry_point}
        listed.append({**facts, "contributions": contributions})
    return listed


def _problems(registry: Registry) -> list[dict[str, str]]:
    return [
        {
            "name": problem.owner.name,
            "version": problem.owner.version,
            "entry_point": problem.owner.entry_point,
            "stage": problem.stage,
            "reason": problem.reason,
            "fix": problem.fix,
        }
        for problem in registry.problems
    ]
