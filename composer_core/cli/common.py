"""What every command shares: the global options, the registry they ask for, and how a spec is opened.

Commands read their arguments, call the library and show the result; they raise `ComposerError` and `main` turns it
into a message and an exit code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry
    from composer_core.spec.load import LoadedSpec
    from composer_core.spec.plan import Plan

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="The run spec, YAML or JSON.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, e.g. train.steps=5 or loss.channels.sdpo.weight=0.2."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@dataclass
class GlobalOptions:
    """Options that stand before the verb. `main` makes one, the root callback fills it in, commands read it."""

    third_party: bool = True
    disabled: frozenset[str] = frozenset()
    debug: bool = False


def build_registry(ctx: typer.Context) -> Registry:
    """The installed contributions, as `--no-plugins` and `--disable-plugin` allow."""
    from composer_core.plugins.registry import Registry

    options = ctx.ensure_object(GlobalOptions)
    return Registry.discover(disabled=options.disabled, third_party=options.third_party)


def open_spec(ctx: typer.Context, path: Path, overrides: Sequence[str] | None) -> tuple[Registry, LoadedSpec, Plan]:
    """Load and plan a spec: everything `check` checks. Writes nothing and imports no trainer.

    Raises:
        UsageError: the file is not there or not readable; SpecError with all problems of the spec.
    """
    from composer_core.spec.load import load_spec
    from composer_core.spec.plan import make_plan

    registry = build_registry(ctx)
    loaded = load_spec(path, registry, overrides=tuple(overrides or ()))
    return registry, loaded, make_plan(loaded, registry)


def show_json(obj: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False))
