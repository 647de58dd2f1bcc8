"""Plans: what a backend can run, and the way through plan.json into a worker."""

from __future__ import annotations

import json

import pytest

from composer_core.errors import MissingError, Problem, SpecError, UsageError
from composer_core.plugins import builtin
from composer_core.plugins.contributions import BackendPlugin, LossChannelPlugin, ObjectivePlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.protocols import Aggregation, Need
from composer_core.spec.plan import Plan, make_plan, restore


@pytest.fixture
def small_text(spec_text):
    return spec_text.replace("use: toy", "use: small")


class Backends:
    """Contributes the backends it is made with."""

    def __init__(self, *backends):
        self.backends = backends

    @hookimpl
    def composer_backends(self):
        return self.backends


class Channels:
    """Contributes one channel."""

    def __init__(self, **options):
        self.options = {"name": "extra", "summary": "", "target": "x:Y", **options}

    @hookimpl
    def composer_loss_channels(self):
        return [LossChannelPlugin(**self.options)]


# -- what a backend can run --------------------------------------------------------------------------------------------


def test_a_channel_gets_the_first_alternative_that_the_backend_provides(load, registry, spec_text, small_text):
    best = make_plan(load(spec_text), registry).channels[0]
    assert (best.name, best.weight, best.needs) == ("lean", 0.5, ("divergence-full",))
    assert best.reason == "backend 'toy' provides it"
    second = make_plan(load(small_text), registry).channels[0]
    assert second.needs == ("logps",)
    assert second.reason == (
        "backend 'small' provides it; a better way needs divergence-full, which it does not provide"
    )


def test_a_channel_that_fits_nothing_is_refused_at_its_place(load, registry, small_text):
    needs = (frozenset({Need.PAIRS, Need.REFERENCE}), frozenset({Need.LOGITS}))
    registry.add(Channels(needs=lambda settings: needs), Owner("more", "1", "more"))
    loaded = load(small_text.replace("strength: 2}", "strength: 2}\n    - {use: extra}"))
    with pytest.raises(SpecError) as error:
        make_plan(loaded, registry)
    assert str(error.value) == (
        "spec.yaml:12:7: loss.channels[1]: backend 'small' cannot run channel 'extra': "
        "it needs {pairs, reference} or {logits}, small provides {logps}"
    )


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (lambda settings: 1 / 0, "ZeroDivisionError: division by zero"),
        # a set of needs instead of a tuple of sets: its members are texts, whose letters are no needs
        (lambda settings: frozenset({Need.LOGPS}), "ValueError: 'l' is not a valid Need"),
    ],
    ids=["raises", "wrong-shape"],
)
def test_a_channel_whose_needs_break_is_blamed_on_its_plugin(load, registry, needs, said, spec_text):
    registry.add(Channels(needs=needs), Owner("more", "1", "more"))
    with pytest.raises(SpecError) as error:
        make_plan(load(spec_text.replace("strength: 2}", "strength: 2}\n    - {use: extra}")), registry)
    (problem,) = error.value.problems
    assert problem.key == "loss.channels[1]"
    assert problem.problem == f"channel 'extra': needs (more 1) failed: {said}"


@pytest.mark.parametrize(
    ("backend", "objective", "whose"),
    [
        ("small", "grpo", "native"),
        ("toy", "grpo", "core"),  # toy has no objective of its own
        ("small", "mine", "native"),  # brought by the same plugin
    ],
    ids=["by-the-trainer", "by-the-core", "by-the-backends-plugin"],
)
def test_the_objective_is_native_where_the_trainer_has_it(load, registry, spec_text, backend, objective, whose):
    text = spec_text.replace("use: toy", f"use: {backend}").replace("use: grpo", f"use: {objective}")
    assert make_plan(load(text), registry).objective == whose


def test_an_objective_of_a_third_party_never_becomes_the_trainers_of_that_name(load, registry, small_text):
    class Impostor:
        @hookimpl
        def composer_objectives(self):
            yield ObjectivePlugin(name="grpo", summary="", target="x:Y", aggregation=Aggregation.TOKEN_MEAN)

    registry.add(Impostor(), Owner("impostor", "1", "impostor"))
    with pytest.raises(SpecError) as error:
        make_plan(load(small_text.replace("use: grpo", "use: impostor/grpo")), registry)
    assert str(error.value) == (
        "spec.yaml:9:15: loss.objective.use: backend 'small' cannot run objective 'grpo': it is none of its own "
        "(grpo, mine), and its aggregation token-mean is none that it serves (none)\n  fix: backends that can: toy"
    )


