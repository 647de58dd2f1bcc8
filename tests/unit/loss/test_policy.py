"""The objective around the formulas: what it reads, weighs, logs and refuses.

That each preset equals TRL is tests/parity/; the pure function is in test_policy_loss.py.
"""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import RunFailed
from composer_core.loss import policy as objectives
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


# -- a KL, in the loss or in the reward --------------------------------------------------------------------------------

REF = torch.tensor([0.0, -1.0 - math.log(2), 0.0, -2.0])  # d = ln 2 and 0


@pytest.mark.parametrize(
    ("settings", "value", "slope"),
    [
        # on policy r = 1, with the gradient of log pi: both the estimator's slope and its value come through
        ({"kl_estimator": "k3"}, math.log(2) - 0.5, 0.5 + (math.log(2) - 0.5)),
        ({"kl_estimator": "k3", "kl_corrected": False}, math.log(2) - 0.5, 0.5),
        ({"kl_estimator": "k2", "kl_corrected": False}, math.log(2) ** 2 / 2, math.log(2)),
        ({"kl_estimator": "k3-straight-through", "kl_corrected": False}, math.log(2) - 0.5, math.log(2)),
    ],
)
def test_a_kl_in_the_loss_is_added_per_token_and_logged(settings, value, slope):
    batch = _batch(ref=REF, advantages=(0.0,) * 4)
    view = _view(batch)
    term = _objective("grpo", kl_coef=0.5, **settings).loss(view, batch)
    assert term.sum.item() == pytest.approx(0.5 * value)
    assert view.coefficients(term.sum)[0].tolist() == pytest.approx([0.0, 0.5 * slope, 0.0, 0.0])
    assert term.metrics["kl"].item() / batch.counts["sequences"] == pytest.approx(value / 2)  # of two tokens


def test_k1_stands_in_the_reward_and_nowhere_in_the_loss():
    objective = _objective("grpo", kl_coef=0.5, kl_estimator="k1", scale_rewards="none")
    rewards, group, lengths = torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), torch.tensor([3.0, 3.0])
    # 1 - 0.5 x 0.4 and 1 - 0.5 x -0.2: the mean is 0.95
    advantages = objective.advantages(rewards, group, lengths, torch.tensor([0.4, -0.2]))
    assert advantages.tolist() == pytest.approx([-0.15, 0.15])
    batch = _batch(ref=REF, advantages=(0.0,) * 4)
    view = _view(batch)
    term = objective.loss(view, batch)
    assert term.sum.item() == 0
    assert not view.coefficients(term.sum)[0].any()
    assert term.metrics["kl"].item() / batch.counts["sequences"] == pytest.approx(math.log(2) / 2)


def test_k1_without_a_kl_from_the_backend_is_refused():
    objective = _objective("composer2")
    with pytest.raises(RunFailed, match=r"^objective 'composer2' has kl_coef 0.001, but no reference log-probs came"):
        objective.advantages(torch.zeros(2), torch.zeros(2), torch.ones(2), None)


# -- penalties on length -----------------------------------------------------------------------------------------------


def test_penalties_enter_the_reward_before_the_comparison():
    settings = {
        "overlong": {"limit": 100, "cache": 20, "weight": 2.0},
        "length_penalty": {"weight": 0.1, "k": 1.0, "q": 0.0, "per": 10},
        "scale_rewards": "none",
    }
    objective = _objective("grpo", **settings)
    advantages = objective.advantages(torch.zeros(2), torch.zeros(2), torch.tensor([90.0, 10.0]), None)
    # 90 tokens: -2 x 10 / 20 - 0.1 x 9 = -1.9; 10 tokens: -0.1. Mean -1.0
    assert advantages.tolist() == pytest.approx([-0.9, 0.9])


def test_composer2_prefers_the_shorter_of_two_equally_good_answers():
    objective = _objective("composer2")
    rewards, group = torch.tensor([1.0, 1.0]), torch.tensor([0, 0])
    longer, shorter = objective.advantages(rewards, group, torch.tensor([3000.0, 1000.0]), torch.zeros(2)).tolist()
    # 0.05 x ((1 + 3)^0.5 - 1) / 0.5 = 0.1 and 0.05 x (2^0.5 - 1) / 0.5 = 0.0414
    assert shorter - longer == pytest.approx(0.1 - 0.05 * (math.sqrt(2) - 1) / 0.5)


# -- corrections for the sampler ---------------------------------------------------------------------------------------


def _sampled(sampler, **kwargs):
    batch = _batch(**kwargs)
    return replace(batch, rollouts=replace(batch.rollouts, sampler_logps=torch.tensor(sampler)))


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"rule": "truncate", "high": 2.0}, [2.0, 0.5]),
        ({"rule": "mask", "low": 0.6, "high": 5.0}, [4.0, 0.0]),
        ({"level": "sequence", "rule": "truncate", "high": 3.0}, [3.0, 0.5]),
    ],
)
def test_a_correction_weighs_the_policy_term_by_trainer_over_sampler(correction, weights):
    # trainer over sampler: 4 and 1/2, one action per sequence
    batch = _sampled([NAN, -1.0 - math.log(4), NAN, -2.0 + math.log(2)])
    view = _view(batch)
    term = _objective("grpo", rollout_correction=correction).loss(view, batch)
    assert view.coefficients(term.sum)[0].tolist() == pytest.approx([0.0, -weights[0], 0.0, weights[1]])


def test_the_off_policy_mask_leaves_out_bad_sequences_that_drifted():
    batch = _sampled([NAN, -1.0, NAN, -1.0])  # the second fell by 1 since it was sampled, and is bad
    view = _view(batch)
    term = _objective("grpo", off_policy_threshold=0.9).loss(view, batch)
    assert view.coefficients(term.sum)[0].tolist() == [0.0, -1.0, 0.0, 0.0]


def test_a_correction_without_sampler_log_probs_is_refused():
    batch = _batch()
    with pytest.raises(RunFailed) as caught:
        _objective("grpo", rollout_correction={}).loss(_view(batch), batch)
    assert str(caught.value) == (
        "objective 'grpo' corrects for the sampler, but no sampler log-probs came\n"
        "  fix: leave out rollout_correction and off_policy_threshold, or use a backend that keeps the log-probs of "
        "its inference engine"
    )
