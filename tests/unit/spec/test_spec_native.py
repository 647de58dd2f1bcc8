"""An objective is the trainer's own only with settings that the trainer's own code has."""

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner
from composer_core.protocols import Aggregation, Need
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan


class Picky:
    @hookimpl
    def composer_backends(self):
        for name, native, served in (
            ("picky", lambda objective, settings: objective == "grpo" and settings.kl_coef == 0, set(Aggregation)),
            ("alone", lambda objective, settings: settings.kl_coef == 0, set()),
            ("broken", lambda objective, settings: settings.none_such, set(Aggregation)),
        ):
            yield BackendPlugin(
                name=name,
                summary="",
                target="x:Y",
                native_objectives=frozenset({"grpo"}),
                native=native,
                aggregations=frozenset(served),
                provides=lambda spec: frozenset({Need.LOGPS}),
            )


@pytest.fixture
def plan(make_registry, spec_text, tmp_path):
    registry = make_registry((Picky(), Owner("picky", "0.1", "picky")))
    path = tmp_path / "spec.yaml"

    def _plan(backend, kl_coef):
        path.write_text(spec_text.replace("{use: toy}", f"{{use: {backend}}}"))
        return make_plan(load_spec(path, registry, overrides=(f"loss.objective.kl_coef={kl_coef}",)), registry)

    return _plan


@pytest.mark.parametrize(("kl_coef", "whose"), [(0, "native"), (0.1, "core")])
def test_settings_that_the_trainer_lacks_send_the_objective_to_the_core(plan, kl_coef, whose):
    assert plan("picky", kl_coef).objective == whose


def test_a_trainer_that_serves_no_aggregation_says_that_it_is_the_settings(plan):
    with pytest.raises(SpecError) as caught:
        plan("alone", 0.1)
    (problem,) = caught.value.problems
    assert (problem.key, problem.problem) == (
        "loss.objective.use",
        "backend 'alone' cannot run objective 'grpo': its own code has not all that these settings ask for, and its "
        "aggregation sequence-mean is none that it serves (none)",
    )


def test_a_backend_whose_word_fails_is_named(plan):
    with pytest.raises(SpecError) as caught:
        plan("broken", 0)
    (problem,) = caught.value.problems
    assert problem.problem == (
        "backend 'broken': native (picky 0.1) failed: AttributeError: 'GrpoSettings' object has no attribute "
        "'none_such'"
    )
