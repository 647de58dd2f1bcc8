import pytest

from composer_core.run.explain import Explainer


def _said(*steps, channels=()):
    explainer = Explainer(channels)
    return [sentence for number, metrics in enumerate(steps, 1) for sentence in explainer.step(number, metrics)]


def test_groups_of_equal_rewards_are_explained_once():
    flat = {"reward/flat_groups": 1.0, "loss/policy": 0.0, "grad_norm": 0.0}
    assert _said({"reward/flat_groups": 0.5, "loss/policy": 0.1}, flat, flat) == [
        "step 2: the rewards of every group are equal, so all advantages are 0 and the policy loss teaches nothing "
        "here; reward/flat_groups is the share of such groups (said once)"
    ]


def test_a_policy_loss_of_0_with_a_gradient_is_explained():
    assert _said({"loss/policy": 1e-9, "grad_norm": 0.3, "reward/flat_groups": 0.0, "reward/mean": 0.5}) == [
        "step 1: loss/policy is 0 because the advantages of a group add up to 0 while the policy is the one that "
        "sampled; its gradient is not: look at grad_norm (said once)"
    ]


def test_an_idle_channel_and_one_with_rows_but_no_gradient_are_told_apart():
    idle = {"active/sdpo": 0.0, "loss/sdpo": 0.0, "grad_norm/sdpo": 0.0}
    silent = {"active/sdpo": 0.5, "loss/sdpo": 0.0, "grad_norm/sdpo": 0.0}
    assert _said(idle, silent, channels=["sdpo"]) == [
        "step 1: channel 'sdpo' has nothing to learn from here: none of its rows held anything, so loss/sdpo is 0 "
        "(said once)",
        "step 2: channel 'sdpo' has rows, and yet neither loss nor gradient: what it teaches is what the policy does "
        "(said once)",
    ]


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss/policy": 0.1, "grad_norm": 1.0, "reward/flat_groups": 0.9},
        {"loss/policy": 0.0, "grad_norm": 0.0, "reward/flat_groups": 0.5},
        {"active/sdpo": 0.5, "loss/sdpo": 0.0, "grad_norm/sdpo": 0.1},
        {"active/sdpo": 0.5, "loss/sdpo": 0.1, "grad_norm/sdpo": 0.0},
        {"loss/policy": 0.0, "grad_norm": 0.3, "reward/flat_groups": 0.0},  # nothing was rewarded: a channel's gradient
        {},
    ],
)
def test_a_step_that_learns_needs_no_word(metrics):
    assert _said(metrics, channels=["sdpo"]) == []
