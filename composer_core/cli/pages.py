"""The pages under docs/cli, from what `--help` shows: `python -m composer_core.cli.pages docs/cli` writes them anew.

A test compares the pages with the commands, so neither can change alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from composer_core.cli.main import VERBS, app, load
from composer_core.run.files import write_text

PROGRAM = "composer-run"
EXAMPLE = re.compile(r"^Example: (.+)$", re.MULTILINE)


def pages() -> dict[str, str]:
    """File name -> text, for every verb and the index."""
    return {"README.md": _index(), **{f"{name}.md": _page(name) for name in VERBS}}


def examples(command: Any) -> list[str]:
    """The example lines of a command's help and of its own verbs'."""
    own = EXAMPLE.findall(command.help or "")
    return own + [line for sub in _subcommands(command).values() for line in examples(sub)]


def _index() -> str:
    root = typer.main.get_command(app)
    lines = ["# Commands", "", _paragraphs(root.help or ""), ""]
    lines += ["| verb | |", "| --- | --- |"]
    lines += [f"| [{name}]({name}.md) | {_cell(verb.help)} |" for name, verb in VERBS.items()]
    lines += ["", "Options that stand before the verb:", "", *_table(root, "option")]
    return _text(lines)


def _page(name: str) -> str:
    return _text(_sections(f"{PROGRAM} {name}", load(name), level=1))


def _text(lines: Iterable[str]) -> str:
    """With one blank line where the parts put several."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _sections(path: str, command: Any, *, level: int) -> Iterator[str]:
    """A command, then its own verbs one level deeper."""
    text = command.help or ""
    yield f"{'#' * level} {path}"
    yield ""
    yield _paragraphs(EXAMPLE.sub("", text))
    for example in EXAMPLE.findall(text):
        yield from ("", "```bash", example, "```")
    subcommands = _subcommands(command)
    if not subcommands:
        yield from ("", _usage(path, command), "", *_table(command, "argument"), *_table(command, "option"))
    for name, sub in subcommands.items():
        yield ""
        yield from _sections(f"{path} {name}", sub, level=level + 1)


def _subcommands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def _usage(path: str, command: Any) -> str:
    return f"`{' '.join([path, *command.collect_usage_pieces(_context(command))])}`"


def _table(command: Any, kind: str) -> list[str]:
    """The arguments or options of a command as its help shows them."""
    context = _context(command)
    records = [param.get_help_record(context) for param in command.params if param.param_type_name == kind]
    rows = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, records)]
    return [f"| {kind} | |", "| --- | --- |", *rows, ""] if rows else []


def _context(command: Any) -> Any:
    return command.make_context(command.name, [], resilient_parsing=True)


def _paragraphs(text: str) -> str:
    """Help as Markdown: lines of a paragraph joined, paragraphs kept."""
    found = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(part for part in found if part)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Write the pages into a folder."""
    (folder,) = map(Path, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        write_text(folder / name, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
