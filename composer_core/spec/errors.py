"""What pydantic finds wrong, in the user's words and with the place in the spec.

`problems_of` validates and translates; it knows pydantic's error types, and nothing of files or the registry. To word
one more type of error, add a row to `_EXPECTED` or `_BOUNDS`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from composer_core.errors import Problem
from composer_core.spec.environment import has_placeholder
from composer_core.spec.yaml import Place, dotted

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section (key: value)",
    "model_type": "a section (key: value)",
    "model_attributes_type": "a section (key: value)",
    "dataclass_type": "a section (key: value)",
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
_NOT_THERE = "this key is required and is not there"
_STRICT = frozenset({"int_type", "float_type", "bool_type"})
"""Taken from a second, strict validation: pydantic would read "10" and true as numbers, and `no` as false."""


def place_of(places: Mapping[str, Place], key: str) -> Place:
    """Where a key was written, or the nearest block around it that was."""
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places[key]


def problem_at(places: Mapping[str, Place], key: str, problem: str, *, fix: str = "", missing: bool = False) -> Problem:
    """A Problem with its place filled in."""
    place = place_of(places, key)
    return Problem(key, problem, fix, place.source, place.line, place.column, missing)


def required(places: Mapping[str, Place], key: str, model: type[BaseModel]) -> Problem:
    """A key of `model` that must be there, and is not."""
    name = key.rpartition(".")[2]
    return problem_at(places, key, _NOT_THERE, fix=_meaning(model, name) or f"add {name}")


@dataclass(frozen=True)
class Section:
    """A block of the spec with the model that its keys must fit."""

    model: type[BaseModel]
    key: str = ""
    """Dotted key of the block; "" is the whole spec."""
    extra_keys: tuple[str, ...] = ()
    """Keys that stand beside the model's own and have been dealt with: `use`, `weight`."""


@dataclass
class _Fault:
    """One pydantic error with its location cleaned of union tags."""

    error: Mapping[str, Any]
    parts: tuple[str | int, ...]
    in_union: bool
    expected: list[str] = field(default_factory=list)


def problems_of(
    section: Section, data: Any, *, places: Mapping[str, Place], known: Mapping[str, tuple[str, ...]]
) -> list[Problem]:
    """Everything wrong with `data`; empty when the section's model accepts it.

    Args:
        section: the model, and where its block stands.
        data: what the block holds.
        places: where each dotted key was written.
        known: every key of the whole spec -> the dotted keys that end in it, for "belongs in".
    """
    errors = _errors(section.model, data, strict=False)
    seen = {error["loc"] for error in errors}
    errors += [
        error
        for error in _errors(section.model, data, strict=True)
        if error["type"] in _STRICT and error["loc"] not in seen and _looks_converted(error)
    ]
    problems = []
    for fault in _merge_unions([_clean(error, data) for error in errors]):
        key = section.key
        for part in fault.parts:
            key = dotted(key, part)
        text, fix = _words(fault, section, key, known)
        problems.append(problem_at(places, key, text, fix=fix))
    return problems


def _errors(model: type[BaseModel], data: Any, *, strict: bool) -> list[Mapping[str, Any]]:
    try:
        # A copy: a plugin's "before" validator may change what it is given, and this runs twice.
        model.model_validate(copy.deepcopy(data), strict=strict or None)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def _looks_converted(error: Mapping[str, Any]) -> bool:
    # 1e5 for a whole number and a float with integral value stay welcome
    return isinstance(error["input"], str | bool) or error["type"] == "bool_type"


def _clean(error: Mapping[str, Any], data: Any) -> _Fault:
    """Keep the parts of the location that lead through the data; the others are names of union branches."""
    parts: list[str | int] = []
    location = error["loc"]
    in_union = False
    for index, part in enumerate(location):
        if _holds(data, part):
            data = data[part]
            parts.append(part)
        elif error["type"] == "missing" and index == len(location) - 1:
            parts.append(part)
        else:
            in_union = True
    return _Fault(error, tuple(parts), in_union)


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _merge_unions(faults: list[_Fault]) -> list[_Fault]:
    """One fault per place: branches of a union that fail at the same key become "must be A or B"."""
    kept: dict[tuple[str | int, ...], _Fault] = {}
    plain = []
    for fault in faults:
        fault.expected = [expected] if (expected := _expected(fault.error)) else []
        if not fault.in_union:
            plain.append(fault)
        elif fault.parts in kept:
            kept[fault.parts].expected += fault.expected
        else:
            kept[fault.parts] = fault
    # The branch that got further in is the one that was meant.
    deepest = [
        fault
        for parts, fault in kept.items()
        if not any(other != parts and other[: len(parts)] == parts for other in kept)
    ]
    return plain + deepest


