"""`extends: base.yaml`: a spec read together with the specs that it changes.

    mapping over mapping    merged key by key
    block with another use  replaces the whole block: settings of one contribution mean nothing to another
    list, or plain value    replaces

A value keeps the place where it was written, so messages and sources name its file, and relative paths stay relative
to that file (`paths.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import Problem, SpecError, UsageError
from composer_core.spec.environment import has_placeholder
from composer_core.spec.errors import problem_at, show
from composer_core.spec.paths import absolute
from composer_core.spec.yaml import Document, Place, dotted, parse


def read_text(file: Path, shown: str) -> str:
    """The text of a spec; `shown` is what messages call it.

    Raises:
        UsageError: it cannot be read.
    """
    if not os.path.exists(file):  # unlike Path.exists, False for a name that no file can have
        raise UsageError("no such spec", at=shown)
    if not os.path.isfile(file):
        raise UsageError("a spec is a file, this is not one", at=shown)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not text in UTF-8 (byte {error.start})", at=shown) from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", at=shown) from error


def read_with_bases(text: str, file: Path, shown: str) -> tuple[Document, Mapping[str, Path]]:
    """Parse a spec and lay it over the specs that it extends.

    Args:
        text: what the spec holds.
        file: where it lies, absolute.
        shown: what messages call it; a base is shown relative to it.

    Returns:
        One document with places in all files, its data a mapping; and the folder of each base by its shown name.

    Raises:
        SpecError: a file is no mapping of keys and values, cannot be read as a base, or extends itself.
    """
    chain = list(_chain(text, file, shown))
    document = chain[-1][1]
    for _, changes in reversed(chain[:-1]):
        document = _merge(document, changes)
    bases = {str(document.places[""].source): file.parent for file, document in chain[1:]}
    return document, bases


def _chain(text: str, file: Path, shown: str) -> Iterator[tuple[Path, Document]]:
    """The spec, its base, the base of that, ..."""
    seen: dict[str, str] = {}
    while True:
        seen[_identity(file)] = shown
        document = _mapping(text, shown)
        yield file, document
        base = document.data.get("extends")
        if base is None:
            return
        if not isinstance(base, str) or has_placeholder(base):
            got = "must be the path of a spec, written out" if isinstance(base, str) else "must be the path of a spec"
            raise SpecError([problem_at(document.places, "extends", f"{got}, got {show(base)}")])
        file = absolute(base, file.parent)
        document.data["extends"] = str(file)
        shown = os.path.normpath(os.path.join(os.path.dirname(shown), os.path.expanduser(base)))
        if _identity(file) in seen:
            loop = " -> ".join([*seen.values(), shown])
            raise SpecError([problem_at(document.places, "extends", f"this spec extends itself: {loop}")])
        try:
            text = read_text(file, shown)
        except UsageError as error:
            fix = "the path is relative to this file"
            problem = f"{base}: {error.problem}"
            raise SpecError([problem_at(document.places, "extends", problem, fix=fix)]) from error


def _identity(file: Path) -> str:
    """One text for all names of a file."""
    return os.path.realpath(file) if os.path.exists(file) else str(file)


def _mapping(text: str, shown: str) -> Document:
    document = parse(text, shown)
    if isinstance(document.data, dict):
        return document
    empty = document.data is None
    what = "the file is empty" if empty else f"a spec is keys and values, this is {show(document.data)}"
    raise SpecError([Problem("", what, "start with version: 1", shown, 1, 1)])


def _merge(base: Document, changes: Document) -> Document:
    places = dict(base.places)
    data = _merged(base.data, changes.data, "", places, changes.places)
    return Document(data, places)


def _merged(old: Any, new: Any, key: str, places: dict[str, Place], changes: Mapping[str, Place]) -> Any:
    places[key] = changes[key]
    if not isinstance(old, dict) or not isinstance(new, dict) or _other_block(old, new):
        _take_places(key, places, changes)
        return new
    merged = dict(old)
    for name, value in new.items():
        merged[name] = _merged(old.get(name), value, dotted(key, name), places, changes)
    return merged


def _other_block(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "use" in new and new["use"] != old.get("use")


def _take_places(key: str, places: dict[str, Place], changes: Mapping[str, Place]) -> None:
    inside = (key + ".", key + "[")
    for stale in [old for old in places if old.startswith(inside)]:
        del places[stale]
    places.update({new: place for new, place in changes.items() if new.startswith(inside)})
