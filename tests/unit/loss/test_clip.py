"""Clip rules on numbers worked by hand; that they equal the official code is tests/unit/test_golden.py."""

import math

import pytest
import torch

from composer_core.batch import Seqs
from composer_core.loss.clip import Tokens, cispo, dppo, gmpo, ppo, sapo, vespo


def _tokens(ratio, advantage, logp=-1.0):
    """One token; the log of its ratio carries the gradient."""
    return _sequence([math.log(ratio)], [advantage], logps=[logp])


def _sequence(log_ratios, advantages, logps=None):
    """One sequence; log-ratios and log-probs carry gradients."""
    log_ratio = torch.tensor(log_ratios, requires_grad=True)
    n = len(log_ratios)
    return Tokens(
        seqs=Seqs.from_lists([[5] * n]),
        mask=torch.ones(n, dtype=torch.bool),
        raw_logps=torch.tensor(logps or [-1.0] * n, requires_grad=True),
        log_ratio=log_ratio,
        level=log_ratio,
        advantages=torch.tensor(advantages),
    )


def _slope(tokens):
    """By the ratio: by its logarithm, over the ratio."""
    return (tokens.level.grad / tokens.level.exp()).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # inside the trust region: -r A
        (1.1, 2.0, -2.2, -2.0),
        # a good token already risen beyond 1 + 0.3: -1.3 A, no gradient
        (1.5, 2.0, -2.6, 0.0),
        # a good token that fell: pulled back at full strength
        (0.5, 2.0, -1.0, -2.0),
        # a bad token already fallen below 1 - 0.2: 0.8 x 2, no gradient
        (0.5, -2.0, 1.6, 0.0),
        # a bad token that rose: pushed down at full strength
        (1.5, -2.0, 3.0, 2.0),
        # a bad token that rose beyond delta 4: 4 x 2, no gradient
        (9.0, -2.0, 8.0, 0.0),
    ],
)
def test_ppo_clips_on_the_side_that_would_go_on(ratio, advantage, loss, slope):
    tokens = _tokens(ratio, advantage)
    value, _ = ppo(tokens, epsilon=0.2, epsilon_high=0.3, delta=4.0)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert _slope(tokens) == pytest.approx(slope)


def test_ppo_flags_the_tokens_it_clipped():
    tokens = _tokens(0.5, -2.0)
    _, flags = ppo(tokens, epsilon=0.2, epsilon_high=None, delta=None)
    assert {name: flag.tolist() for name, flag in flags.items()} == {"clip_low": [True], "clip_high": [False]}


def test_cispo_weights_the_log_prob_by_a_capped_constant():
    tokens = _tokens(9.0, 2.0, logp=-0.5)
    value, flags = cispo(tokens, cap=5.0)
    value.sum().backward()
    assert value.item() == pytest.approx(5.0)  # -5 x 2 x -0.5
    assert tokens.raw_logps.grad.item() == pytest.approx(-10.0)  # -5 x 2
    assert tokens.level.grad is None
    assert flags["clip_high"].tolist() == [True]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_has_the_plain_gradient_at_ratio_one(advantage, tau):
    tokens = _tokens(1.0, advantage)
    value, _ = sapo(tokens, temperature_positive=1.0, temperature_negative=1.05)
    value.sum().backward()
    assert value.item() == pytest.approx(-2 * advantage / tau)  # sigmoid(0) x 4 / tau
    assert _slope(tokens) == pytest.approx(-advantage)  # sigmoid'(0) = 1/4


def test_vespo_weighs_a_token_by_the_density_of_its_whole_sequence():
    # two tokens with log-ratios ln 2 and 0: w = 2, phi = e^3 x 2^2 x e^-6 = 4 e^-3 for A >= 0 (k 2, lambda 3)
    tokens = _sequence([math.log(2), 0.0], [1.0, 1.0])
    value, _ = vespo(tokens, k_positive=2, lambda_positive=3, k_negative=3, lambda_negative=2)
    value.sum().backward()
    assert tokens.raw_logps.grad.tolist() == pytest.approx([-4 * math.exp(-3)] * 2)
    assert tokens.level.grad is None


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # a bad token whose ratio exploded: 3 x 2, no gradient
        (9.0, -2.0, 6.0, 0.0),
        # below the ceiling: as without it
        (2.5, -2.0, 5.0, 2.0),
        # a good one is none of its business: clipped at 1.2 as ever
        (9.0, 2.0, -2.4, 0.0),
    ],
)
def test_dual_clip_caps_the_loss_of_bad_tokens_only(ratio, advantage, loss, slope):
    tokens = _tokens(ratio, advantage)
    value, _ = ppo(tokens, epsilon=0.2, dual_clip=3.0)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert _slope(tokens) == pytest.approx(slope)


