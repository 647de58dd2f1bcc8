"""Policy objectives and preference forms on what batches hold: poison under the mask, nothing to learn, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_core.batch import Rollouts, Seqs
from composer_core.loss.clip import RULES
from composer_core.loss.kl import ESTIMATORS
from composer_core.loss.policy import KlTerm, policy_loss
from composer_core.loss.preference import FORMS, PairLogps, answer_logps
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS

presets = pytest.mark.parametrize("preset", PRESETS)
kls = st.sampled_from([None, *ESTIMATORS])
poisons = st.sampled_from([math.nan, math.inf, -math.inf, -1e30, 1e30])
flags = st.lists(st.lists(st.booleans(), max_size=4), max_size=4)
"""Per sequence of some length, none included: which tokens count."""


def _masked(sequences):
    seqs = Seqs.from_lists([[7] * len(sequence) for sequence in sequences])
    return seqs, torch.tensor([flag for sequence in sequences for flag in sequence], dtype=torch.bool)


def _policy(preset, seqs, action, tensors, *, kl):
    logps = tensors["logps"].clone().requires_grad_()
    rollouts = Rollouts(
        seqs, action, advantages=tensors["advantages"], old_logps=tensors["old"], ref_logps=tensors["ref"]
    )
    total, sums = policy_loss(
        logps,
        rollouts,
        rule=RULES[PRESETS[preset].clip](OBJECTIVE_SETTINGS[preset]()),
        aggregation=PRESETS[preset].aggregation,
        ratio=PRESETS[preset].ratio,
        kl=None if kl is None else KlTerm(0.1, kl),
    )
    total.backward()
    return total.detach(), logps.grad, sums


@presets
@settings(max_examples=25, deadline=None)
@given(sequences=flags, poison=poisons, kl=kls, seed=st.integers(0, 99))
def test_what_stands_where_no_action_was_taken_reaches_nothing(preset, sequences, poison, kl, seed):
    seqs, action = _masked(sequences)
    generator = torch.Generator().manual_seed(seed)
    clean = {name: torch.rand(len(action), generator=generator) - 1 for name in ("logps", "old", "ref", "advantages")}
    poisoned = {name: torch.where(action, value, poison) for name, value in clean.items()}
    total, slope, sums = _policy(preset, seqs, action, poisoned, kl=kl)
    expected, expected_slope, expected_sums = _policy(preset, seqs, action, clean, kl=kl)
    assert total == expected
    assert torch.equal(slope, expected_slope)
    assert sums == expected_sums
    assert slope.isfinite().all()
    assert not slope[~action].any()


@presets
@pytest.mark.parametrize("estimator", [None, *ESTIMATORS])
def test_log_probs_that_moved_by_ten_thousand_nats_are_finite_in_value_and_gradient(preset, estimator):
    seqs, action = _masked([[False, True, True], [False, True]])
    tensors = {
        "logps": torch.tensor([0.0, -1e4, -1e-4, 0.0, -1e4]),
        "old": torch.tensor([0.0, -1e-4, -1e4, 0.0, -1e-4]),
        "ref": torch.tensor([0.0, -1e-4, -1e4, 0.0, -1e-4]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
    }
    total, slope, sums = _policy(preset, seqs, action, tensors, kl=estimator)
    assert total.isfinite()
    assert slope.isfinite().all()
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(sequences=flags, poison=poisons)
def test_what_stands_outside_an_answer_reaches_no_preference_loss(form, sequences, poison):
    seqs, action = _masked(sequences)
    clean = -torch.rand(len(action), generator=torch.Generator().manual_seed(len(action)))

    def run(values):
        logps = values.clone().requires_grad_()
        sums, tokens = answer_logps(logps, action, seqs)
        reference = -torch.ones_like(sums)
        pairs = PairLogps(sums, 2 * sums, tokens, tokens, reference, reference, drift=torch.tensor(0.1))
        per_pair = FORMS[form](pairs)
        per_pair.sum().backward()
        return per_pair.detach(), logps.grad

    (found, slope), (expected, expected_slope) = run(torch.where(action, clean, poison)), run(clean)
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    assert torch.equal(slope, expected_slope)
    assert slope.isfinite().all()
    assert not slope[~action].any()
