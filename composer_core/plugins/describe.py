"""What can be said about one contribution, for `composer-run plugins show`: facts and options, read from its plugin
without importing its code.

Whether that code loads and works is `try_out.py`'s business. A new fact about a kind is one more row in `_FACTS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.contributions import BackendPlugin, Contribution, Kind, LossChannelPlugin
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import NoSettings, Settings
from composer_core.protocols import Need
from composer_core.spec.model import DataSpec, LossSpec, ModelSpec, Plugged, PromptsSpec, RunSpec, TrainSpec


@dataclass(frozen=True)
class Option:
    """One key of a contribution's block in a spec."""

    name: str
    """Dotted for a key of a key: `hints.at`."""
    type: str
    default: Any
    """As JSON; None also where there is none to show."""
    has_default: bool
    """False for a required key, and for one whose default is made on need."""
    required: bool
    doc: str


@dataclass(frozen=True)
class Description:
    """A contribution; what `plugins show --json` prints a list of."""

    kind: str
    name: str
    owner: str
    summary: str
    doc: str
    """Of its settings."""
    options: tuple[Option, ...]
    facts: Mapping[str, list[str]]
    """What a kind adds, e.g. `native objectives` of a backend."""
    target: str
    install_hint: str


def find(registry: Registry, name: str) -> list[tuple[Owner, Contribution[Any]]]:
    """Contributions called `name`, or `owner/name`, of whichever kind; all of an owner's for the owner's name.

    Raises:
        MissingError: the plugin of that name could not be used, with the reason.
        UsageError: there is none.
    """
    owner_name, _, own_name = name.rpartition("/")
    found = [
        (owner, contribution)
        for owner, contribution in registry
        if (contribution.name == own_name and owner_name in ("", owner.name)) or owner.name == name
    ]
    if found:
        return found
    problems = [problem for problem in registry.problems if name in (problem.owner.name, problem.owner.entry_point)]
    if problems:
        fix = next((problem.fix for problem in problems if problem.fix), "")
        raise MissingError("; ".join(str(problem) for problem in problems), fix=fix)
    names = {contribution.name for _, contribution in registry} | {owner.name for owner in registry.owners}
    near = difflib.get_close_matches(name, sorted(names), 1)
    fix = f"did you mean {near[0]!r}?" if near else "composer-run plugins list shows all"
    raise UsageError(f"no contribution and no plugin is called {name!r}", fix=fix)


def describe(owner: Owner, contribution: Contribution[Any]) -> Description:
    """Read a contribution.

    Raises:
        MissingError: its settings have no JSON schema, or its plugin's own code breaks.
    """
    try:
        schema, facts = contribution.settings.model_json_schema(), _facts(contribution)
    except Exception as error:  # a plugin's mistake, whatever its type
        who = f"{contribution.kind} {contribution.name!r} of {owner}"
        raise MissingError(
            f"{who} cannot be described: {type(error).__name__}: {error}",
            fix=f"composer-run --disable-plugin {owner.name} leaves the plugin out",
        ) from error
    return Description(
        kind=str(contribution.kind),
        name=contribution.name,
        owner=str(owner),
        summary=contribution.summary,
        doc="" if contribution.settings is NoSettings else schema.get("description", ""),
        options=tuple(_options(schema, schema.get("$defs", {}), "")),
        facts=facts,
        target=contribution.target,
        install_hint=contribution.install_hint,
    )


# -- options -----------------------------------------------------------------------------------------------------------