def test_gmpo_clips_each_token_in_log_space_and_takes_the_geometric_mean():
    # log r 0.8 is clipped to 0.4 and has no gradient; -0.6 stays, as A > 0 pulls it back: mean -0.1
    tokens = _sequence([0.8, -0.6], [2.0, 2.0])
    value, flags = gmpo(tokens, epsilon=0.4, epsilon_high=0.4)
    assert value.tolist() == pytest.approx([-2 * math.exp(-0.1)] * 2)
    value[0].backward()
    assert tokens.log_ratio.grad.tolist() == pytest.approx([0.0, -math.exp(-0.1)])  # -2 e^-0.1 / 2
    assert {name: flag.tolist() for name, flag in flags.items()} == {
        "clip_low": [False, False],
        "clip_high": [True, False],
    }


def test_gmpo_clips_the_other_side_for_a_negative_advantage():
    tokens = _sequence([0.8, -0.6], [-2.0, -2.0])
    value, _ = gmpo(tokens, epsilon=0.4, epsilon_high=0.4)
    assert value.tolist() == pytest.approx([2 * math.exp(0.2)] * 2)  # (0.8 - 0.4) / 2


@pytest.mark.parametrize(
    ("old", "new", "advantage", "kept"),
    [
        # a rare token may double: it moved by 0.01
        (0.01, 0.02, 1.0, True),
        # a common one may not rise by 0.3
        (0.4, 0.7, 1.0, False),
        # but falling by as much is no obstacle to pulling it up again
        (0.7, 0.4, 1.0, True),
        # pushed down further: no
        (0.7, 0.4, -1.0, False),
    ],
)
def test_dppo_goes_by_how_far_the_probability_moved(old, new, advantage, kept):
    tokens = _sequence([math.log(new / old)], [advantage], logps=[math.log(new)])
    value, _ = dppo(tokens, measure="tv", epsilon=0.2, epsilon_high=0.2, cap=20.0)
    value.sum().backward()
    assert tokens.raw_logps.grad.item() == pytest.approx(-advantage * new / old if kept else 0.0)
    assert tokens.log_ratio.grad is None


def test_dppo_measures_the_kl_of_this_token_or_another():
    # old 1/2, new 1/4: 1/2 ln 2 + 1/2 ln(2/3) = 0.1438
    for threshold, kept in ((0.143, False), (0.145, True)):
        tokens = _sequence([-math.log(2)], [-1.0], logps=[math.log(0.25)])
        value, _ = dppo(tokens, measure="kl", epsilon=threshold, epsilon_high=1.0, cap=20.0)
        assert (value.item() != 0) is kept


def test_dppo_caps_the_detached_ratio():
    tokens = _sequence([math.log(50)], [1.0], logps=[math.log(0.05)])
    value, _ = dppo(tokens, measure="tv", epsilon=0.2, epsilon_high=0.2, cap=20.0)
    assert value.item() == pytest.approx(-20 * math.log(0.05))


def test_numbers_keep_the_precision_of_the_log_probs():
    # 1.05 in float32 is 1.0499999523: a float64 loss would be right to 8 digits only
    log_ratio = torch.tensor([math.log(1.5)], dtype=torch.float64)
    tokens = Tokens(
        seqs=Seqs.from_lists([[5]]), mask=torch.tensor([True]), raw_logps=log_ratio, log_ratio=log_ratio,
        level=log_ratio, advantages=torch.tensor([-1.0], dtype=torch.float64),
    )  # fmt: skip
    value, _ = sapo(tokens, temperature_positive=1.0, temperature_negative=1.05)
    assert value.item() == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05 * 0.5)), rel=1e-14)


@pytest.mark.parametrize(
    ("rule", "numbers", "said"),
    [
        (ppo, {"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
        (ppo, {"epsilon": 0.2, "dual_clip": -3.0}, "dual_clip must be > 0, got -3.0"),
        (cispo, {"cap": math.nan}, "cap must be > 0, got nan"),
        (sapo, {"temperature_positive": 1.0, "temperature_negative": 0.0}, "temperature_negative must be > 0, got 0.0"),
        (gmpo, {"epsilon": 0.4, "epsilon_high": -0.4}, "epsilon_high must be > 0, got -0.4"),
        (dppo, {"measure": "tv", "epsilon": 0.2, "epsilon_high": 0.2, "cap": 0.0}, "cap must be > 0, got 0.0"),
    ],
    ids=["epsilon", "dual-clip", "cap", "temperature", "epsilon-high", "dppo-cap"],
)
def test_numbers_that_would_stop_every_token_are_refused(rule, numbers, said):
    with pytest.raises(ValueError) as caught:
        rule(_tokens(1.0, 1.0), **numbers)
    assert str(caught.value) == said
