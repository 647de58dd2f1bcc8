"""The JSON Schema: what is right validates, what has unknown keys does not, and the committed file is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
from pydantic import ConfigDict

from composer_core.errors import UsageError
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import Settings
from composer_core.spec.schema import json_schema
from composer_core.spec.yaml import parse

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
BLOCKS = [
    pytest.param(match[1], id=f"{page.name}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
    for number, match in enumerate(re.finditer(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.fixture
def schema(registry):
    return jsonschema.Draft202012Validator(json_schema(registry))


@pytest.fixture(scope="module")
def installed():
    return jsonschema.Draft202012Validator(json_schema(Registry.discover()))


class Channels:
    def __init__(self, model, name="extra"):
        self.plugin = LossChannelPlugin(name=name, summary="", target="x:Y", settings=model)

    @hookimpl
    def composer_loss_channels(self):
        return [self.plugin]


def test_it_is_a_schema_and_a_right_spec_validates(schema, spec_text):
    jsonschema.Draft202012Validator.check_schema(schema.schema)
    schema.validate(parse(spec_text, "s").data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: 5", "steps: 5\n  stepz: 5"),
        ("steps: 5", "learning_rate: 1e-5"),
        ("steps: 5", "steps: five"),
        ("steps: 5", "steps: 0"),
        ("name: test", "name: my run"),
        ("strength: 2", "strenght: 2"),
        ("strength: 2", "strength: 0"),
        ("use: lean", "use: laen"),
        ("weight: 0.5", "weight: -1"),
        ("{use: grpo}", "{use: grpo, weight: 1}"),
        ("{use: toy}", "{}"),
        ("backend: {use: toy}", ""),
        ('    - {use: regex, pattern: "[0-9]"}', '    - {pattern: "[0-9]"}'),
        ("{use: toy}", "{use: toy}\nreplay: {teacher: x}"),
        ("{use: toy}", "{use: toy}\nteachers: {strong: {use: wise, kei: x}}"),
        ("{use: toy}", "{use: toy}\nreplicas: {every: 5}"),
    ],
)
def test_a_wrong_spec_does_not(schema, spec_text, old, new):
    assert spec_text.count(old) == 1
    assert not schema.is_valid(parse(spec_text.replace(old, new), "s").data)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("extends: base.yaml\nname: mine\n", True),
        ("extends: base.yaml\ntrain: {learning_rate: 1e-5}\n", True),
        ("extends: base.yaml\nexecutor: {threads: 1}\n", True),  # settings for the base's executor
        ("extends: base.yaml\ntrain: {stepz: 1}\n", False),
        ("extends: base.yaml\nloss: {channels: [{weight: 1}]}\n", False),  # a list replaces, so its items are whole
    ],
)
def test_a_spec_that_extends_another_may_leave_keys_out(schema, text, valid):
    assert schema.is_valid(parse(text, "s").data) is valid


def test_a_block_may_name_its_owner_and_must_where_two_claim_the_name(registry, spec_text):
    text = spec_text.replace("use: lean", "use: fake/lean")
    jsonschema.validate(parse(text, "s").data, json_schema(registry))
    registry.add(Channels(Settings, "lean"), Owner("other", "1", "other"))
    both = jsonschema.Draft202012Validator(json_schema(registry))
    assert both.is_valid(parse(text, "s").data)
    assert not both.is_valid(parse(spec_text, "s").data)


def test_settings_bring_their_docs_defaults_and_bounds(schema):
    (lean,) = [
        variant
        for variant in schema.schema["$defs"]["channel"]["oneOf"]
        if variant["properties"]["use"]["enum"][0] == "lean"
    ]
    assert lean["properties"]["strength"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 1.0,
        "description": "How hard it pulls.",
    }
    assert lean["properties"]["weight"]["default"] == 1.0
    assert lean["required"] == ["use"]


def test_models_of_two_plugins_with_one_name_stay_apart(registry, spec_text):
    def settings(kind):
        inner = type("Inner", (Settings,), {"__annotations__": {"x": kind}, "__module__": f"made_{kind.__name__}"})
        return type("Outer", (Settings,), {"__annotations__": {"inner": inner}, "__module__": f"made_{kind.__name__}"})

    registry.add(Channels(settings(int), "whole"), Owner("a", "1", "a"))
    registry.add(Channels(settings(str), "text"), Owner("b", "1", "b"))
    schema = jsonschema.Draft202012Validator(json_schema(registry))
    for use, good, bad in (("whole", "1", "one"), ("text", "one", "1")):
        for value, valid in ((good, True), (bad, False)):
            text = spec_text.replace("{use: lean, weight: 0.5, strength: 2}", f"{{use: {use}, inner: {{x: {value}}}}}")
            assert schema.is_valid(parse(text, "s").data) is valid


def test_settings_that_cannot_be_a_schema_are_blamed_on_their_plugin(registry):
    class Opaque:
        pass

    class OpaqueSettings(Settings):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        thing: Opaque | None = None

    registry.add(Channels(OpaqueSettings), Owner("odd", "1", "odd"))
    with pytest.raises(UsageError) as error:
        json_schema(registry)
    assert error.value.problem.startswith("the settings of channel 'extra' (odd 1) have no JSON Schema: ")
    assert error.value.fix == "composer-run --disable-plugin odd schema"


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_examples_validate_and_point_to_the_schema(installed, file):
    text = file.read_text()
    header = text.partition("\n")[0]
    assert header.startswith("# yaml-language-server: $schema=")
    assert (file.parent / header.partition("=")[2]).resolve() == ROOT / "docs" / "composer.schema.json"
    installed.validate(parse(text, file.name).data)


@pytest.mark.parametrize("text", BLOCKS)
def test_specs_of_the_docs_validate(installed, text):
    data = parse(text, "block").data
    if "version" not in data and "extends" not in data:
        pytest.skip("not a whole spec")
    refused = [list(error.absolute_path) for error in installed.iter_errors(data)]
    # the schema knows what is installed, not the files that a spec brings along
    assert refused == ([["loss", "channels", 0]] if "plugins" in data else [])
