"""docs/spec.md and docs/composer.schema.json, from the models that read a spec.

    python -m composer_core.cli.reference docs composer-core composer-trl composer-verl

writes both anew, with the contributions of the distributions named. A test compares them with the models, so neither
can change alone. Pages of verbs are `pages.py`'s business.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from composer_core.plugins.contributions import Contribution
from composer_core.plugins.describe import describe, type_text
from composer_core.plugins.registry import Owner, Registry
from composer_core.run.files import write_text
from composer_core.spec.errors import model_in
from composer_core.spec.model import PLUG_POINTS, PlugPoint, RunSpec, Shape
from composer_core.spec.schema import json_schema
from composer_core.spec.yaml import dotted

_INTRO = """\
# The run spec

Generated from the models that read a spec; `composer-run schema` gives the same as a JSON Schema for editors.

A spec is one YAML or JSON document, read strictly: a key that stands twice or is not known is an error, `no` and `on`
are text, `1e-5` is a number. Keys without a default are required.

- **Blocks**: where the type is a block, `use:` names a contribution and the other keys are its options, listed further
  down by kind. `use: owner/name` chooses where two plugins claim a name.
- **Overrides**: `composer-run spec.yaml train.steps=5 loss.channels.sdpo.weight=0.2`; items of a list by their `use`
  or by number, as in `loss.channels[0].weight=0.2`.
- **`extends: base.yaml`**: sections merge key by key; a block with another `use`, a list, and a plain value replace
  what the base has; `null` takes it out. Relative paths are relative to the file that they stand in.
- **`${env:NAME}`** inside a text stands for an environment variable. Files of a run keep the placeholder; the process
  that needs the value reads it from its own environment. A path that begins with one should come out absolute.
"""
_SHAPES = {Shape.ONE: "{} block", Shape.LIST: "list of {} blocks", Shape.MAP: "your name: {} block"}


def registry_of(owners: Iterable[str]) -> Registry:
    """What the distributions of these names contribute, as installed."""
    others = {owner.name for owner in Registry.discover().owners} - set(owners)
    return Registry.discover(disabled=frozenset(others))


def files(registry: Registry) -> dict[str, str]:
    """File name -> text."""
    schema = json_schema(registry)
    return {
        "composer.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        "spec.md": "\n".join([_INTRO, *_sections(), *_contributions(registry)]),
    }


# -- sections ----------------------------------------------------------------------------------------------------------


def _sections() -> Iterator[str]:
    """A heading and a table for the spec and each section in it, outer before inner."""
    waiting: list[tuple[str, type[BaseModel]]] = [("", RunSpec)]
    while waiting:
        key, model = waiting.pop(0)
        yield f"## {key or 'Top level'}\n"
        if key:
            yield _line(model.__doc__ or "") + "\n"
        schema = model.model_json_schema()
        yield from _table(_row(key, name, schema) for name in schema["properties"])
        inner = [
            (dotted(key, name), found)
            for name, info in model.model_fields.items()
            if (found := model_in(info.annotation))
        ]
        waiting = inner + waiting


def _row(key: str, name: str, schema: Mapping[str, Any]) -> tuple[str, str, str, str]:
    field = schema["properties"][name]
    path = dotted(key, name)
    point = PLUG_POINTS.get(tuple(path.split(".")))
    section = model_in(_model(key).model_fields[name].annotation)
    kind = type_text(field, schema.get("$defs", {})) if point is None else _blocks(point)
    if section is not None:
        kind = f"[section](#{path.replace('.', '')})"
    default = "" if name in schema.get("required", ()) else _value(field.get("default"))
    if point is not None and point.default is not None:
        default = f"`{{use: {point.default}}}`"
    elif section is not None and default:
        default = "absent" if field.get("default") is None else "its defaults"
    return name, kind, default, field.get("description") or (section.__doc__ if section is not None else "") or ""


def _model(key: str) -> type[BaseModel]:
    model: type[BaseModel] = RunSpec
    for part in key.split(".") if key else ():
        inner = model_in(model.model_fields[part].annotation)
        assert inner is not None
        model = inner
    return model


def _blocks(point: PlugPoint) -> str:
    return _SHAPES[point.shape].format(f"[{point.kind}](#kind-{point.kind})")


# -- contributions -----------------------------------------------------------------------------------------------------


def _contributions(registry: Registry) -> Iterator[str]:
    for kind in dict.fromkeys(point.kind for point in PLUG_POINTS.values()):
        yield f"## Kind: {kind}\n"
        offered = [(owner, contribution) for owner, contribution in registry if contribution.kind is kind]
        if not offered:
            yield "None is installed with these packages.\n"
        for owner, contribution in offered:
            yield from _contribution(owner, contribution)


def _contribution(owner: Owner, contribution: Contribution[Any]) -> Iterator[str]:
    found = describe(owner, contribution)
    yield f"### {contribution.kind} `{found.name}`\n"
    yield f"{found.summary} (from {owner.name}). {_line(found.doc)}".rstrip() + "\n"
    for fact, values in found.facts.items():
        yield f"{fact[0].upper()}{fact[1:]}: {', '.join(values) or 'none'}.\n"
    rows = []
    for option in found.options:
        default = _value(option.default) if option.has_default else "" if option.required else "made on need"
        rows.append((option.name, option.type, default, option.doc))
    yield from _table(rows) if rows else ["No options.\n"]


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _table(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    for name, kind, default, meaning in rows:
        yield f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(meaning)} |"
    yield ""


def _value(value: Any) -> str:
    """A default as a spec writes it."""
    return "none" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


if __name__ == "__main__":
    folder, *owners = sys.argv[1:]
    for name, text in files(registry_of(owners)).items():
        write_text(Path(folder) / name, text)
