"""Built and mutated specs: never anything but a `ComposerError`, and nothing accepted that the JSON Schema refuses."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from composer_core.errors import ComposerError
from composer_core.plugins import builtin
from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.protocols import Aggregation, Need
from composer_core.spec.load import load_spec
from composer_core.spec.model import OPTIONAL, RunSpec
from composer_core.spec.plan import make_plan, restore
from composer_core.spec.schema import json_schema
from composer_core.spec.yaml import parse

WHOLE = """\
version: 1
name: whole
seed: 3
model: {path: acme/model, revision: main, dtype: bfloat16, lora: {rank: 4, targets: [q_proj]}}
data:
  prompts: {path: "${env:DATA}/tasks.jsonl", column: question, system: Be brief., limit: 5}
  rewards:
    - {use: exact-match, extract: hash, weight: 1.0}
    - {use: python, function: "./r.py:f", weight: 0.5}
  traces: {path: sessions}
  pairs: {path: pairs.jsonl}
  eval: {builtin: digits, every: 10}
  max_tokens: 4096
rollout: {max_turns: 4, tools: ["./t.py:search"], environment: {use: python, factory: "./e.py:make"}}
loss:
  objective: {use: dr-grpo, kl_coef: 0.01}
  channels:
    - {use: lean, weight: 0.5, strength: 2, span: [a]}
train: {steps: 5, prompts_per_step: 4, group_size: 4, learning_rate: 1e-5, schedule: cosine}
teachers:
  strong: {use: wise, key: "${env:KEY}"}
replay: {teachers: [strong], agreement: 1}
backend: {use: able}
executor: {use: rented, gpus: 2}
replicas: {count: 2, every: 50, store: "s3://bucket/run"}
checkpoint: {every: 2, keep: 1}
limits: {hours: 1, usd: 3, kl: 0.5}
sinks: [tensorboard]
"""
SMALL = "extends: whole.yaml\nname: small\nbackend: {use: able}\n"


class Able:
    @hookimpl
    def composer_backends(self):
        yield BackendPlugin(
            name="able",
            summary="",
            target="x:Y",
            provides=lambda spec: frozenset(Need),
            aggregations=frozenset(Aggregation),
            honours=frozenset(OPTIONAL),
        )


KEYS = ["use", "weight", "path", "extends", "plugins", "kl", "hours", *RunSpec.model_fields]
TEXTS = ["lean", "able", "inline", "fake/lean", "./x", "~nobody/x", "a\0b", "x/" * 200, "${env:X}", "${env:", "."]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=300)
    | st.sampled_from([*TEXTS, "whole.yaml", "case.json", "no"])
    | st.sampled_from([0, 1, 1.0, 1e5, 0.5, -1])
)
odd_values = (
    scalars
    | st.lists(scalars, max_size=3)
    | st.dictionaries(st.sampled_from(["use", "weight", "path", "x"]), scalars, max_size=3)
    | st.lists(st.fixed_dictionaries({"use": st.sampled_from(TEXTS)}), max_size=2)
)
overrides = st.lists(
    st.tuples(
        st.sampled_from(["train.steps", "loss.channels.lean.weight", "teachers.strong", "a[0]", "", "extends"]), scalars
    ).map(lambda pair: f"{pair[0]}={json.dumps(pair[1])}"),
    max_size=1,
)


def _places(value, key=()):
    yield key
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, child in children:
        yield from _places(child, (*key, part))


@st.composite
def mutated(draw):
    spec = copy.deepcopy(parse(draw(st.sampled_from([WHOLE, WHOLE, SMALL])), "s").data)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([key for key in _places(spec) if key]))
        node = spec
        for part in key[:-1]:
            node = node[part]
        kind = draw(st.integers(0, 3))
        if kind == 0:
            del node[key[-1]]
        elif kind == 1 and isinstance(node, dict):
            node[draw(st.text(max_size=8) | st.sampled_from(KEYS))] = draw(odd_values)
        elif kind == 2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key[-1]]))
        else:
            node[key[-1]] = draw(odd_values)
        if not spec:
            break
    return spec


class Kit:
    """What the tests share; a class, because hypothesis prints its arguments and a registry fills pages."""

    def __init__(self, folder, registry):
        (folder / "whole.yaml").write_text(WHOLE)
        self.file = folder / "case.json"
        self.registry = registry
        self.schema = jsonschema.Draft202012Validator(json_schema(registry))

    def check(self, spec, given_overrides=()):
        """Load and plan; what is accepted fits the schema and survives the way into a worker. Whether it was."""
        self.file.write_text(json.dumps(spec, ensure_ascii=True))
        refused = None
        try:
            loaded = load_spec(self.file, self.registry, overrides=given_overrides)
            plan = make_plan(loaded, self.registry)
        except ComposerError as error:  # anything else is a traceback, and fails the test
            refused = error
        if refused is not None:
            assert str(refused)
            assert refused.exit_code in (2, 3)
            return False
        if not given_overrides:
            assert [error.message for error in self.schema.iter_errors(spec)] == []
        again, _ = restore(json.loads(json.dumps(plan.to_json(), allow_nan=False)), self.registry)
        assert plan.required_env or again == loaded.spec
        return True


@pytest.fixture(scope="module")
def kit(tmp_path_factory, fake_plugin):
    registry = Registry()
    registry.add(builtin, Owner("composer-core", "0.1.0", "core"))
    registry.add(fake_plugin, Owner("fake", "1.2", "fake"))
    registry.add(Able(), Owner("able", "1", "able"))
    assert registry.problems == []
    return Kit(tmp_path_factory.mktemp("specs"), registry)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name in ("DATA", "KEY", "X"):
        monkeypatch.setenv(name, "/value")


common = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": (Phase.generate, Phase.shrink)}


@pytest.mark.parametrize("text", [WHOLE, SMALL], ids=["whole", "small"])
def test_the_specs_that_are_mutated_are_right(kit, text):
    assert kit.check(parse(text, "s").data)


@settings(max_examples=300, **common)
@given(spec=mutated(), given_overrides=overrides)
def test_a_mutated_spec_runs_or_is_refused_with_a_message(kit, spec, given_overrides):
    kit.check(spec, given_overrides)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, **common)
@given(spec=mutated(), given_overrides=overrides)
def test_ten_thousand_mutated_specs(kit, spec, given_overrides):
    kit.check(spec, given_overrides)
