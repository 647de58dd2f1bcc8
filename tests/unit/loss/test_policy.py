"""Clip rules and advantages on numbers worked by hand; that each preset equals TRL is tests/parity/."""

import math
import warnings

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import RunFailed
from composer_core.loss import policy as objectives
from composer_core.loss.clip import Tokens, cispo, k3, ppo, sapo, vespo
from composer_core.loss.policy import group_advantages
from composer_core.loss.presets import PRESETS
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Objective

NAN = math.nan


def _objective(preset, **settings):
    return getattr(objectives, preset.replace("-", "_"))(OBJECTIVE_SETTINGS[preset](**settings))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_an_objective_that_its_contribution_can_load(preset):
    objective: Objective = _objective(preset)
    assert objective.aggregation is PRESETS[preset].aggregation


# -- clip rules --------------------------------------------------------------------------------------------------------


def _tokens(ratio, advantage, logp=-1.0):
    """One token; its ratio carries the gradient."""
    ratio = torch.tensor([ratio], requires_grad=True)
    logps = torch.tensor([logp], requires_grad=True)
    seqs = Seqs.from_lists([[5]])
    return Tokens(seqs=seqs, logps=logps, log_ratio=ratio.log(), ratio=ratio, advantages=torch.tensor([advantage]))


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
    assert tokens.ratio.grad.item() == pytest.approx(slope)


def test_ppo_flags_the_tokens_it_clipped():
    tokens = _tokens(0.5, -2.0)
    _, flags = ppo(tokens, epsilon=0.2, epsilon_high=None, delta=None)
    assert {name: flag.tolist() for name, flag in flags.items()} == {"clip_low": [True], "clip_high": [False]}


def test_cispo_weights_the_log_prob_by_a_capped_constant():
    tokens = _tokens(9.0, 2.0, logp=-0.5)
    value, flags = cispo(tokens, cap=5.0)
    value.sum().backward()
    assert value.item() == pytest.approx(5.0)  # -5 x 2 x -0.5
    assert tokens.logps.grad.item() == pytest.approx(-10.0)  # -5 x 2
    assert tokens.ratio.grad is None
    assert flags["clip_high"].tolist() == [True]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_has_the_plain_gradient_at_ratio_one(advantage, tau):
    tokens = _tokens(1.0, advantage)
    value, _ = sapo(tokens, temperature_positive=1.0, temperature_negative=1.05)
    value.sum().backward()
    assert value.item() == pytest.approx(-2 * advantage / tau)  # sigmoid(0) x 4 / tau
    assert tokens.ratio.grad.item() == pytest.approx(-advantage)  # sigmoid'(0) = 1/4


def test_vespo_weighs_a_token_by_the_density_of_its_whole_sequence():
    # two tokens with log-ratios ln 2 and 0: w = 2, phi = e^3 x 2^2 x e^-6 = 4 e^-3 for A >= 0 (k 2, lambda 3)
    log_ratio = torch.tensor([math.log(2), 0.0])
    logps = torch.tensor([-1.0, -1.0], requires_grad=True)
    tokens = Tokens(
        seqs=Seqs.from_lists([[5, 5]]), logps=logps, log_ratio=log_ratio, ratio=log_ratio.exp(),
        advantages=torch.tensor([1.0, 1.0]),
    )  # fmt: skip
    value, _ = vespo(tokens, k_positive=2, lambda_positive=3, k_negative=3, lambda_negative=2)
    value.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-4 * math.exp(-3)] * 2)


def test_k3_is_the_bregman_form_and_zero_with_zero_slope_at_the_reference():
    # d = ln 2: e^d - d - 1 = 1 - ln 2
    assert k3(torch.tensor(-2.0), torch.tensor(-2.0 + math.log(2))).item() == pytest.approx(1 - math.log(2))
    logp = torch.tensor(-2.0, requires_grad=True)
    value = k3(logp, torch.tensor(-2.0))
    value.backward()
    assert (value.item(), logp.grad.item()) == (0.0, 0.0)


# -- advantages --------------------------------------------------------------------------------------------------------


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


