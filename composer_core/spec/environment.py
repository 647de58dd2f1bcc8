"""`${env:NAME}` in the texts of a spec: found when it is loaded, filled in by the process that needs the value.

A loaded spec, resolved.json and plan.json hold the placeholder, so no file ever holds a secret. What `fill` returns
does: keep it in memory. A message about a filled-in value names its key and variable and never shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from composer_core.errors import MissingError, UsageError
from composer_core.spec.model import REPLAY_ONLY, Plugged, RunSpec
from composer_core.spec.yaml import dotted

T = TypeVar("T")

_OPENING = "${env:"
_PLACEHOLDER = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def has_placeholder(value: Any) -> bool:
    """Whether this is text with a `${env:NAME}` in it."""
    return isinstance(value, str) and _PLACEHOLDER.search(value) is not None


def malformed(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in plain data that has a `${env:` which names no variable."""
    for where, text in _texts(data, key):
        if _OPENING in _PLACEHOLDER.sub("", text):
            yield where, text


def required_env(data: Any) -> tuple[str, ...]:
    """The variables that plain data asks for, sorted."""
    return tuple(sorted({name for _, text in _texts(data, "") for name in _PLACEHOLDER.findall(text)}))


def fill_spec(spec: RunSpec, environ: Mapping[str, str]) -> RunSpec:
    """The spec with its placeholders filled in, all but those in the sections of `composer-run replay`: a teacher's
    own are filled in where it is made (`teachers/named.py`).

    Raises:
        MissingError: a variable is not set, with its name and the key that asks for it.
        UsageError: a value does not fit its key.
    """
    sections = {name: getattr(spec, name) for name in RunSpec.model_fields if name not in REPLAY_ONLY}
    return spec.model_copy(update=fill(sections, environ))


def fill(value: T, environ: Mapping[str, str], *, key: str = "") -> T:
    """A copy of `value` with its placeholders filled in: plain data, settings, or `use:` blocks.

    Args:
        value: what holds placeholders, at any depth; itself where there are none.
        environ: name -> value.
        key: dotted key of `value`, for messages.

    Raises:
        MissingError: a variable is not set, with its name and the key that asks for it.
        UsageError: a value does not fit its key.
    """
    filled: Any = value
    if isinstance(value, str):
        filled = _PLACEHOLDER.sub(lambda found: _lookup(found[1], key, environ), value)
    elif isinstance(value, PurePath):
        filled = type(value)(fill(str(value), environ, key=key))
    elif isinstance(value, Plugged):
        filled = replace(value, settings=fill(value.settings, environ, key=key))
    elif isinstance(value, BaseModel):
        filled = _fill_model(value, environ, key)
    elif isinstance(value, Mapping):
        filled = {part: fill(child, environ, key=dotted(key, str(part))) for part, child in value.items()}
    elif isinstance(value, list | tuple):
        filled = type(value)(fill(child, environ, key=dotted(key, index)) for index, child in enumerate(value))
    return filled if filled != value else value


def _fill_model(model: BaseModel, environ: Mapping[str, str], key: str) -> BaseModel:
    old = {name: getattr(model, name) for name in type(model).model_fields}
    new = {name: fill(child, environ, key=dotted(key, name)) for name, child in old.items()}
    changed = [name for name in old if new[name] is not old[name]]
    if not changed:
        return model
    try:
        return type(model).model_validate({name: new[name] for name in model.model_fields_set | set(changed)})
    except ValidationError as error:
        wrong = [dotted(key, str(fault["loc"][0])) if fault["loc"] else key for fault in error.errors()]
        text = required_env({name: old[name] for name in changed if isinstance(old[name], str)})
        # from None, and without pydantic's own words: they quote the value, which may be a secret
        raise UsageError(
            "does not fit once the environment is filled in (its value is not shown)",
            at=", ".join(dict.fromkeys(wrong)),
            fix=f"check {', '.join(text)}",
        ) from None


def _lookup(name: str, key: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise MissingError(f"the environment variable {name} is not set", at=key, fix=f"export {name}=...")
    return environ[name]


def _texts(data: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, str):
        yield key, data
    elif isinstance(data, Mapping):
        for part, child in data.items():
            yield from _texts(child, dotted(key, str(part)))
    elif isinstance(data, list | tuple):
        for index, child in enumerate(data):
            yield from _texts(child, dotted(key, index))
