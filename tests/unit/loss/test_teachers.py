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


def _read(teacher):
    """What the teacher's forward sees of the first weight."""
    with teacher.reading():
        return teacher.network[0].weight[0, 0].item()


def test_a_frozen_teacher_reads_the_weights_it_was_made_with_and_gives_the_policy_its_own_back():
    policy = _policy().train()
    weight = policy[0].weight
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    _move(policy, 5.0)
    teacher.step()
    assert _read(teacher) == 1.0
    assert policy[0].weight is weight
    assert weight[0, 0].item() == 5.0
    assert policy.training
    assert teacher.state_dict() == {}


def test_a_forward_of_the_policy_is_differentiated_at_its_own_weights_after_a_teacher_has_read():
    policy = nn.Linear(1, 1, bias=False)
    _move(policy, 1.0)
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    _move(policy, 3.0)
    given = torch.full((1, 1), 2.0, requires_grad=True)
    value = policy(given)
    with teacher.reading(), torch.no_grad():
        assert policy(given).item() == 2.0
    value.backward()
    assert given.grad.item() == 3.0
    assert policy.weight.grad.item() == 2.0


def test_an_error_while_a_teacher_reads_gives_the_policy_its_weights_back():
    policy = _policy()
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    _move(policy, 5.0)
    with pytest.raises(KeyError), teacher.reading():
        raise KeyError
    assert policy[0].weight[0, 0].item() == 5.0


def test_a_teachers_forward_under_autocast_does_not_take_the_policys_cached_weights():
    policy = nn.Linear(1, 1, bias=False)
    _move(policy, 1.0)
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    _move(policy, 3.0)
    with torch.autocast("cpu", torch.bfloat16):
        policy(torch.ones(1, 1))
        with teacher.reading(), torch.no_grad():
            assert policy(torch.ones(1, 1)).item() == 1.0
        assert policy(torch.ones(1, 1)).item() == 3.0


def test_an_average_moves_by_its_rate():
    policy = _policy()
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    _move(policy, 5.0)
    teacher.step()
    assert _read(teacher) == 2.0  # 0.75 x 1 + 0.25 x 5
    teacher.step()
    assert _read(teacher) == 2.75  # 0.75 x 2 + 0.25 x 5


def test_an_average_in_bf16_does_not_lose_small_steps():
    policy = _policy(torch.bfloat16)
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.01))
    _move(policy, 1.25)
    for _ in range(40):
        teacher.step()  # each step adds at most 0.0025, and bf16 has nothing between 1 and 1.0078
    expected = 1.25 - 0.25 * 0.99**40
    assert _read(teacher) == pytest.approx(expected, abs=0.004)


def test_an_averages_state_comes_back():
    policy = _policy()
    teacher = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    _move(policy, 5.0)
    teacher.step()
    saved = copy.deepcopy(teacher.state_dict())
    again = make_teacher(policy, SelfTeacher("ema", rate=0.25))
    again.load_state_dict(saved)
    assert _read(again) == 2.0
    again.step()
    assert _read(again) == 2.75


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
