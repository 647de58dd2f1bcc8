"""`composer-run plugins`: what is installed, who owns it, what it takes, whether it works, and how to start one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, build_registry, show_json
from composer_core.errors import MissingError

if TYPE_CHECKING:
    from composer_core.plugins.describe import Description, Option
    from composer_core.plugins.registry import Registry
    from composer_core.plugins.try_out import Tried

WIDTH = 110

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


class PackageKind(StrEnum):
    """What `plugins new` can start; the names are those of `plugins.contributions.Kind`."""

    CHANNEL = "channel"
    REWARD = "reward"
    OBJECTIVE = "objective"


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of contributions that begin as typed; called by the shell's completion."""
    registry = build_registry(ctx)
    return sorted({contribution.name for _, contribution in registry if contribution.name.startswith(incomplete)})


NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A contribution's name, owner/name, or a plugin's name.", autocompletion=_names
    ),
]
MaybeNameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A contribution's name, owner/name, or a plugin's name; default: all.",
        autocompletion=_names,
        show_default=False,
    ),
]
NewNameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the package and of what it brings: lower case, digits, hyphens.")
]
KindOption = Annotated[PackageKind, typer.Option("--kind", help="What it shall bring.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to put it; default ./NAME.")]


@app.callback()
def plugins() -> None:
    """Show what is installed, what it takes, whether it works; start a plugin of your own.

    Example: composer-run plugins list
    """


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


# -- show --------------------------------------------------------------------------------------------------------------


@app.command("show")
def show(ctx: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what NAME is and each option that its block in a spec takes. Imports none of its code.

    Example: composer-run plugins show grpo
    """
    from composer_core.plugins.describe import describe, find

    found = [describe(owner, contribution) for owner, contribution in find(build_registry(ctx), name)]
    if as_json:
        show_json([asdict(description) for description in found])
        return
    typer.echo("\n\n".join(_description(description) for description in found))


def _description(found: Description) -> str:
    """A contribution as indented text."""
    lines = [f"{found.kind} {found.name} [{found.owner}]", f"  {found.summary}"]
    if found.doc:
        lines += textwrap.wrap(found.doc, WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines += _facts(found.facts)
    if found.install_hint:
        lines.append(f"  install: {found.install_hint}")
    lines.append("  options:" if found.options else "  no options")
    for option in found.options:
        lines.append(f"    {option.name}: {option.type}, {_default(option)}")
        lines += textwrap.wrap(option.doc, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _default(option: Option) -> str:
    if option.required:
        return "required"
    return f"default {json.dumps(option.default, ensure_ascii=False)}" if option.has_default else "may be left out"


def _facts(facts: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"  {label}: {', '.join(values) or 'none'}" for label, values in facts.items()]


# -- check -------------------------------------------------------------------------------------------------------------


@app.command("check")
def check(ctx: typer.Context, name: MaybeNameArgument = None, as_json: JsonOption = False) -> None:
    """Import what NAME stands for, make it, and run its own check; 3 where something does not work.

    Example: composer-run plugins check trl
    """
    from composer_core.plugins.describe import find
    from composer_core.plugins.try_out import try_out

    registry = build_registry(ctx)
    chosen = list(registry) if name is None else find(registry, name)
    tried = [try_out(registry, owner, contribution) for owner, contribution in chosen]
    unusable = [problem for problem in registry.problems if name is None and problem.stage != "disabled"]
    if as_json:
        problems = _problems(registry) if name is None else []
        show_json({"contributions": [asdict(one) for one in tried], "problems": problems})
    else:
        for one in tried:
            typer.echo(_tried(one))
        for problem in unusable:
            typer.echo(f"plugin {problem}" + (f"\n  fix: {problem.fix}" if problem.fix else ""))
    if unusable or not all(one.ok for one in tried):
        raise typer.Exit(MissingError.exit_code)


def _tried(one: Tried) -> str:
    who = f"{one.kind} {one.name} [{one.owner}]"
    if not one.ok:
        return f"{who}: {one.problem}" + (f"\n  fix: {one.fix}" if one.fix else "")
    return f"{who}: ok" if one.made else f"{who}: ok, but not made: its settings have no defaults"


# -- new ---------------------------------------------------------------------------------------------------------------


@app.command("new")
def new(name: NewNameArgument, kind: KindOption = PackageKind.CHANNEL, out: OutOption = None) -> None:
    """Write a package that brings a plugin called NAME, with an example spec and contract tests that pass.

    Example: composer-run plugins new acme-brevity --kind reward
    """
    from composer_core.plugins.contributions import Kind
    from composer_core.templates import write_package

    folder = (out or Path(name)).expanduser()
    for path in write_package(name, Kind(kind), folder):
        typer.echo(path)
    typer.echo(f"next: cd {folder} && pip install -e . && pytest && composer-run check example.yaml")
