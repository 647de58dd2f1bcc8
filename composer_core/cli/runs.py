"""How a command is told which run it is about, and how it writes times and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs that begin as typed; called by the shell's completion."""
    from composer_core.run.directory import LATEST, runs_root
    from composer_core.run.status import all_runs

    names = [LATEST, *(directory.name for directory in reversed(all_runs(runs_root(ctx.params.get("runs")))))]
    return [name for name in names if name.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name, the beginning of one, a path, or `latest`.", autocompletion=run_names
    ),
]


def shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