def _options(schema: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[Option]:
    """Every key; those of a key that is a settings model itself follow it, dotted."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        inner = _model(field, defs)
        if inner is None or "anyOf" in field:  # one that may also be null is a choice of its own
            doc = " ".join((field.get("description") or (inner or {}).get("description", "")).split())
            has_default = "default" in field
            yield Option(
                prefix + name, type_text(field, defs), field.get("default"), has_default, name in required, doc
            )
        if inner is not None:
            yield from _options(inner, defs, f"{prefix}{name}.")


def _model(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of the one settings model that a field may hold; None for plain values and for several models."""
    choices = [_referred(choice, defs) for choice in field.get("anyOf", [field]) if "$ref" in choice]
    models = [choice for choice in choices if choice.get("properties")]
    return models[0] if len(models) == 1 else None


def _referred(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = defs[field["$ref"].rpartition("/")[2]]
    return found


def type_text(field: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """A JSON schema in the words of a spec's author: `number > 0`, `group | batch | none`, `list of text`."""
    if "$ref" in field:
        return type_text(_referred(field, defs), defs)
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return " | ".join(str(value) for value in field["enum"])
    for choice in ("anyOf", "oneOf"):
        if choice in field:
            return " | ".join(dict.fromkeys(type_text(one, defs) for one in field[choice]))
    kind = field.get("type")
    if kind == "array":
        return f"list of {type_text(field.get('items', {}), defs)}"
    return _TYPES.get(str(kind), "any value") + _bounds(field)


_TYPES = {
    "number": "number",
    "integer": "whole number",
    "string": "text",
    "boolean": "true | false",
    "object": "mapping",
    "null": "null",
}


def _bounds(field: Mapping[str, Any]) -> str:
    """` > 0, < 1` from a schema's limits."""
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    found = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f" {', '.join(found)}" if found else ""


# -- facts by kind -----------------------------------------------------------------------------------------------------


def default_settings(contribution: Contribution[Any]) -> Settings | None:
    """The settings of a block with nothing but `use`; None where they ask for more."""
    try:
        return contribution.settings()
    except ValidationError:
        return None


def _facts(contribution: Contribution[Any]) -> dict[str, list[str]]:
    return {label: read(contribution) for label, kind, read in _FACTS if contribution.kind is kind}


def _needs(plugin: LossChannelPlugin) -> list[str]:
    """One text per alternative, best first."""
    settings = default_settings(plugin)
    if settings is None:
        return [_DEPENDS]
    return [_together(needs) for needs in plugin.needs(settings)]


def _provides(plugin: BackendPlugin) -> list[str]:
    settings = default_settings(plugin)
    return [_DEPENDS] if settings is None else sorted(plugin.provides(_smallest_spec(plugin, settings)))


def _together(needs: frozenset[Need]) -> str:
    return " + ".join(sorted(needs)) or "nothing beyond rollouts"


def _smallest_spec(plugin: BackendPlugin, settings: Settings) -> RunSpec:
    """Full fine-tuning of the built-in model on the built-in prompts: what a backend provides there."""

    def block(kind: Kind, use: str) -> Plugged:
        return Plugged(kind, use, "", settings if kind is Kind.BACKEND else NoSettings())

    return RunSpec(
        version=1,
        name="smallest",
        model=ModelSpec(builtin="tiny"),
        data=DataSpec(prompts=PromptsSpec(builtin="digits"), rewards=[block(Kind.REWARD, "regex")]),
        loss=LossSpec(objective=block(Kind.OBJECTIVE, "grpo")),
        train=TrainSpec(steps=1),
        backend=block(Kind.BACKEND, plugin.name),
        executor=block(Kind.EXECUTOR, "inline"),
    )


_DEPENDS = "depends on the settings"
_FACTS: tuple[tuple[str, Kind, Callable[[Any], list[str]]], ...] = (
    ("needs", Kind.CHANNEL, _needs),
    ("averages by", Kind.OBJECTIVE, lambda plugin: [str(plugin.aggregation)]),
    ("provides", Kind.BACKEND, _provides),
    ("native objectives", Kind.BACKEND, lambda plugin: sorted(plugin.native_objectives)),
    ("core objectives averaged by", Kind.BACKEND, lambda plugin: sorted(plugin.aggregations)),
    ("sections it has beyond the common ones", Kind.BACKEND, lambda plugin: sorted(plugin.honours)),
    ("features", Kind.EXECUTOR, lambda plugin: sorted(plugin.features)),
)
