"""`composer-run plan`: everything that a run would use, decide and write. Changes nothing on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, OverridesArgument, SpecArgument, open_spec, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from composer_core.spec.model import RunSpec
    from composer_core.spec.plan import Plan

DataOption = Annotated[bool, typer.Option("--data", help="Also read the data and the tokenizer.")]


def plan(
    ctx: typer.Context,
    spec: SpecArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    data: DataOption = False,
) -> None:
    """Show everything that a run of SPEC would use and write.

    Example: composer-run plan spec.yaml --data
    """
    registry, loaded, made = open_spec(ctx, spec, overrides)
    lines: list[str] = []
    if data:
        from composer_core.data.preflight import preflight  # heavy: reads tokenizer and data

        lines = preflight(loaded.spec, registry)
    if as_json:
        show_json(made.to_json() | ({"data": lines} if data else {}))
        return
    from rich.console import Console  # 60 ms, and only tables need it

    show(Console(soft_wrap=True), loaded.spec, made, lines)


def show(console: Console, spec: RunSpec, made: Plan, data: list[str]) -> None:
    """Print a plan as titled tables of names and values."""
    table = _Tables(console)
    table.show("run", {"name": spec.name, "seed": spec.seed, "steps": spec.train.steps})
    table.show("model", _given(spec.model.model_dump(mode="json")))
    table.show("data", _given(spec.data.prompts.model_dump(mode="json")))
    table.show("rewards", {reward.use: f"weight {reward.weight}" for reward in spec.data.rewards})
    code = "the trainer's own code" if made.objective == "native" else "the core's code"
    table.show("loss", {f"objective {spec.loss.objective.use}": code})
    for channel in made.channels:
        needs = ", ".join(channel.needs) or "nothing beyond rollouts"
        table.show("", {f"channel {channel.name}": f"weight {channel.weight}; uses {needs}: {channel.reason}"})
    table.show(f"derived by backend {spec.backend.use}", made.numbers)
    table.show("upstream configuration", made.upstream)
    table.lines("notes", made.notes)
    table.lines("data check", data)
    table.show("plugins", {plugin.name: plugin.version for plugin in made.plugins})
    table.lines("files in the run directory", made.files)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class _Tables:
    def __init__(self, console: Console) -> None:
        self.console = console

    def show(self, title: str, values: Mapping[str, Any]) -> None:
        """Two columns under a title; nothing where there are no values."""
        if not values:
            return
        from rich.table import Table

        self.title(title)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(overflow="fold")
        for name, value in values.items():
            table.add_row(_escape(name), _escape(value if isinstance(value, str) else json.dumps(value)))
        self.console.print(table)

    def lines(self, title: str, lines: Iterable[str]) -> None:
        """One line each under a title; nothing where there are none."""
        lines = list(lines)
        if lines:
            self.title(title)
        for line in lines:
            self.console.print(f"  {_escape(line)}", highlight=False)

    def title(self, title: str) -> None:
        if title:
            self.console.print(f"[bold]{_escape(title)}[/bold]", highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