def _expected(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind in ("literal_error", "enum"):
        return str(error["ctx"]["expected"])
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        bound = error["ctx"][name]
        return f"{sign} {int(bound) if bound == int(bound) else bound}"
    if kind == "string_pattern_mismatch":
        return f"text like {error['ctx']['pattern']}"
    return _EXPECTED.get(kind, "")


def _words(fault: _Fault, section: Section, key: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    error, value = fault.error, fault.error["input"]
    kind = error["type"]
    if kind == "missing":
        model = _model_at(section.model, fault.parts[:-1])
        name = str(fault.parts[-1])
        return _NOT_THERE, _meaning(model, name) or f"add {name}"
    if kind == "extra_forbidden":
        return "unknown key", _suggest(key, fault.parts, section, known)
    if fault.expected:
        got = f"must be {' or '.join(dict.fromkeys(fault.expected))}, got {show(value)}"
        return got, _fix_value(error, fault, section)
    if kind in ("too_short", "too_long"):
        context = error["ctx"]
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"must have {bound} of them, got {context['actual_length']}", ""
    message = re.sub(r"^(Value error|Assertion failed), ", "", error["msg"])
    scalar = isinstance(value, str | int | float) and show(value) not in message
    return f"{message}, got {show(value)}" if scalar else message, ""


def _fix_value(error: Mapping[str, Any], fault: _Fault, section: Section) -> str:
    value, kind = error["input"], error["type"]
    if has_placeholder(value) and kind != "string_pattern_mismatch":
        return "${env:NAME} gives text; for another value, use an override on the command line"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and _is_number(value):
        return f"write it without quotes: {value}"
    if kind == "string_type" and isinstance(value, int | float):
        return f'put it in quotes: "{show(value)}"'
    if kind in ("literal_error", "enum") and isinstance(value, str):
        near = difflib.get_close_matches(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]), 1)
        return f"did you mean {near[0]!r}?" if near else ""
    if kind == "string_pattern_mismatch":
        named = max(index for index, part in enumerate(fault.parts) if isinstance(part, str))  # not an item of a list
        return _meaning(_model_at(section.model, fault.parts[:named]), str(fault.parts[named]))
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(value: Any) -> str:
    """A value as a spec writes it, short enough for a message."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return type(value).__name__


# -- which key was meant -----------------------------------------------------------------------------------------------


def _suggest(key: str, parts: tuple[str | int, ...], section: Section, known: Mapping[str, tuple[str, ...]]) -> str:
    name = str(parts[-1])
    model = _model_at(section.model, parts[:-1])
    own = [*(model.model_fields if model else ()), *(section.extra_keys if len(parts) == 1 else ())]
    parent = key[: len(key) - len(name)]
    if near := difflib.get_close_matches(name, own, 1, 0.75):
        return f"did you mean {parent}{near[0]}?"
    if name in known:
        return f"it belongs in {' or '.join(known[name])}"
    if near := difflib.get_close_matches(name, [*own, *known], 1, 0.7):
        return f"did you mean {f'{parent}{near[0]}' if near[0] in own else ' or '.join(known[near[0]])}?"
    return f"known keys here: {', '.join(own)}" if own else "this block takes no keys"


def _meaning(model: type[BaseModel] | None, name: str) -> str:
    """A key with its documentation; "" where it has none."""
    info = model.model_fields.get(name) if model else None
    meaning = " ".join((info.description or "").split()) if info else ""
    return f"{name}: {meaning}" if meaning else ""


def _model_at(model: type[BaseModel] | None, parts: tuple[str | int, ...]) -> type[BaseModel] | None:
    for part in parts:
        if model is None:
            return None
        if isinstance(part, str):
            info = model.model_fields.get(part)
            model = model_in(info.annotation) if info else None
    return model


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings model inside an annotation such as `LoraSpec | None` or `list[Column]`."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := model_in(arg))), None)


def known_keys(sections: list[Section]) -> dict[str, tuple[str, ...]]:
    """Every key of these sections -> the dotted keys that end in it."""
    found: dict[str, tuple[str, ...]] = {}
    for section in sections:
        beside = [(name, dotted(section.key, name)) for name in section.extra_keys if name != "use"]
        for name, key in [*beside, *_walk(section.model, section.key)]:
            if key not in found.get(name, ()):
                found[name] = (*found.get(name, ()), key)
    return found


def _walk(model: type[BaseModel], key: str) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        yield name, dotted(key, name)
        inner = model_in(info.annotation)
        if inner is not None and inner is not model:
            yield from _walk(inner, dotted(key, name))
