"""`composer-run traces`: what recorded sessions hold, as counts, as text, and in other formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from composer_core.cli.common import JsonOption, build_registry, show_json

if TYPE_CHECKING:
    from composer_core.traces.files import TraceFiles
    from composer_core.traces.stats import Tally

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

PathsArgument = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Session files, or folders to search.", show_default=False)
]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="NAME", help="A trace reader's name; auto goes by content.")
]


@app.callback()
def traces() -> None:
    """Read recorded agent sessions: count, show, convert, make training rows."""


@app.command()
def stats(ctx: typer.Context, paths: PathsArgument, format: FormatOption = "auto", as_json: JsonOption = False) -> None:
    """Count records, turns, calls and errors in each file, and what could not be read.

    Example: composer-run traces stats ~/.claude/projects --json
    """
    found = _find(ctx, paths, format)
    tallies: list[Tally] = []
    for _ in found.read(tallies=tallies):
        pass
    if as_json:
        show_json([tally.as_json() for tally in tallies])
        return
    _show_tallies(tallies)


@app.command()
def show(
    ctx: typer.Context,
    paths: PathsArgument,
    format: FormatOption = "auto",
    only: Annotated[str | None, typer.Option("--trace", metavar="ID", help="Show this trace alone.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
) -> None:
    """Print sessions as text, with the places marked where the agent went wrong.

    Example: composer-run traces show session.jsonl
    """
    from composer_core.errors import UsageError
    from composer_core.traces.show import trace_lines

    seen: list[str] = []
    for trace in _find(ctx, paths, format).read():
        seen.append(trace.id)
        if only in (None, trace.id):
            for line in trace_lines(trace, full=full):
                typer.echo(line)
    if only is not None and only not in seen:
        raise UsageError(f"no trace {only!r} there; there are {', '.join(seen[:20]) or 'none'}")


@app.command()
def convert(
    ctx: typer.Context,
    paths: PathsArgument,
    to: Annotated[Literal["atif", "openai-chat"], typer.Option("--to", help="What to write.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", help="A file; default: standard output.")] = None,
    format: FormatOption = "auto",
) -> None:
    """Write traces in another format, one JSON document per line.

    Example: composer-run traces convert session.jsonl --to openai-chat --out chat.jsonl
    """
    from composer_core.traces.convert import FORMATS, write_lines
    from composer_core.traces.decode import dumps
    from composer_core.traces.files import require_turns

    tallies: list[Tally] = []
    found = _find(ctx, paths, format)

    def documents() -> Iterator[dict[str, Any]]:
        yield from map(FORMATS[to], found.read(tallies=tallies))
        require_turns(tallies)  # before the file is in its place

    if out is None:
        for document in documents():
            typer.echo(dumps(document))
    else:
        typer.echo(f"{write_lines(documents(), out)} traces written to {out}")
    _warn_losses(tallies)


@app.command()
def rows(
    ctx: typer.Context,
    paths: PathsArgument,
    model: Annotated[Path, typer.Option("--model", help="A model's folder: its tokenizer and chat template are used.")],
    at: Annotated[
        Literal["turn", "prompt-end", "system"], typer.Option("--at", help="Where a hint is put in front of the turn.")
    ] = "turn",
    span: Annotated[
        Literal["turn", "rest"], typer.Option("--span", help="What it teaches: the turn, or all from there on.")
    ] = "turn",
    out: Annotated[Path | None, typer.Option("--out", help="A file; default: standard output.")] = None,
    format: FormatOption = "auto",
) -> None:
    """Write what a channel would train on: token ids, hints and all, one JSON object per line.

    Example: composer-run traces rows session.jsonl --model ./model --out rows.jsonl
    """
    from composer_core.traces.convert import write_lines
    from composer_core.traces.decode import dumps
    from composer_core.traces.recorded import rows_for  # transformers, when the first row is asked for

    skipped: Counter[str] = Counter()
    made = rows_for(
        paths,
        tokenizer_folder=model,
        at=at,
        span=span,
        format=format,
        registry=build_registry(ctx),
        skipped=skipped,
    )
    if out is None:
        for row in made:
            typer.echo(dumps(row))
    else:
        typer.echo(f"{write_lines(made, out)} rows written to {out}")
    for reason, count in skipped.most_common():
        typer.echo(f"left out {count} x {reason}", err=True)


def _find(ctx: typer.Context, paths: list[Path], format: str) -> TraceFiles:
    """The sessions under some paths; what is passed over is said on standard error."""
    from composer_core.traces.files import find_traces

    found = find_traces(paths, build_registry(ctx), format=format)
    for path, reason in found.skipped:
        typer.echo(f"skipped {path}: {reason}", err=True)
    return found


_COLUMNS = ("records", "assistant_turns", "tool_calls", "tool_errors", "sidechain_records", "branches")
_HEADINGS = ("records", "turns", "calls", "errors", "sidechain", "branches")


def _show_tallies(tallies: list[Tally]) -> None:
    rows = [[str("-" if (n := getattr(tally, c)) is None else n) for c in _COLUMNS] for tally in tallies]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    typer.echo("  ".join(f"{h:>{w}}" for h, w in zip(_HEADINGS, widths, strict=True)) + "  format          file")
    for tally, row in zip(tallies, rows, strict=True):
        numbers = "  ".join(f"{n:>{w}}" for n, w in zip(row, widths, strict=True))
        typer.echo(f"{numbers}  {tally.format:14}  {tally.file}")
    _warn_losses(tallies)


def _warn_losses(tallies: list[Tally]) -> None:
    """What was left out, on standard error, each reason with its first places."""
    for tally in tallies:
        for name, count in sorted(tally.unknown_types.items()):
            typer.echo(f"{tally.file}: {count} x unknown type {name!r}, skipped", err=True)
        for loss in tally.losses[:10]:
            typer.echo(f"{tally.file}:{loss}", err=True)
        if len(tally.losses) > 10:
            total = tally.malformed_lines + sum(tally.lost.values())
            typer.echo(f"{tally.file}: {total} losses in all", err=True)
