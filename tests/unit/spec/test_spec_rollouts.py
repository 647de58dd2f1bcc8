"""`rollouts: none`: a spec without prompts, rewards and, if it likes, an objective, from file to plan and back."""

from __future__ import annotations

import json

import jsonschema
import pytest

from composer_core.errors import SpecError
from composer_core.plugins.contributions import BackendPlugin, LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner
from composer_core.protocols import Aggregation, Need
from composer_core.spec.plan import make_plan, restore
from composer_core.spec.schema import json_schema
from composer_core.spec.yaml import parse

SPEC = """\
version: 1
name: test
model: {builtin: tiny}
rollouts: none
data:
  traces: {path: sessions}
loss:
  channels:
    - {use: lean, weight: 0.5, strength: 2}
train:
  steps: 5
backend: {use: able}
"""


class Able:
    """A backend that learns from recorded data, and a channel that reads pairs."""

    @hookimpl
    def composer_backends(self):
        yield BackendPlugin(
            name="able",
            summary="",
            target="x:Y",
            provides=lambda spec: frozenset(Need),
            aggregations=frozenset({Aggregation.CONSTANT}),
            honours=frozenset({"rollouts", "data.pairs"}),
        )

    @hookimpl
    def composer_loss_channels(self):
        yield LossChannelPlugin(
            name="pairing", summary="", target="x:Y", needs=lambda settings: (frozenset({Need.PAIRS}),)
        )


@pytest.fixture
def able(registry):
    registry.add(Able(), Owner("more", "1", "more"))
    return registry


def test_it_goes_through_the_plan_and_back_without_objective_prompts_and_rewards(load, able):
    loaded = load(SPEC)
    plan = make_plan(loaded, able)
    assert (plan.objective, plan.notes) == ("", ())
    assert plan.spec["loss"]["objective"] is None
    assert (plan.spec["data"]["prompts"], plan.spec["data"]["rewards"]) == (None, [])
    spec, _ = restore(json.loads(json.dumps(plan.to_json())), able)
    assert spec == loaded.spec
    assert "recorded.jsonl" in plan.files
    assert "rollouts.jsonl" not in plan.files


def test_what_speaks_of_rollouts_may_stand_at_its_default(load, able):
    # as a resumed run's spec does, which is written out in full
    loaded = load(SPEC, "data.rewards=[]", "data.prompts=null", "train.group_size=8", "limits.reward_drop=null")
    assert make_plan(loaded, able).objective == ""


def test_cross_entropy_is_the_cores_whatever_the_backend_serves(load, able):
    plan = make_plan(load(SPEC, "loss.objective={use: lm-ce}"), able)
    assert plan.objective == "core"


def test_traces_and_the_longest_row_come_with_it(load, able):
    assert make_plan(load(SPEC, "data.max_tokens=512"), able).notes == ()
    # a run with rollouts does not train on traces here, and is told what would
    generating = SPEC.replace("rollouts: none\n", "").replace(
        "data:\n", 'data:\n  prompts: {builtin: digits}\n  rewards: [{use: regex, pattern: "x"}]\n'
    )
    with pytest.raises(SpecError) as error:
        make_plan(load(generating.replace("loss:\n", "loss:\n  objective: {use: mine}\n")), able)
    assert str(error.value) == (
        "spec.yaml:7:3: data.traces: backend 'able' does not have data.traces\n"
        "  fix: leave it out, or rollouts: none, which learns from recorded data alone"
    )


def test_a_backend_that_always_generates_is_refused_for_that_alone(load, able):
    with pytest.raises(SpecError) as error:
        make_plan(load(SPEC.replace("use: able", "use: toy"), "data.max_tokens=512"), able)
    assert str(error.value) == (
        "spec.yaml:4:1: rollouts: backend 'toy' does not have rollouts: none\n"
        "  fix: leave it out, or use a backend that has it: able"
    )


def test_traces_that_only_pairs_are_learnt_beside_are_said_in_a_note(load, able):
    channels = "loss.channels=[{use: pairing}]"
    plan = make_plan(load(SPEC, channels, "data.pairs={path: p.jsonl}"), able)
    assert plan.notes == ("data.traces: no channel of this spec reads traces",)
    # with cross-entropy beside it they are read
    more = "loss.objective={use: lm-ce}"
    assert make_plan(load(SPEC, channels, more, "data.pairs={path: p.jsonl}"), able).notes == ()


def test_a_channel_of_weight_0_needs_no_traces(load, able):
    text = SPEC.replace("  traces: {path: sessions}\n", "  pairs: {path: p.jsonl}\n")
    channels = "loss.channels=[{use: pairing}, {use: lean, weight: 0, strength: 2}]"
    assert make_plan(load(text, channels), able).notes == ()


def test_the_schema_asks_for_prompts_only_where_something_is_generated(able, spec_text):
    schema = jsonschema.Draft202012Validator(json_schema(able))
    assert schema.is_valid(parse(SPEC, "s").data)
    assert schema.is_valid(parse(spec_text, "s").data)
    assert not schema.is_valid(parse(SPEC.replace("rollouts: none", "rollouts: generate"), "s").data)
    assert not schema.is_valid(parse(SPEC.replace("rollouts: none\n", ""), "s").data)
    assert not schema.is_valid(parse(spec_text.replace("  objective: {use: grpo}\n", ""), "s").data)