def test_a_lone_rollout_has_no_advantage_and_one_warning_says_so():
    objective = _objective("grpo")
    rewards, group = torch.tensor([5.0, 1.0, NAN]), torch.tensor([0, 1, 1])
    with pytest.warns(UserWarning, match="said once") as caught:
        result = objective.advantages(rewards, group, torch.ones(3), None)
    assert result.tolist() == [0.0, 0.0, 0.0]
    assert [str(w.message) for w in caught] == [
        "grpo: 2 group(s) with a single rewarded rollout: nothing to compare it with, its advantage is 0 (said once)"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.advantages(rewards, group, torch.ones(3), None)


# -- the objective -----------------------------------------------------------------------------------------------------


def _batch(advantages=(1.0, 1.0, 1.0, -1.0), old=None, ref=None, **counts):
    """Sequences (prompt, a, b) and (prompt, c): three actions."""
    seqs = Seqs.from_lists([[5, 6], [5, 6]])
    rollouts = Rollouts(
        seqs=seqs, action=torch.tensor([False, True, False, True]),
        advantages=None if advantages is None else torch.tensor(advantages), old_logps=old, ref_logps=ref,
    )  # fmt: skip
    counts = {"tokens": 2.0, "sequences": 2.0, "max_tokens": 8.0, "micro_batches": 1.0} | counts
    return Batch(rollouts=rollouts, counts=counts)


def _view(batch, logps=(NAN, -1.0, NAN, -2.0)):
    return LeafView([KnownLogps(batch.rollouts.seqs, torch.tensor(logps))], temperature=1.0)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_the_advantage():
    batch = _batch()
    view = _view(batch)
    term = _objective("grpo").loss(view, batch)
    assert term.count == "sequences"
    assert term.sum.item() == pytest.approx(0.0)  # -1 + 1
    assert view.coefficients(term.sum)[0].tolist() == [0.0, -1.0, 0.0, 1.0]


def test_metrics_become_shares_of_all_tokens_whatever_divides_the_loss():
    # token 1 has ratio e^1 and A > 0: clipped from above. One of 2 tokens here, 4 in the whole step.
    old = torch.tensor([0.0, -2.0, 0.0, -2.0])
    batch = _batch(old=old, tokens=4.0, max_tokens=40.0)
    term = _objective("dr-grpo").loss(_view(batch), batch)
    assert term.count == "max_tokens"
    share = {name: value.item() / batch.counts["max_tokens"] for name, value in term.metrics.items()}
    assert share == pytest.approx({"clip_low": 0.0, "clip_high": 0.25})


def test_an_extreme_log_ratio_is_finite_in_value_and_gradient():
    batch = _batch(old=torch.tensor([0.0, -500.0, 0.0, 500.0]), advantages=(0.0, -1.0, 0.0, 1.0))
    for preset in PRESETS:
        view = _view(batch)
        term = _objective(preset).loss(view, batch)
        assert term.sum.isfinite(), preset
        assert view.coefficients(term.sum)[0].isfinite().all(), preset


def test_recorded_traces_are_refused():
    with pytest.raises(RunFailed) as caught:
        _objective("grpo").loss(_view(_batch()), _batch(advantages=None))
    assert str(caught.value) == (
        "objective 'grpo' needs rewarded rollouts; this batch has rollouts without advantages "
        "(recorded traces have none)"
    )
    with pytest.raises(RunFailed, match=r"^objective 'grpo' needs rewarded rollouts; this batch has no rollouts$"):
        _objective("grpo").loss(_view(_batch()), Batch())


def test_a_kl_without_reference_log_probs_is_refused():
    batch = _batch()
    with pytest.raises(RunFailed) as caught:
        _objective("grpo", kl_coef=0.1).loss(_view(batch), batch)
    assert str(caught.value) == (
        "objective 'grpo' has kl_coef 0.1, but no reference log-probs came\n"
        "  fix: set kl_coef: 0, or use a backend with a reference model"
    )


def test_the_log_probs_are_taken_at_the_batchs_temperature():
    batch = Batch(rollouts=_batch().rollouts, counts=_batch().counts, temperature=0.7)
    with pytest.raises(RunFailed, match=r"at temperature 0.7, and this trainer has them at 1 only"):
        _objective("grpo").loss(_view(batch), batch)
