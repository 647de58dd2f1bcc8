"""data-juicer as a program of its own interpreter, on a copy: which texts its recipe keeps.

It is never imported: it brings 84 packages and installs more by itself when it is imported. Only filters and
deduplicators make sense in a recipe here, because just the choice of texts is taken over, never their wording.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.spec.sections import DataJuicerSpec

DEFAULT_RECIPE = Path(__file__).with_name("data_juicer.yaml")
_PROGRAM = "from data_juicer.config import init_configs; from data_juicer.core import DefaultExecutor; import sys; "
_RUN = _PROGRAM + "DefaultExecutor(init_configs(['--config', sys.argv[1]])).run()"
_SAID_LINES = 5


def surviving(texts: Sequence[str], settings: DataJuicerSpec) -> list[int]:
    """Indices of the texts that the recipe keeps, in order.

    Raises:
        MissingError: there is no such interpreter, or it has no data-juicer.
        UsageError: the recipe is not a list of operators.
        RunFailed: data-juicer failed, with the end of what it said.
    """
    _require(settings.python)
    operators = _operators(Path(settings.recipe) if settings.recipe else DEFAULT_RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        source, result, config = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "recipe.yaml"))
        rows = [{"text": text, "index": index} for index, text in enumerate(texts)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        recipe = {"dataset_path": str(source), "export_path": str(result), "np": 1, "process": operators}
        config.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        done = _run(settings.python, _RUN, str(config), folder=folder)
        if done.returncode or not result.is_file():
            said = "\n".join(done.stderr.splitlines()[-_SAID_LINES:])
            raise RunFailed(f"data-juicer failed (exit code {done.returncode}): {said}", at="replay.normalise")
        lines = result.read_text(encoding="utf-8").splitlines()
    return sorted(int(json.loads(line)["index"]) for line in lines)


def _require(python: str) -> None:
    fix = f"{python} -m pip install py-data-juicer aiohttp"  # which it needs and does not ask for
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('data_juicer') is None)"
    try:
        done = _run(python, look)
    except OSError as error:
        raise MissingError(
            f"cannot run {python}: {error.strerror}", at="replay.normalise.data_juicer.python"
        ) from error
    if done.returncode:
        raise MissingError(f"{python} has no data-juicer", at="replay.normalise.data_juicer.python", fix=fix)


def _run(python: str, program: str, *arguments: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def _operators(recipe: Path) -> list[object]:
    try:
        found = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"the recipe cannot be read: {error}", at=str(recipe)) from error
    operators = found.get("process") if isinstance(found, dict) else None
    if not isinstance(operators, list):
        raise UsageError("a recipe needs `process:`, a list of operators", at=str(recipe))
    return operators
