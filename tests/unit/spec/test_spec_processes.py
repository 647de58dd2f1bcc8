"""How many processes a backend wants, on its way from the settings into a plan."""

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner
from composer_core.protocols import Need
from composer_core.spec.plan import Plan, make_plan


class Odd:
    @hookimpl
    def composer_backends(self):
        yield BackendPlugin(
            name="odd",
            summary="",
            target="x:Y",
            native_objectives=frozenset({"grpo"}),
            provides=lambda spec: frozenset({Need.LOGPS}),
            processes=lambda settings: settings.none_such,
        )


@pytest.fixture
def plan(load, registry, spec_text):
    return lambda *overrides: make_plan(load(spec_text, *overrides), registry)


@pytest.fixture
def refused(plan):
    def problem(*overrides):
        with pytest.raises(SpecError) as caught:
            plan(*overrides)
        (found,) = caught.value.problems
        return found.key, found.problem, found.fix

    return problem


def test_a_plan_carries_the_number_of_processes(plan):
    assert plan().processes == 1
    two = plan("backend.processes=2")
    assert two.processes == 2
    assert Plan.from_json(two.to_json()) == two
    before = {name: value for name, value in two.to_json().items() if name != "processes"}
    assert Plan.from_json(before).processes == 1  # of a composer-core that had only one


def test_processes_share_the_sequences_of_a_step_equally(refused):
    # 16 sequences; a multiple of 3 prompts has a multiple of 12 sequences, which six can share
    assert refused("backend.processes=6", "train.prompts_per_step=4", "train.group_size=4") == (
        "train.prompts_per_step",
        "the 16 sequences of a step (prompts_per_step x group_size) cannot be shared equally by 6 processes",
        "a multiple of 3",
    )


def test_the_ranks_of_the_toy_trainer_share_whole_prompts(refused):
    assert refused("backend.processes=2", "train.prompts_per_step=3", "train.group_size=4") == (
        "train.prompts_per_step",
        "3 prompts cannot be shared equally by 2 processes",
        "a multiple of 2",
    )


def test_a_plugin_that_cannot_say_it_is_blamed(load, registry, spec_text):
    registry.add(Odd(), Owner("odd-ones", "3.1", "odd"))
    with pytest.raises(SpecError) as caught:
        make_plan(load(spec_text.replace("use: toy", "use: odd")), registry)
    (found,) = caught.value.problems
    assert found.problem == (
        "backend 'odd': processes (odd-ones 3.1) failed: "
        "AttributeError: 'NoSettings' object has no attribute 'none_such'"
    )
