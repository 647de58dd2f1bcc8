"""Length penalties on numbers worked by hand."""

import math

import pytest
import torch

from composer_core.loss.shaping import length_cost, overlong_penalty


def test_the_overlong_penalty_grows_over_the_cache_and_stops_at_the_limit():
    lengths = torch.tensor([0.0, 80.0, 85.0, 100.0, 130.0])
    # 20 tokens of cache: at 85, 5 of 20
    assert overlong_penalty(lengths, limit=100, cache=20).tolist() == [0.0, 0.0, -0.25, -1.0, -1.0]


@pytest.mark.parametrize("cache", [0, 101])
def test_a_cache_outside_the_limit_is_refused(cache):
    with pytest.raises(ValueError, match=rf"^cache must be in \(0, limit\], got cache {cache} and limit 100$"):
        overlong_penalty(torch.zeros(1), limit=100, cache=cache)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.0, 3.0),  # linear
        (0.5, 2.0),  # (sqrt(1 + 1 x 3) - 1) / (1 x 0.5)
        (1.0, math.log(4)),
        (2.0, 0.75),  # (1 / 4 - 1) / -1
    ],
)
def test_the_cost_of_three_units(q, expected):
    assert length_cost(torch.tensor(3.0, dtype=torch.float64), k=1.0, q=q).item() == pytest.approx(expected)


def test_the_cost_starts_at_zero_with_slope_one():
    for q in (0.0, 0.5, 1.0, 3.0):
        x = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        cost = length_cost(x, k=2.0, q=q)
        cost.backward()
        assert (cost.item(), x.grad.item()) == (0.0, pytest.approx(1.0))


def test_the_logarithm_is_the_limit_and_not_a_jump():
    x = torch.tensor([0.5, 4.0, 40.0])  # float32: the plain difference of powers would be off by a tenth here
    assert torch.allclose(length_cost(x, k=1.0, q=1 - 1e-6), length_cost(x, k=1.0, q=1.0), rtol=1e-5)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"^length_cost needs k > 0 and q >= 0, got k 0 and q 1$"):
        length_cost(torch.zeros(1), k=0, q=1)
