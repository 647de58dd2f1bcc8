"""TAID's t by hand; the official runs are among the golden vectors."""

import json
import math

import pytest
import torch

from composer_core.loss.taid_schedule import TAIDScheduler


def test_the_first_loss_only_gives_something_to_compare_with():
    schedule = TAIDScheduler(10)
    assert schedule.update_t(2.0, 0) is None
    assert schedule.t == 0.4


def test_a_falling_loss_pushes_t_above_the_linear_floor():
    schedule = TAIDScheduler(100, alpha=1.0, beta=0.5)
    schedule.update_t(2.0, 0)
    delta = schedule.update_t(torch.tensor(1.0), 1)
    # the loss fell by half: momentum 0.5 x 0 + 0.5 x 0.5 = 0.25; d = 1 x sigmoid(0.25) x (1 - 0.4)
    expected = 0.6 / (1 + math.exp(-0.25))
    assert delta == pytest.approx(expected)
    assert schedule.momentum == pytest.approx(0.25)
    assert schedule.t == pytest.approx(0.4 + expected)


def test_the_floor_rises_linearly_to_the_end_and_no_further():
    schedule = TAIDScheduler(10, t_start=0.2, t_end=0.8, alpha=0.0)
    seen = []
    for step in range(13):
        schedule.update_t(1.0, step)
        seen.append(schedule.t)
    assert seen == pytest.approx([min(0.2 + 0.06 * step, 0.8) for step in range(13)])


@pytest.mark.parametrize("loss", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_loss_that_is_not_finite_is_skipped_and_counted(loss):
    disturbed, calm = (TAIDScheduler(10, alpha=0.5) for _ in range(2))
    for schedule in (disturbed, calm):
        schedule.update_t(2.0, 0)
    assert disturbed.update_t(loss, 1) is None
    for schedule in (disturbed, calm):
        schedule.update_t(1.0, 2)
    assert (disturbed.t, disturbed.momentum, disturbed.skipped) == (calm.t, calm.momentum, 1)


def test_not_adaptive_means_a_function_of_the_step_alone():
    losses = [[5.0, 1.0, 0.1], [math.nan, 7.0, 2.0]]
    schedules = [TAIDScheduler(10, alpha=1.0, disable_adaptive=True) for _ in losses]
    for schedule, mine in zip(schedules, losses, strict=True):
        for step, loss in enumerate(mine):
            schedule.update_t(loss, step)
            assert schedule.t == pytest.approx(0.4 + 0.06 * step)


def test_a_restored_schedule_goes_on_as_if_nothing_had_happened():
    whole, first = (TAIDScheduler(20, alpha=0.7, beta=0.5) for _ in range(2))
    losses = [3.0, 2.5, math.nan, 2.0, 1.9, 2.2]
    for step, loss in enumerate(losses[:3]):
        first.update_t(loss, step)
    second = TAIDScheduler(20, alpha=0.7, beta=0.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, loss in enumerate(losses):
        whole.update_t(loss, step)
        if step >= 3:
            second.update_t(loss, step)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_train_steps": 0}, "num_train_steps must be >= 1, got 0"),
        ({"t_start": 1.0}, "0 <= t_start <= t_end <= 1 must hold with t_start < 1, got 1.0 and 1.0"),
        (
            {"t_start": 0.9, "t_end": 0.5},
            "0 <= t_start <= t_end <= 1 must hold with t_start < 1, got 0.9 and 0.5",
        ),
        ({"alpha": 2.0}, "alpha and beta must be in [0, 1], got 2.0 and 0.99"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError) as caught:
        TAIDScheduler(**{"num_train_steps": 10} | numbers)
    assert str(caught.value) == message
