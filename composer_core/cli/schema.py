"""`composer-run schema`: the JSON Schema of a run spec, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from composer_core.cli.common import build_registry, show_json
from composer_core.errors import MissingError

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write it there instead of standard output.")
]


def schema(ctx: typer.Context, out: OutOption = None) -> None:
    """Print the JSON Schema of a run spec, with the options of everything that is installed.

    A spec whose first line is `# yaml-language-server: $schema=FILE` is then completed and checked in an editor.
    Example: composer-run schema --out composer.schema.json
    """
    from composer_core.run.files import write_text
    from composer_core.spec.schema import json_schema

    made = json_schema(build_registry(ctx))
    if out is None:
        show_json(made)
        return
    try:
        write_text(out, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise MissingError(f"cannot be written: {error.strerror}", at=str(out)) from error
    typer.echo(f"{out}: JSON Schema of a run spec")
