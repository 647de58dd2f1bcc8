"""Relative paths of a spec: which folder each is relative to, and which keys hold one.

A path that comes from the environment (`${env:DATA}/tasks.jsonl`) is left as it is: its value should be absolute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.errors import Problem
from composer_core.plugins.settings import PathKind
from composer_core.spec.environment import has_placeholder
from composer_core.spec.errors import place_of, problem_at
from composer_core.spec.model import PATH_KEYS
from composer_core.spec.yaml import Document, Place, dotted


@dataclass(frozen=True)
class Folders:
    """What relative paths are relative to: the folder of the file that holds the value, or the spec's own folder for a
    value from the command line.
    """

    spec: Path
    bases: Mapping[str, Path]
    """Folders of the specs that this one extends, by what messages call their files."""
    places: Mapping[str, Place]

    def of(self, key: str) -> Path:
        """The folder for the value of a dotted key."""
        return self.bases.get(place_of(self.places, key).source, self.spec)


def absolute(path: str, folder: Path) -> Path:
    """A path of a spec as an absolute one: `~` expanded, relative to a folder."""
    return Path(os.path.abspath(os.path.join(folder, os.path.expanduser(path))))


def absolute_function(text: str, folder: Path) -> str:
    """`./file.py:name` with its file made absolute; other text as it is."""
    file, colon, name = text.rpartition(":")
    if not file.endswith(".py") or has_placeholder(text):
        return text
    return f"{absolute(file, folder)}{colon}{name}"


def make_paths_absolute(document: Document, folders: Folders) -> list[Problem]:
    """Change the paths in the fixed sections of a spec in place; a Problem for each that cannot be right."""
    problems = []
    for path, kind in PATH_KEYS.items():
        for container, slot, key in _texts_at(document.data, path):
            text = container[slot]
            container[slot] = resolved(text, kind, folders.of(key))
            if kind is PathKind.IF_THERE and container[slot] == text and text.startswith(("./", "../")):
                fix = "paths are relative to the spec"  # and it cannot be the id of anything on a hub
                problems.append(problem_at(document.places, key, f"no such folder: {text}", fix=fix))
    return problems


def _texts_at(data: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, str | int, str]]:
    """(container, slot, dotted key) of the text that stands at a path, or of each text of a list there."""
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    value = data.get(path[-1]) if isinstance(data, dict) else None
    key = ".".join(path)
    if isinstance(value, str):
        yield data, path[-1], key
    elif isinstance(value, list):
        yield from ((value, index, dotted(key, index)) for index, item in enumerate(value) if isinstance(item, str))


def resolved(text: str, kind: PathKind, folder: Path) -> str:
    """A text of a spec with its path made absolute, as its kind says."""
    if has_placeholder(text) or (kind is PathKind.STORE and "://" in text):
        return text
    if kind is PathKind.FUNCTION:
        return absolute_function(text, folder)
    file = absolute(text, folder)
    if kind is PathKind.IF_THERE and not os.path.exists(file):
        return text
    return str(file)
