"""A `RunSpec` as plain JSON values, for plan.json and for showing where each value came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from composer_core.spec.model import PLUG_POINTS, WEIGHTED, Plugged, RunSpec, dump
from composer_core.spec.yaml import dotted


def as_json(spec: RunSpec, *, block: Callable[[Plugged], dict[str, Any]] = dump) -> dict[str, Any]:
    """The whole spec, defaults included; `block` says how a `use:` block is written."""
    left_out: dict[str, Any] = {}
    for path in PLUG_POINTS:
        inner = left_out
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = True
    plain = spec.model_dump(mode="json", exclude=left_out)
    for path, point in PLUG_POINTS.items():
        container: Any = plain
        found: Any = spec
        for part in path[:-1]:
            container, found = container[part], getattr(found, part)
        container[path[-1]] = point.map(block, getattr(found, path[-1]))
    return plain


def values(spec: RunSpec) -> dict[str, Any]:
    """Every value by its dotted key, blocks as a spec writes them: `loss.channels[0].beta`."""
    return dict(leaves(as_json(spec, block=_as_written)))


def _as_written(block: Plugged) -> dict[str, Any]:
    weight = {"weight": block.weight} if block.kind in WEIGHTED else {}
    return {"use": block.use, **weight, **block.settings.model_dump(mode="json")}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in plain data that has nothing below it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    if not children:
        yield key, value
    for part, child in children:
        yield from leaves(child, dotted(key, part))