def test_all_that_a_backend_cannot_do_comes_at_once(load, registry, spec_text):
    def derive(spec):
        raise SpecError([Problem("train.steps", "is too many"), Problem("backend.options.x", "unknown")])

    backend = BackendPlugin(name="tight", summary="", target="x:Y", derive=derive)
    registry.add(Backends(backend), Owner("more", "1", "more"))
    with pytest.raises(SpecError) as error:
        make_plan(load(spec_text.replace("use: toy", "use: tight")), registry)
    assert [(p.key, p.source, p.line, p.column) for p in error.value.problems] == [
        ("loss.objective.use", "spec.yaml", 9, 15),
        ("loss.channels[0]", "spec.yaml", 11, 7),
        ("train.steps", "spec.yaml", 13, 3),
        ("backend.options.x", "spec.yaml", 14, 1),  # not in the spec: the place of its block
    ]


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"derive": lambda spec: spec.nothing}, "AttributeError: 'RunSpec' object has no attribute 'nothing'", 2),
        ({"derive": lambda spec: None}, "AttributeError: 'NoneType' object has no attribute 'numbers'", 2),
    ],
    ids=["raises", "returns-nothing"],
)
def test_a_backend_whose_derive_breaks_is_blamed_on_its_plugin(load, registry, options, message, code, spec_text):
    backend = BackendPlugin(
        name="odd",
        summary="",
        target="x:Y",
        aggregations=frozenset(Aggregation),
        provides=lambda s: set(Need),
        **options,
    )
    registry.add(Backends(backend), Owner("more", "1", "more"))
    with pytest.raises(SpecError) as error:
        make_plan(load(spec_text.replace("use: toy", "use: odd")), registry)
    assert str(error.value) == f"spec.yaml:14:1: backend: backend 'odd': derive (more 1) failed: {message}"
    assert error.value.exit_code == code


def test_a_backend_that_misses_its_upstream_ends_with_code_3(load, registry, spec_text):
    def derive(spec):
        raise MissingError("trainer 2.0 is not installed", fix="pip install trainer")

    backend = BackendPlugin(
        name="odd",
        summary="",
        target="x:Y",
        aggregations=frozenset(Aggregation),
        provides=lambda s: set(Need),
        derive=derive,
    )
    registry.add(Backends(backend), Owner("more", "1", "more"))
    with pytest.raises(SpecError) as error:
        make_plan(load(spec_text.replace("use: toy", "use: odd")), registry)
    assert str(error.value) == "spec.yaml:14:1: backend: trainer 2.0 is not installed\n  fix: pip install trainer"
    assert error.value.exit_code == 3


# -- plan.json ---------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_will_be_used_and_written(load, registry, tmp_path, small_text):
    plan = make_plan(load(small_text + "sinks: [tensorboard, trackio]\n"), registry)
    assert plan.spec_path == str(tmp_path / "spec.yaml")
    assert [(p.name, p.version, p.entry_point) for p in plan.plugins] == [
        ("composer-core", "0.1.0", "core"),
        ("fake", "1.2", "fake"),
    ]
    assert plan.versions == {"composer-core": "0.1.0", "fake": "1.2"}
    assert (plan.numbers, plan.upstream, plan.notes) == ({"sequences per step": 64}, {"lr": 0.1}, ("a note",))
    assert plan.files == (
        "spec.yaml",
        "resolved.json",
        "plan.json",
        "provenance.json",
        "metrics.jsonl",
        "events.jsonl",
        "rollouts.jsonl",
        "lock.json",
        "logs/",
        "tensorboard/",
        "checkpoints/step_N/",
        "model/",
        "report.html",
    )


def test_plan_and_spec_survive_the_way_through_json(load, registry, small_text, make_registry):
    loaded = load(small_text)
    plan = make_plan(loaded, registry)
    spec, restored = restore(json.loads(json.dumps(plan.to_json())), make_registry())
    assert spec == loaded.spec
    assert restored.to_json() == plan.to_json()


