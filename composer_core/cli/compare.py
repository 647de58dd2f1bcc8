"""`composer-run compare`: what differs between runs, as tables and as one page with their curves overlaid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, show_json
from composer_core.cli.run import RunsOption
from composer_core.cli.runs import run_names, shown

if TYPE_CHECKING:
    from composer_core.run.compare import Comparison, Difference

NOTHING = "-"
NamesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN", help="Two runs or more: names, their beginnings, paths or `latest`.", autocompletion=run_names
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The page; default compare.html beside the first run.")
]


def compare(names: NamesArgument, runs: RunsOption = None, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Show where runs differ in spec, versions and last figures, and write a page with their curves overlaid.

    Example: composer-run compare quickstart-2026 latest --out compare.html
    """
    from composer_core.run.compare import compare as compare_runs
    from composer_core.run.directory import find_run, runs_root

    directories = [find_run(name, runs_root(runs)) for name in names]
    made = compare_runs(directories, out.expanduser() if out else directories[0].path.parent / "compare.html")
    if as_json:
        show_json(asdict(made))
    else:
        _show(made)


def _show(made: Comparison) -> None:
    for run in made.runs:
        typer.echo(f"{run.letter}  {run.run}  {run.state}, {run.steps} steps")
    letters = [run.letter for run in made.runs]
    _table("spec", letters, made.spec, "the same")
    _table("versions", letters, made.versions, "the same")
    _table("last figures (means of five)", letters, made.metrics, "no step was logged")
    typer.echo(f"page: {shown(Path(made.page))}")


def _table(title: str, letters: Sequence[str], rows: Sequence[Difference], nothing: str) -> None:
    if not rows:
        typer.echo(f"{title}: {nothing}")
        return
    cells = [(title, *letters)]
    cells += [(f"  {row.key}", *(_cell(row, letter) for letter in letters)) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(row: Difference, letter: str) -> str:
    if letter not in row.values:
        return NOTHING
    value: Any = row.values[letter]
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
