"""From a file to a checked `RunSpec`, with the source of every value and ALL mistakes at once.

The order: read, parse, overrides, local plugin files, `use:` blocks against the registry, fixed sections against
their models. What a backend makes of the spec is `plan.py`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.errors import Problem, SpecError, UsageError
from composer_core.plugins.registry import Registry
from composer_core.spec.blocks import Blocks, absolute
from composer_core.spec.errors import Section, problem_at, problems_of, show
from composer_core.spec.model import PATH_KEYS, RunSpec
from composer_core.spec.overrides import apply_overrides
from composer_core.spec.resolved import values
from composer_core.spec.yaml import Document, Place, dotted, parse


@dataclass(frozen=True)
class LoadedSpec:
    """A spec that is right as far as it can be known without a trainer."""

    spec: RunSpec
    path: Path
    """The file, as the user named it."""
    text: str
    """What the file held."""
    sources: Mapping[str, str]
    """Dotted key of every value of the resolved spec -> "spec.yaml:12:5", "command line" or "default"."""
    places: Mapping[str, Place]
    """Dotted key of everything that was written down; find others with `errors.place_of`."""


def load_spec(path: Path | str, registry: Registry, *, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read and check a spec. Local plugin files that it names are added to the registry.

    Args:
        path: a YAML or JSON file.
        registry: what is installed.
        overrides: `key=value` texts, laid over the file.

    Raises:
        UsageError: the file cannot be read.
        SpecError: all that is wrong with what it says.
    """
    path = Path(path)
    text = _read(path)
    document = parse(text, str(path))
    if not isinstance(document.data, dict):
        what = (
            "the file is empty"
            if document.data is None
            else f"a spec is keys and values, this is {show(document.data)}"
        )
        raise SpecError([Problem("", what, "start with version: 1", str(path), 1, 1)])
    document, problems = apply_overrides(document, overrides)
    data, places, folder = document.data, document.places, Path(os.path.abspath(os.path.expanduser(path))).parent
    problems += _add_plugin_files(document, registry, folder)
    problems += _make_paths_absolute(document, folder)
    blocks = Blocks(data, places, registry, folder)
    known = blocks.resolve()
    problems += blocks.problems
    problems += problems_of(Section(RunSpec), data, places=places, known=known)
    if problems:
        raise SpecError(problems)
    spec = RunSpec.model_validate(data)
    return LoadedSpec(spec, path, text, _sources(spec, places), places)


def _read(path: Path) -> str:
    file = os.path.expanduser(path)
    if not os.path.exists(file):
        raise UsageError("no such spec", at=str(path))
    if not os.path.isfile(file):
        raise UsageError("a spec is a file, this is not one", at=str(path))
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not text in UTF-8 (byte {error.start})", at=str(path)) from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", at=str(path)) from error


def _add_plugin_files(document: Document, registry: Registry, folder: Path) -> list[Problem]:
    listed = document.data.get("plugins")
    problems: list[Problem] = []
    if not isinstance(listed, list):
        return problems
    for index, item in enumerate(listed):
        if not isinstance(item, str):
            continue
        file = absolute(item, folder)
        listed[index] = str(file)
        key = dotted("plugins", index)
        if str(file) in listed[:index]:
            problems.append(problem_at(document.places, key, f"{item} stands twice", fix="remove one"))
            continue
        try:
            registry.add_file(file)
        except UsageError as error:
            problems.append(problem_at(document.places, key, f"{item}: {error.problem}", fix=error.fix))
    return problems


def _make_paths_absolute(document: Document, folder: Path) -> list[Problem]:
    problems = []
    for path in PATH_KEYS:
        container: Any = document.data
        for part in path[:-1]:
            container = container.get(part) if isinstance(container, dict) else None
        value = container.get(path[-1]) if isinstance(container, dict) else None
        if not isinstance(value, str):
            continue
        file = absolute(value, folder)
        if path == ("data", "prompts", "path") or os.path.exists(file):  # a name that no file can have is no error here
            container[path[-1]] = str(file)
        elif value.startswith(("./", "../")):  # cannot be the id of anything on a hub
            fix = "paths are relative to the spec"
            problems.append(problem_at(document.places, ".".join(path), f"no such folder: {value}", fix=fix))
    return problems


def _sources(spec: RunSpec, places: Mapping[str, Place]) -> dict[str, str]:
    found = {}
    for key in values(spec):
        place = places.get(key)
        found[key] = "default" if place is None else str(place) if place.line else "command line"
    return found