def test_a_local_plugin_file_is_loaded_again_in_the_worker(load, registry, tmp_path, spec_text, make_registry):
    (tmp_path / "mine.py").write_text(
        "from composer_core.plugins.contributions import LossChannelPlugin\n"
        "from composer_core.plugins.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def composer_loss_channels():\n"
        "    yield LossChannelPlugin(name='local', summary='', target=f'{__name__}:Local')\n"
    )
    text = "plugins: [mine.py]\n" + spec_text.replace("{use: lean, weight: 0.5, strength: 2}", "{use: local}")
    plan = make_plan(load(text), registry).to_json()
    assert restore(plan, make_registry())[0].loss.channels[0].owner == "mine.py (local file)"

    (tmp_path / "mine.py").write_text("raise SystemExit('this must not be imported')")
    with pytest.raises(UsageError) as error:
        restore(plan, make_registry())
    assert str(error.value) == (
        f"{tmp_path / 'mine.py'}: this plugin file has changed since the plan was made\n  fix: run the spec again"
    )


def test_a_worker_with_another_version_refuses_naming_both(load, registry, spec_text, make_registry):
    plan = make_plan(load(spec_text), registry).to_json()
    with pytest.raises(MissingError) as error:
        restore(plan, make_registry(fake="1.3"))
    assert error.value.problem == "the plan was made with fake 1.2, the worker has 1.3"
    with pytest.raises(MissingError) as error:
        restore(plan, make_registry(core="0.2.0"))
    assert error.value.problem == "the plan was made with composer-core 0.1.0, the worker has 0.2.0"


def test_a_worker_without_the_plugin_refuses_with_the_reason(load, registry, spec_text):
    plan = make_plan(load(spec_text), registry).to_json()
    bare = Registry()
    bare.add(builtin, Owner("composer-core", "0.1.0", "core"))
    with pytest.raises(MissingError) as error:
        restore(plan, bare)
    assert error.value.problem == "the plan was made with fake 1.2, which the worker does not have"


def test_a_worker_with_one_more_claimant_takes_the_plans_owner(load, registry, spec_text, make_registry):
    plan = make_plan(load(spec_text), registry).to_json()
    worker = make_registry((Channels(name="lean"), Owner("other", "1", "other")))
    channel = restore(plan, worker)[0].loss.channels[0]
    assert (channel.use, channel.owner) == ("fake/lean", "fake 1.2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan | {"format": 2}, "this plan has format 2, composer-core 0.1.0 reads format 1"),
        (lambda plan: [], "this plan has format None, composer-core 0.1.0 reads format 1"),
        (lambda plan: {"format": 1}, "this is not a plan: spec: Field required"),
        (lambda plan: plan | {"spec": {}}, "the plan's spec is damaged: KeyError 'data'"),
        (lambda plan: plan | {"versions": None}, "this is not a plan: versions: Input should be a valid dictionary"),
    ],
    ids=["format", "no-mapping", "no-plan", "no-spec", "no-versions"],
)
def test_a_damaged_plan_is_refused(load, registry, change, message, spec_text, make_registry):
    with pytest.raises(UsageError) as error:
        restore(change(make_plan(load(spec_text), registry).to_json()), make_registry())
    assert str(error.value) == message


def test_a_setting_changed_in_plan_json_is_checked_again(load, registry, spec_text, make_registry):
    plan = make_plan(load(spec_text), registry).to_json()
    plan["spec"]["loss"]["channels"][0]["settings"]["strength"] = -1
    with pytest.raises(SpecError) as error:
        restore(plan, make_registry())
    assert str(error.value) == "plan.json: strength: must be > 0, got -1"


def test_a_plan_holds_no_value_of_the_environment(load, registry, monkeypatch, spec_text):
    monkeypatch.setenv("SOME_TOKEN", "tok-9f8e7d")
    assert "tok-9f8e7d" not in json.dumps(make_plan(load(spec_text), registry).to_json())


def test_from_json_gives_an_equal_plan(load, registry, small_text):
    plan = make_plan(load(small_text), registry)
    assert Plan.from_json(plan.to_json()) == plan
