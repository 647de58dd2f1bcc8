"""The run spec as a JSON Schema (2020-12), with the options of the contributions that are installed.

Editors complete and check specs with it. `composer-run check` knows more: rules over several keys, and what a backend
can run. A spec that `extends` another may leave keys out, so what a whole spec must have stands apart, in a `then`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import models_json_schema

from composer_core.errors import UsageError
from composer_core.plugins.contributions import Contribution, Kind
from composer_core.plugins.registry import Owner, Registry
from composer_core.spec.errors import model_in
from composer_core.spec.model import PLUG_POINTS, WEIGHTED, PlugPoint, RunSpec, Shape

_REF = "#/$defs/"
_SETTINGS = "settings."
_MODE: Literal["validation"] = "validation"
_ROLLOUTS = {
    "if": {"properties": {"rollouts": {"const": "none"}}, "required": ["rollouts"]},
    "else": {
        "properties": {"data": {"required": ["prompts", "rewards"]}, "loss": {"required": ["objective"]}},
    },
}
"""What a spec must have unless it generates nothing (`spec/rollouts.py`)."""
_WEIGHTS = {
    Kind.CHANNEL: "Factor of this channel's loss; at 0 it is not computed.",
    Kind.REWARD: "Factor of this reward in the sum.",
}


def json_schema(registry: Registry) -> dict[str, Any]:
    """The schema of a run spec, plain JSON values.

    Raises:
        UsageError: the settings of a contribution cannot be written as a JSON Schema.
    """
    spec = RunSpec.model_json_schema(ref_template=_REF + "{model}")
    definitions: dict[str, Any] = spec.pop("$defs")
    for path, point in PLUG_POINTS.items():
        section = spec if len(path) == 1 else definitions[_model_at(path[:-1]).__name__]
        section["properties"][path[-1]] = _place(point, section["properties"][path[-1]])
    for section in definitions.values():
        section.pop("required", None)
    definitions |= _contributions(registry)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "A run spec of Composer, as `composer-run` reads it.",
        **{name: spec[name] for name in ("type", "additionalProperties", "properties")},
        "if": {"not": {"required": ["extends"]}},
        "then": {**_required(RunSpec, ()), **_ROLLOUTS},
    }
    schema["$defs"] = {name: definitions[name] for name in sorted(_used(schema, definitions))}
    return _tidy(schema)  # type: ignore[no-any-return]


def _model_at(path: tuple[str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = RunSpec
    for part in path:
        inner = model_in(model.model_fields[part].annotation)
        assert inner is not None
        model = inner
    return model


def _place(point: PlugPoint, found: dict[str, Any]) -> dict[str, Any]:
    """The schema of a plug point, made from what pydantic has for it."""
    block: dict[str, Any] = {"$ref": _REF + point.kind}
    if point.shape is Shape.LIST:
        return {**found, "items": block}
    partial = {"type": "object", "not": {"required": ["use"]}}  # settings for the block of the spec that is extended
    either = {"anyOf": [block, partial]}
    if point.shape is Shape.MAP:
        return {**found, "additionalProperties": either}
    meaning = {"description": found["description"]} if "description" in found else {}
    return {**meaning, **either, **({"default": {"use": point.default}} if point.default else {})}


def _required(model: type[BaseModel], path: tuple[str, ...]) -> dict[str, Any]:
    """What a spec on its own must have, as `required` at each level; {} where nothing."""
    required, properties = [], {}
    for name, info in model.model_fields.items():
        nested: dict[str, Any]
        point = PLUG_POINTS.get((*path, name))
        if info.is_required() and (point is None or point.default is None):
            required.append(name)
        inner = model_in(info.annotation)
        if point is None:
            nested = _required(inner, (*path, name)) if inner is not None else {}
        else:
            use: dict[str, Any] = {"required": ["use"]}
            nested = {Shape.ONE: use, Shape.LIST: {}, Shape.MAP: {"additionalProperties": use}}[point.shape]
        if nested:
            properties[name] = nested
    return {
        **({"required": required} if required else {}),
        **({"properties": properties} if properties else {}),
    }


# -- contributions -----------------------------------------------------------------------------------------------------


def _contributions(registry: Registry) -> dict[str, Any]:
    """Definitions of all kinds of block, and of the settings models behind them."""
    kinds = {point.kind for point in PLUG_POINTS.values()}
    offered = [found for found in registry if found[1].kind in kinds]
    models = [(contribution.settings, _MODE) for _, contribution in offered]
    try:
        # all at once: pydantic shares what they share and tells namesakes apart
        references, schema = models_json_schema(models, ref_template=_REF + _SETTINGS + "{model}")
    except (PydanticInvalidForJsonSchema, TypeError) as error:
        raise _blame(offered) from error
    definitions = {_SETTINGS + name: definition for name, definition in schema.get("$defs", {}).items()}
    choices: dict[str, Any] = {}
    for kind in kinds:
        variants = []
        for owner, contribution in offered:
            if contribution.kind is kind:
                claimants = sum((other.kind, other.name) == (kind, contribution.name) for _, other in offered)
                qualified = f"{owner.name}/{contribution.name}"
                names = [contribution.name, qualified] if claimants == 1 else [qualified]
                reference = references[contribution.settings, _MODE]["$ref"]
                variants.append(_variant(contribution, names, definitions[reference.removeprefix(_REF)]))
        choices[str(kind)] = {"type": "object", "oneOf": variants} if variants else {"not": {}}
    return definitions | choices


def _variant(contribution: Contribution[Any], names: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A block of one contribution; `names` are what its `use` may say."""
    properties: dict[str, Any] = {"use": {"enum": names, "description": contribution.summary}}
    if contribution.kind in WEIGHTED:
        meaning = _WEIGHTS[contribution.kind]
        properties["weight"] = {"type": "number", "minimum": 0, "default": 1.0, "description": meaning}
    return {
        "description": settings.get("description") or contribution.summary,
        "properties": {**properties, **settings.get("properties", {})},
        "required": ["use", *settings.get("required", [])],
        "additionalProperties": settings.get("additionalProperties", True),
    }


def _blame(offered: Sequence[tuple[Owner, Contribution[Any]]]) -> UsageError:
    for owner, contribution in offered:
        try:
            contribution.settings.model_json_schema()
        except (PydanticInvalidForJsonSchema, TypeError) as error:
            who = f"{contribution.kind} {contribution.name!r} ({owner})"
            fix = f"composer-run --disable-plugin {owner.name} schema"
            return UsageError(f"the settings of {who} have no JSON Schema: {error}", fix=fix)
    return UsageError("the settings of the installed contributions have no common JSON Schema")


# -- the whole ---------------------------------------------------------------------------------------------------------


def _used(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Names of the definitions that a schema refers to, directly or through others."""
    found: set[str] = set()
    waiting = list(_references(schema))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(definitions[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(_REF)
        for child in schema.values():
            yield from _references(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from _references(child)


def _tidy(schema: Any, *, names: bool = False) -> Any:
    """Without pydantic's titles (they repeat the keys), each description on one line; `names`: keys are the user's."""
    if isinstance(schema, list):
        return [_tidy(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    tidied = {}
    for key, child in schema.items():
        if not names and key == "title" and isinstance(child, str):
            continue
        if not names and key == "description" and isinstance(child, str):
            tidied[key] = " ".join(child.split())
        elif not names and key in ("default", "const", "enum", "examples"):
            tidied[key] = child
        else:
            tidied[key] = _tidy(child, names=not names and key in ("properties", "$defs"))
    return tidied
