"""From a file to a checked `RunSpec`, with the source of every value and ALL mistakes at once.

The order: read it and what it extends, overrides, local plugin files, `use:` blocks against the registry, fixed
sections against their models. What a backend makes of the spec is `plan.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_core.errors import Problem, SpecError, UsageError
from composer_core.plugins.registry import Registry
from composer_core.spec.blocks import Blocks
from composer_core.spec.environment import has_placeholder, malformed
from composer_core.spec.errors import Section, problem_at, problems_of, show
from composer_core.spec.extends import read_text, read_with_bases
from composer_core.spec.model import RunSpec
from composer_core.spec.overrides import apply_overrides
from composer_core.spec.paths import Folders, absolute, make_paths_absolute
from composer_core.spec.resolved import values
from composer_core.spec.rollouts import rollouts_problems
from composer_core.spec.yaml import Document, Place, dotted


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
    file = absolute(str(path), Path.cwd())
    text = read_text(file, str(path))
    document, bases = read_with_bases(text, file, str(path))
    document, problems = apply_overrides(document, overrides)
    data, places = document.data, document.places
    folders = Folders(file.parent, bases, places)
    problems += _malformed_placeholders(document)
    problems += _add_plugin_files(document, registry, folders)
    problems += make_paths_absolute(document, folders)
    blocks = Blocks(data, places, registry, folders)
    known = blocks.resolve()
    problems += blocks.problems
    problems += problems_of(Section(RunSpec), data, places=places, known=known)
    problems += rollouts_problems(data, places)
    if problems:
        raise SpecError(problems)
    spec = RunSpec.model_validate(data)
    return LoadedSpec(spec, path, text, _sources(spec, places), places)


def _malformed_placeholders(document: Document) -> list[Problem]:
    fix = "write ${env:NAME} with the name of an environment variable: letters, digits, underscores"
    return [
        problem_at(document.places, key, f"a placeholder in {show(text)} names no variable", fix=fix)
        for key, text in malformed(document.data)
    ]


def _add_plugin_files(document: Document, registry: Registry, folders: Folders) -> list[Problem]:
    listed = document.data.get("plugins")
    problems: list[Problem] = []
    if not isinstance(listed, list):
        return problems
    for index, item in enumerate(listed):
        if not isinstance(item, str):
            continue
        key = dotted("plugins", index)
        if has_placeholder(item):
            problems.append(problem_at(document.places, key, "what code runs cannot come from the environment"))
            continue
        file = absolute(item, folders.of(key))
        listed[index] = str(file)
        if str(file) in listed[:index]:
            problems.append(problem_at(document.places, key, f"{item} stands twice", fix="remove one"))
            continue
        try:
            registry.add_file(file)
        except UsageError as error:
            problems.append(problem_at(document.places, key, f"{item}: {error.problem}", fix=error.fix))
    return problems


def _sources(spec: RunSpec, places: Mapping[str, Place]) -> dict[str, str]:
    found = {}
    for key in values(spec):
        place = places.get(key)
        found[key] = "default" if place is None else str(place) if place.line else "command line"
    return found
