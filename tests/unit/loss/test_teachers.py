import copy

import pytest
import torch
from torch import nn

from composer_core.errors import RunFailed
from composer_core.loss.teachers import SelfTeacher, make_teacher


def _policy(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


def _move(policy, value):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def test_a_live_teacher_is_the_policy_itself():
    policy = _policy()
    assert make_teacher(policy, SelfTeacher("live")).network is policy


def test_a_frozen_teacher_keeps_the_weights_it_was_made_with_and_asks_for_no_gradient():
    policy = _policy().train()
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    _move(policy, 5.0)
    teacher.step()
    assert all((p == 1).all() and not p.requires_grad for p in teacher.network.parameters())
    assert policy.training
    assert not teacher.network.training
    assert teacher.state_dict() == {}


def test_an_average_moves_by_its_rate_and_takes_over_buffers():
    policy = _policy()
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    _move(policy, 5.0)
    policy[1].running_mean.fill_(3.0)
    teacher.step()
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in teacher.network.parameters())  # 0.75 x 1 + 0.25 x 5
    assert (teacher.network[1].running_mean == 3).all()
    teacher.step()
    assert teacher.network[0].weight[0, 0].item() == 2.75  # 0.75 x 2 + 0.25 x 5


def test_an_average_in_bf16_does_not_lose_small_steps():
    policy = _policy(torch.bfloat16)
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.01))
    _move(policy, 1.25)
    for _ in range(40):
        teacher.step()  # each step adds at most 0.0025, and bf16 has nothing between 1 and 1.0078
    expected = 1.25 - 0.25 * 0.99**40
    assert teacher.network[0].weight[0, 0].item() == pytest.approx(expected, abs=0.004)


def test_an_averages_state_comes_back():
    policy = _policy()
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    _move(policy, 5.0)
    teacher.step()
    saved = copy.deepcopy(teacher.state_dict())
    again = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    again.load_state_dict(saved)
    assert again.network[0].weight[0, 0].item() == 2.0
    again.step()
    assert again.network[0].weight[0, 0].item() == 2.75


def test_another_teachers_state_is_refused():
    with pytest.raises(RunFailed) as caught:
        make_teacher(_policy(), SelfTeacher("frozen")).load_state_dict({"0.weight": torch.ones(2, 2)})
    assert str(caught.value) == (
        "the checkpoint's teacher has other weights than this run's: 0.weight and 0 more\n"
        "  fix: resume with the teacher, model and adapters that the checkpoint was made with"
    )


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_a_rate_outside_of_its_range_is_refused(rate):
    with pytest.raises(ValueError, match=r"^rate must be in \(0, 1\], got "):
        SelfTeacher("ema", rate=rate)
