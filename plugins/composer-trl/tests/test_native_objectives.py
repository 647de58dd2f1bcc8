"""Settings that TRL's own code does not have are refused: it would train without them and say nothing."""

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_trl.objectives import NATIVE, config_fields


@pytest.mark.parametrize("objective", NATIVE)
def test_the_presets_own_numbers_are_served(objective):
    assert config_fields(objective, OBJECTIVE_SETTINGS[objective]())["beta"] == 0.0


@pytest.mark.parametrize(
    "given",
    [
        {"kl_estimator": "k1"},
        {"kl_corrected": False},
        {"dual_clip": 3.0},
        {"overlong": {"limit": 10, "cache": 5}},
        {"length_penalty": {}},
        {"rollout_correction": {}},
        {"off_policy_threshold": 0.1},
        {"scale_rewards": "mean"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_setting_trl_would_ignore_is_refused_with_its_place(given):
    with pytest.raises(SpecError) as caught:
        config_fields("grpo", OBJECTIVE_SETTINGS["grpo"](**given))
    assert str(caught.value) == (
        f"loss.objective.{next(iter(given))}: TRL computes grpo with its own code, which does not have this\n"
        "  fix: leave it out, or use a backend that runs the core's objectives"
    )


def test_every_refused_setting_is_named():
    with pytest.raises(SpecError) as caught:
        config_fields("sapo", OBJECTIVE_SETTINGS["sapo"](kl_estimator="k2", off_policy_threshold=0.1))
    assert [problem.key for problem in caught.value.problems] == [
        "loss.objective.kl_estimator",
        "loss.objective.off_policy_threshold",
    ]
