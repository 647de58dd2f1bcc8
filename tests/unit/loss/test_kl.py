"""KL estimators on numbers worked by hand."""

import math

import pytest
import torch

from composer_core.loss.kl import ESTIMATORS, k1, k2, k3, k3_straight_through


def test_k3_is_the_bregman_form_and_zero_with_zero_slope_at_the_reference():
    # d = ln 2: e^d - d - 1 = 1 - ln 2
    assert k3(torch.tensor(-2.0), torch.tensor(-2.0 + math.log(2))).item() == pytest.approx(1 - math.log(2))
    logp = torch.tensor(-2.0, requires_grad=True)
    value = k3(logp, torch.tensor(-2.0))
    value.backward()
    assert (value.item(), logp.grad.item()) == (0.0, 0.0)


# d = log pi - log ref = ln 2
NEAR = (-1.0, -1.0 - math.log(2))


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        # e^-d + d - 1, and 1 - e^-d
        ("k3", math.log(2) - 0.5, 0.5),
        # the value of k3, the slope of k2
        ("k3-straight-through", math.log(2) - 0.5, math.log(2)),
    ],
)
def test_value_and_slope_of_each_estimator(name, value, slope):
    logp = torch.tensor(NEAR[0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(NEAR[1], dtype=torch.float64, requires_grad=True)
    result = {"k1": k1, "k2": k2, "k3": k3, "k3-straight-through": k3_straight_through}[name](logp, ref)
    assert torch.equal(ESTIMATORS[name](logp - ref), result)
    result.backward()
    assert result.item() == pytest.approx(value)
    assert logp.grad.item() == pytest.approx(slope)
    assert ref.grad is None, "the reference is no student"


def test_k1_and_k3_average_to_the_kl_and_k2s_gradient_is_the_kls():
    # pi = (0.7, 0.3) from logits, ref = (0.4, 0.6); expectations over the two tokens
    logits = torch.tensor([math.log(0.7), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    ref = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    pi = logps.exp()
    true = (pi * (logps - ref)).sum()
    (gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    assert (pi * k1(logps, ref)).sum().item() == pytest.approx(true.item())
    assert (pi * k3(logps, ref)).sum().item() == pytest.approx(true.item())
    for estimator, right in ((k2, True), (k3_straight_through, True), (k1, False), (k3, False)):
        (sampled,) = torch.autograd.grad((pi.detach() * estimator(logps, ref)).sum(), logits, retain_graph=True)
        assert torch.allclose(sampled, gradient) is right, estimator.__name__
    (of_k1,) = torch.autograd.grad((pi.detach() * k1(logps, ref)).sum(), logits)
    assert of_k1.abs().max() < 1e-15, "in a loss, k1 pushes nowhere on average"


def test_an_extreme_gap_is_finite_and_a_cap_ends_the_gradient():
    logp = torch.tensor([-500.0, 0.0], requires_grad=True)
    value = k3(logp, torch.tensor([0.0, -500.0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert logp.grad.isfinite().all()
    capped = torch.tensor(-9.0, requires_grad=True)
    value = k3(capped, torch.tensor(-1.0), cap=10.0)  # e^8 - 8 - 1 is far beyond
    value.backward()
    assert (value.item(), capped.grad.item()) == (10.0, 0.0)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError) as caught:
        k2(torch.zeros(3), torch.zeros(1))
    assert str(caught.value) == "logps (3,), ref_logps (1,): the shapes must be equal (one entry per token)"
