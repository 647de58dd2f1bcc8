"""`composer-run init`: write a spec to start from."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from composer_core.cli.runs import shown
from composer_core.errors import UsageError


def _names(incomplete: str) -> list[str]:
    from composer_core.templates import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


TemplateArgument = Annotated[
    str, typer.Argument(metavar="TEMPLATE", help="What to start from; see --list.", autocompletion=_names)
]
OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="The spec to write; other files go beside it.")]
ListOption = Annotated[bool, typer.Option("--list", help="Show the templates, write nothing.")]


def init(
    template: TemplateArgument = "quickstart", out: OutOption = Path("spec.yaml"), show: ListOption = False
) -> None:
    """Write a commented spec, and the files it names, without overwriting anything.

    Example: composer-run init math --out math/spec.yaml
    """
    from composer_core.templates import recipes, write_recipe

    known = recipes()
    if show:
        width = max(map(len, known))
        for recipe in known.values():
            typer.echo(f"{recipe.name:{width}}  {recipe.summary}")
        return
    if template not in known:
        near = difflib.get_close_matches(template, known, 1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"no template is called {template!r}", fix=fix)
    written = write_recipe(known[template], out.expanduser())
    typer.echo(f"wrote {', '.join(str(path) for path in written)}")
    typer.echo(f"next: composer-run plan {shown(out)} --data, then composer-run {shown(out)}")
