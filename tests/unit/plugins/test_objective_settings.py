"""Settings of the built-in objectives: defaults of the papers, and combinations that would mean nothing."""

import pytest
from pydantic import ValidationError

from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, LengthPenalty


@pytest.mark.parametrize("preset", PRESETS)
def test_defaults_are_the_presets_own(preset):
    settings, row = OBJECTIVE_SETTINGS[preset](), PRESETS[preset]
    assert settings.scale_rewards == row.scale
    assert settings.drop_truncated is row.drops_truncated
    assert (settings.kl_coef, settings.kl_estimator) == (row.kl_coef, row.kl_estimator)


def test_defaults_of_each_clip_rule():
    def numbers(preset):
        dumped = OBJECTIVE_SETTINGS[preset]().model_dump()
        return {name: dumped[name] for name in ("epsilon", "epsilon_high") if name in dumped}

    assert numbers("dapo") == {"epsilon": 0.2, "epsilon_high": 0.28}
    assert numbers("gspo-token") == {"epsilon": 3e-4, "epsilon_high": 4e-4}
    assert numbers("gmpo") == {"epsilon": 0.4, "epsilon_high": 0.4}
    assert numbers("dppo") == {"epsilon": 0.2, "epsilon_high": 0.2}
    assert numbers("cispo") == {"epsilon_high": 5.0}


def test_composer2_is_dr_grpo_with_penalties_in_the_reward():
    ours, dr_grpo = OBJECTIVE_SETTINGS["composer2"]().model_dump(), OBJECTIVE_SETTINGS["dr-grpo"]().model_dump()
    different = {name: ours[name] for name in ours if ours[name] != dr_grpo[name]}
    assert different == {"kl_coef": 1e-3, "kl_estimator": "k1", "length_penalty": LengthPenalty().model_dump()}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"overlong": {"limit": 10, "cache": 5}, "drop_truncated": True},
            "overlong punishes what drop_truncated leaves out: set drop_truncated: false",
        ),
        (
            {"scale_rewards": "mean", "kl_coef": 0.1, "kl_estimator": "k1", "length_penalty": {}},
            "scale_rewards: mean needs rewards >= 0, and a KL in the reward (k1) and length_penalty can make them "
            "negative",
        ),
        ({"overlong": {"limit": 10, "cache": 11}}, "cache (11) must not exceed limit (10)"),
        (
            {"rollout_correction": {"rule": "truncate", "low": 0.5}},
            "low goes with rule: mask; truncate only caps from above",
        ),
        ({"rollout_correction": {"rule": "mask", "low": 3}}, "low (3.0) must be below high (2.0)"),
    ],
    ids=["overlong-and-dropped", "mean-of-penalised", "cache-over-limit", "low-with-truncate", "low-over-high"],
)
def test_combinations_that_mean_nothing_are_refused(given, problem):
    with pytest.raises(ValidationError) as caught:
        OBJECTIVE_SETTINGS["grpo"](**given)
    assert [error["msg"] for error in caught.value.errors()] == [f"Value error, {problem}"]


def test_a_k1_without_a_weight_penalises_nothing():
    assert OBJECTIVE_SETTINGS["maxrl"](kl_estimator="k1").kl_coef == 0
