"""Optional sections: honoured, refused or said in a note, never ignored."""

from __future__ import annotations

import json

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.contributions import BackendPlugin, LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner
from composer_core.protocols import Aggregation, Need
from composer_core.spec.model import OPTIONAL
from composer_core.spec.plan import make_plan, restore

WRITTEN = {
    "rollout": "rollout: {max_turns: 4, tools: [./t.py:search], environment: {use: python, factory: ./e.py:make}}",
    "data.eval": "data.eval={builtin: digits}",
    "data.traces": "data.traces={path: sessions, format: cards}",
    "data.pairs": "data.pairs={path: pairs.jsonl}",
    "data.max_tokens": "data.max_tokens=4096",
    "replicas": "replicas: {count: 4, every: 100, store: 's3://bucket/run'}",
    "limits.kl": "limits: {kl: 0.5}",
}


class Able:
    """A backend that honours everything, or what it is told to."""

    def __init__(self, honours=frozenset(OPTIONAL)):
        self.honours = honours

    @hookimpl
    def composer_backends(self):
        yield BackendPlugin(
            name="able",
            summary="",
            target="x:Y",
            provides=lambda spec: frozenset(Need),
            aggregations=frozenset(Aggregation),
            honours=self.honours,
        )


def with_section(load, text, key):
    written = WRITTEN[key]
    if key == "limits.kl":
        text = text.replace("{use: grpo}", "{use: grpo, kl_coef: 0.1}")
    return load(text, written) if "=" in written else load(f"{text}{written}\n")


def test_every_optional_key_is_tried_here():
    # a spec without rollouts is another one: test_spec_rollouts.py
    assert {*WRITTEN, "rollouts"} == set(OPTIONAL)


@pytest.mark.parametrize("key", WRITTEN)
def test_a_section_needs_a_backend_that_honours_it(load, registry, spec_text, key):
    registry.add(Able(), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able")
    plan = make_plan(with_section(load, text, key), registry)
    assert restore(json.loads(json.dumps(plan.to_json())), registry)[0] == with_section(load, text, key).spec
    with pytest.raises(SpecError) as error:
        make_plan(with_section(load, spec_text.replace("use: toy", "use: small"), key), registry)
    (problem,) = error.value.problems
    assert (problem.key, problem.problem) == (key, f"backend 'small' does not have {key}")
    assert problem.fix.startswith("leave it out, or use a backend that has it: able")


def test_a_bound_on_the_kl_needs_an_objective_that_computes_one(load, registry, spec_text):
    registry.add(Able(), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able")
    with pytest.raises(SpecError) as error:
        make_plan(load(text, "limits.kl=0.5"), registry)
    (problem,) = error.value.problems
    assert (problem.key, problem.problem) == ("limits.kl", "the objective computes no KL to bound")


def test_paths_of_sections_are_relative_to_the_spec(load, registry, spec_text, tmp_path):
    registry.add(Able(), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able") + WRITTEN["rollout"] + "\nreplicas: {count: 2, store: shared}\n"
    spec = load(text, "data.traces={path: sessions}", "data.pairs={path: p.jsonl}").spec
    assert spec.rollout.tools == [f"{tmp_path / 't.py'}:search"]
    assert spec.rollout.environment.factory == f"{tmp_path / 'e.py'}:make"
    assert (spec.data.traces.path, spec.data.pairs.path) == (str(tmp_path / "sessions"), str(tmp_path / "p.jsonl"))
    assert spec.replicas.store == str(tmp_path / "shared")
    assert load(text, "replicas.store=s3://b/r").spec.replicas.store == "s3://b/r"


def test_data_that_no_channel_reads_is_said_in_a_note(load, registry, spec_text):
    registry.add(Able(), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able")
    asked = ("data.traces={path: sessions}", "data.pairs={path: p.jsonl}")
    assert make_plan(load(text, *asked), registry).notes == ("data.pairs: no channel of this spec reads pairs",)
    assert make_plan(load(text, *asked, "loss.channels=[]"), registry).notes == (
        "data.pairs: no channel of this spec reads pairs",
        "data.traces: no channel of this spec reads traces",
    )


def test_a_trace_format_is_an_installed_reader(load, registry, spec_text):
    registry.add(Able(), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able")
    with pytest.raises(SpecError) as error:
        make_plan(load(text, "data.traces={path: s, format: card}"), registry)
    assert str(error.value) == (
        "command line (data.traces={path: s, format: card}): data.traces.format: no trace reader is called 'card'\n"
        "  fix: did you mean 'cards'?"
    )


def test_teachers_are_accepted_by_name_and_said_to_be_for_replay(load, registry, spec_text):
    text = spec_text + "teachers: {strong: {use: wise}, other: {use: wise, key: k}}\nreplay: {agreement: 3}\n"
    loaded = load(text)
    assert loaded.spec.teachers["other"].settings.key == "k"
    assert make_plan(loaded, registry).notes == (
        "teachers and replay are read by composer-run replay, not by a training run",
        "replay.agreement: 3 teachers must agree and 2 will be asked, so no pair can arise",
    )


def test_traces_and_pairs_of_a_replay_need_no_trainer_that_reads_them(load, registry, spec_text):
    registry.add(Able(honours=frozenset()), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able") + "teachers: {strong: {use: wise}}\nreplay: {agreement: 1}\n"
    asked = ("data.traces={path: sessions}", "data.pairs={path: p.jsonl}")
    assert make_plan(load(text, *asked), registry).notes == (
        "data.pairs: no channel of this spec reads pairs",
        "data.traces: backend 'able' does not train on traces, composer-run replay reads them",
        "teachers and replay are read by composer-run replay, not by a training run",
    )


def test_pairs_that_a_channel_wants_need_a_backend_that_reads_them(load, registry, spec_text):
    class Pairwise:
        @hookimpl
        def composer_loss_channels(self):
            needs = (frozenset({Need.PAIRS}),)
            yield LossChannelPlugin(name="pairwise", summary="", target="x:Y", needs=lambda settings: needs)

    registry.add(Pairwise(), Owner("other", "1", "other"))
    registry.add(Able(honours=frozenset()), Owner("more", "1", "more"))
    text = spec_text.replace("use: toy", "use: able").replace("use: lean, weight: 0.5, strength: 2", "use: pairwise")
    with pytest.raises(SpecError) as error:
        make_plan(load(text + "teachers: {strong: {use: wise}}\n", "data.pairs={path: p.jsonl}"), registry)
    assert [problem.problem for problem in error.value.problems] == ["backend 'able' does not have data.pairs"]


def test_a_teachers_settings_can_be_overridden_by_its_name(load, spec_text):
    loaded = load(spec_text + "teachers: {strong: {use: wise}}\n", "teachers.strong.key=x")
    assert loaded.spec.teachers["strong"].settings.key == "x"
    assert loaded.sources["teachers.strong.key"] == "command line"


def test_money_can_be_limited_where_the_executor_has_a_price(load, registry, spec_text):
    text = spec_text + "limits: {usd: 5}\nexecutor: {use: rented}\n"
    assert make_plan(load(text), registry).spec["limits"]["usd"] == 5
    with pytest.raises(SpecError) as error:
        make_plan(load(text, "executor={use: grid}"), registry)
    assert str(error.value) == (
        "spec.yaml:15:10: limits.usd: executor 'grid' has no known price, so money cannot be counted\n"
        "  fix: limit the time instead: limits.hours"
    )
