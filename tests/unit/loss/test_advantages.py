"""Advantages on numbers worked by hand."""

import math

import pytest
import torch

from composer_core.errors import RunFailed
from composer_core.loss.advantages import group_advantages

NAN = math.nan


def _advantages(rewards, group, scale):
    return group_advantages(torch.tensor(rewards), torch.tensor(group), scale=scale)[0].tolist()


def test_group_scale_divides_by_the_unbiased_deviation_of_the_group():
    # group 0: mean 0.5, deviations +-0.5, variance 0.5 / 1; group 7: mean 4, deviations +-2, variance 8 / 1
    half, two = 0.5 / (math.sqrt(0.5) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
    assert _advantages([0.0, 2.0, 1.0, 6.0], [0, 7, 0, 7], "group") == pytest.approx([-half, -two, half, two])


def test_batch_scale_divides_by_the_deviation_of_all_rewards():
    # rewards 0 2 1 6: mean 2.25, squares 5.0625 + 0.0625 + 1.5625 + 14.0625 = 20.75, / 3
    std = math.sqrt(20.75 / 3) + 1e-4
    expected = [-0.5 / std, -2 / std, 0.5 / std, 2 / std]
    assert _advantages([0.0, 2.0, 1.0, 6.0], [0, 7, 0, 7], "batch") == pytest.approx(expected)


def test_no_scale_only_subtracts_the_mean():
    assert _advantages([0.0, 2.0, 1.0, 6.0], [0, 7, 0, 7], "none") == [-0.5, -2.0, 0.5, 2.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage(scale):
    assert _advantages([0.1] * 7, [3] * 7, scale) == pytest.approx([0.0] * 7, abs=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_unrewarded_rollout_counts_in_nothing_and_gets_nothing(scale):
    without = _advantages([0.0, 1.0, 5.0], [0, 0, 0], scale)
    assert _advantages([0.0, NAN, 1.0, 5.0], [0, 0, 0, 0], scale) == [without[0], 0.0, *without[1:]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nobody_rewarded_means_no_advantage(scale):
    assert _advantages([NAN, NAN], [0, 0], scale) == [0.0, 0.0]
    assert _advantages([], [], scale) == []


def test_mean_scale_makes_hard_prompts_count_more():
    # group 0: success rate 1/4, so 3 for the one that got there and -1 for the others; group 1: rate 1/2
    rewards, group = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1]
    assert _advantages(rewards, group, "mean") == pytest.approx([3.0, -1.0, -1.0, -1.0, 1.0, -1.0])


def test_mean_scale_gives_nothing_where_nobody_succeeded():
    assert _advantages([0.0, 0.0], [0, 0], "mean") == [0.0, 0.0]


def test_mean_scale_refuses_negative_rewards():
    with pytest.raises(RunFailed) as caught:
        _advantages([0.5, -0.25], [0, 0], "mean")
    assert str(caught.value) == (
        "advantages over the group's mean need rewards >= 0, and one is -0.25\n"
        "  fix: use rewards from 0 to 1, without penalties in them, or another loss.objective.scale_rewards"
    )


def test_lone_rollouts_are_counted_and_get_nothing():
    advantages, lone = group_advantages(torch.tensor([5.0, 1.0, NAN]), torch.tensor([0, 1, 1]), scale="none")
    assert (advantages.tolist(), lone) == ([0.0, 0.0, 0.0], 2)


def test_rewards_and_groups_of_another_number_are_refused():
    with pytest.raises(ValueError) as caught:
        group_advantages(torch.zeros(3), torch.zeros(1, dtype=torch.int64), scale="none")
    assert str(caught.value) == "rewards (3,), group (1,): the shapes must be equal (one entry per sequence)"


def test_whole_numbers_are_refused_as_their_advantages_would_be_cut():
    with pytest.raises(ValueError, match=r"^rewards must be floating-point, got torch.int64$"):
        group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), scale="none")
