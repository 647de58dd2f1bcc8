"""Overrides from the command line: `train.steps=5`, laid over a document before anything is checked.

A value is strict YAML. List items are addressed by their `use` (`loss.channels.sdpo.weight=0.2`) or by number
(`loss.channels[0].weight=0.2`, as messages show keys). A key that no model has is found by the later checks, which
then name the override as its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from composer_core.errors import Problem, SpecError
from composer_core.spec.errors import show
from composer_core.spec.model import PLUG_POINTS, Shape
from composer_core.spec.yaml import Document, Place, dotted, parse

_PART = re.compile(r"[^.\[\]]+|\[\d+\]")
_KEY = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[\d+\])*")


class _Refused(Exception):
    """Why an override cannot be applied."""


def apply_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    """Lay `key=value` texts over a document whose data is a mapping; its data is changed in place.

    Returns:
        The document with the places of what was overridden, and a Problem for each override that does not apply.
    """
    places = dict(document.places)
    problems = []
    for override in overrides:
        source = f"command line ({override})"
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key):
            fix = "write key=value, e.g. train.steps=5"
            problems.append(Problem("", "this is not an override", fix, source))
            continue
        if key == "extends":
            problems.append(Problem(key, "the spec that another one extends is read before overrides", "", source))
            continue
        try:
            value = parse(text, source).data
            written = _put(document.data, _PART.findall(key), value, places, Place(source))
        except SpecError as error:
            problems += [Problem(key, p.problem, p.fix, source) for p in error.problems]
        except _Refused as refusal:
            problems.append(Problem(key, str(refusal), "", source))
        else:
            _mark(places, written, value, Place(source))
    return Document(document.data, places), problems


def _put(node: Any, parts: list[str], value: Any, places: dict[str, Place], place: Place) -> str:
    """Set the value and return its dotted key; sections on the way are made where there are none."""
    key = ""
    for index, part in enumerate(parts):
        slot = _slot(node, part, key)
        if index == len(parts) - 1:
            node[slot] = value
            return dotted(key, slot)
        key = dotted(key, slot)
        if isinstance(node, dict) and node.get(slot) is None:
            if _is_list(key):
                raise _Refused(f"the spec has no {key}")
            node[slot] = {}
            places[key] = place
        node = node[slot]
    raise AssertionError("an override has at least one part")


def _slot(node: Any, part: str, key: str) -> str | int:
    if isinstance(node, dict):
        if part.startswith("["):
            raise _Refused(f"{key} is a section, not a list")
        return part
    if not isinstance(node, list):
        raise _Refused(f"{key} is {show(node)}, not a section")
    if part.startswith("["):
        number = int(part[1:-1])
        if number >= len(node):
            raise _Refused(f"{key} has {len(node)} items, the last is {key}[{len(node) - 1}]")
        return number
    uses = [str(item.get("use")) if isinstance(item, dict) else "" for item in node]
    found = [index for index, use in enumerate(uses) if part in (use, use.rpartition("/")[2])]
    if len(found) != 1:
        there = ", ".join(use for use in uses if use) or "none"
        numbered = " and ".join(f"{key}[{index}]" for index in found)
        raise _Refused(f"{part!r} is both {numbered}" if found else f"no item of {key} uses {part!r}, there is {there}")
    return found[0]


def _is_list(key: str) -> bool:
    point = PLUG_POINTS.get(tuple(key.split(".")))
    return point is not None and point.shape is Shape.LIST


def _mark(places: dict[str, Place], key: str, value: Any, place: Place) -> None:
    for old in [old for old in places if old.startswith((key + ".", key + "["))]:
        del places[old]
    places[key] = place
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, child in children:
        _mark(places, dotted(key, part), child, place)
