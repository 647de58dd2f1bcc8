"""`composer-run plan`: everything that a run would use, decide and write. Changes nothing on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, OverridesArgument, SpecArgument, open_spec, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from composer_core.data.tokenizer_check import TokenizerReport
    from composer_core.plugins.registry import Registry
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
    from composer_core.data.estimate import cost, memory

    registry, loaded, made = open_spec(ctx, spec, overrides)
    look = _look(loaded.spec, registry) if data else None
    needed = memory(loaded.spec)
    price = cost(loaded.spec, registry)
    if as_json:
        more = {"data": look[0], "tokenizer": look[1].to_json()} if look is not None else {}
        show_json({**made.to_json(), "memory": needed.to_json(), "cost": price, **more})
        return
    from rich.console import Console  # 60 ms, and only tables need it

    table = _Tables(Console(soft_wrap=True))
    _show_spec(table, loaded.spec, made)
    table.show("memory", needed.lines())
    table.show("cost", price)
    if look is not None:
        table.lines("data check", look[0])
        table.show("tokenizer check", look[1].lines())
    table.lines("environment variables that it reads", made.required_env)
    table.show("plugins", {plugin.name: plugin.version for plugin in made.plugins})
    table.lines("files in the run directory", made.files)


def _look(spec: RunSpec, registry: Registry) -> tuple[list[str], TokenizerReport]:
    """What `--data` adds: lines about the data, and what the tokenizer makes of it."""
    import os

    from composer_core.data.preflight import preflight
    from composer_core.data.prompts import load_prompts
    from composer_core.data.tokenizer_check import check_tokenizer
    from composer_core.spec.environment import fill_spec

    lines = preflight(spec, registry)
    filled = fill_spec(spec, os.environ)
    prompts = filled.data.prompts
    rows = [] if prompts is None or prompts.dataset is not None else load_prompts(prompts)
    return lines, check_tokenizer(filled, rows)


def _show_spec(table: _Tables, spec: RunSpec, made: Plan) -> None:
    """What will be trained and how, as titled tables of names and values."""
    run = {"name": spec.name, "seed": spec.seed, "steps": spec.train.steps, "processes": made.processes}
    table.show("run", run)
    table.show("model", _given(spec.model.model_dump(mode="json")))
    data = spec.data
    table.show("data", {} if data.prompts is None else _given(data.prompts.model_dump(mode="json")))
    table.show("rewards", {reward.use: f"weight {reward.weight}" for reward in spec.data.rewards})
    beside = {"traces": data.traces, "pairs": data.pairs, "rollout": spec.rollout, "replicas": spec.replicas}
    for title, section in {"held-out prompts": data.eval, **beside}.items():
        table.show(title, _given(section.model_dump(mode="json")) if section is not None else {})
    table.show("teachers", {name: teacher.use for name, teacher in spec.teachers.items()})
    objective = spec.loss.objective
    code = "the trainer's own code" if made.objective == "native" else "the core's code"
    table.show("loss", {"objective": "none"} if objective is None else {f"objective {objective.use}": code})
    for channel in made.channels:
        needs = ", ".join(channel.needs) or "nothing beyond rollouts"
        table.show("", {f"channel {channel.name}": f"weight {channel.weight}; uses {needs}: {channel.reason}"})
    table.show(f"derived by backend {spec.backend.use}", made.numbers)
    _show_config(table, "upstream configuration", made.upstream)
    table.show("checkpoints", spec.checkpoint.model_dump(exclude_defaults=True))
    table.show("limits", spec.limits.model_dump(exclude_defaults=True))
    table.lines("notes", made.notes)


def _show_config(table: _Tables, title: str, values: Mapping[str, Any], above: str = "") -> None:
    """A configuration of any depth: a table for each section, under its dotted name."""
    sections = {name: value for name, value in values.items() if isinstance(value, Mapping) and value}
    table.show(title, {name: value for name, value in values.items() if name not in sections})
    for name, section in sections.items():
        _show_config(table, f"{above}{name}", section, f"{above}{name}.")


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
