"""Token weights on numbers worked by hand. Sequences (prompt, a, b) and (prompt, c)."""

import math

import pytest
import torch

from composer_core.batch import Seqs
from composer_core.loss.corrections import mask_outside, off_policy_mask, sampler_ratio, top_entropy_mask, truncate

NAN = math.nan
SEQS = Seqs.from_lists([[5, 6, 7], [5, 8]])
ACTION = torch.tensor([False, True, True, False, True])
OLD = torch.tensor([NAN, -1.0, -2.0, NAN, -1.0])
# ratios 2 and 1/4 in the first sequence, 8 in the second
SAMPLER = torch.tensor([NAN, -1.0 - math.log(2), -2.0 + math.log(4), NAN, -1.0 - math.log(8)])


def test_token_ratios_are_those_of_each_token():
    ratio = sampler_ratio(OLD, SAMPLER, ACTION, SEQS, level="token")
    assert ratio.tolist() == pytest.approx([0.0, 2.0, 0.25, 0.0, 8.0])


def test_sequence_ratios_are_products_at_all_of_its_actions():
    ratio = sampler_ratio(OLD, SAMPLER, ACTION, SEQS, level="sequence")
    assert ratio.tolist() == pytest.approx([0.0, 0.5, 0.5, 0.0, 8.0])


def test_a_ratio_carries_no_gradient_and_never_overflows():
    old = torch.tensor([0.0, 400.0, 400.0, 0.0, -400.0], requires_grad=True)
    for level in ("token", "sequence"):
        ratio = sampler_ratio(old, torch.zeros(5), ACTION, SEQS, level=level)
        assert ratio.isfinite().all()
        assert not ratio.requires_grad


def test_truncation_caps_from_above_and_the_mask_drops_both_ends():
    ratio = torch.tensor([0.0, 2.0, 0.25, 0.0, 8.0])
    assert truncate(ratio, high=2.0).tolist() == [0.0, 2.0, 0.25, 0.0, 2.0]
    assert mask_outside(ratio, low=0.5, high=2.0).tolist() == [0.0, 2.0, 0.0, 0.0, 0.0]


def test_the_off_policy_mask_drops_bad_sequences_the_policy_would_hardly_say_any_more():
    # sampler minus policy: mean (0.6 + 0.2) / 2 = 0.4 in the first sequence, 0.9 in the second
    logps, sampler = torch.tensor([NAN, -1.6, -1.2, NAN, -1.9]), torch.tensor([NAN, -1.0, -1.0, NAN, -1.0])
    bad, good = torch.full((5,), -1.0), torch.full((5,), 1.0)
    kept = off_policy_mask(bad, logps, sampler, ACTION, SEQS, threshold=0.5)
    assert kept[ACTION].tolist() == [True, True, False]
    assert off_policy_mask(bad, logps, sampler, ACTION, SEQS, threshold=0.3)[ACTION].tolist() == [False, False, False]
    assert off_policy_mask(good, logps, sampler, ACTION, SEQS, threshold=0.3)[ACTION].all()


def test_the_entropy_mask_keeps_the_share_the_policy_is_least_sure_of():
    entropies = torch.tensor([NAN, 0.1, 0.9, NAN, 0.5])
    assert top_entropy_mask(entropies, ACTION, share=0.34).tolist() == [False, False, True, False, False]
    assert top_entropy_mask(entropies, ACTION, share=1.0).tolist() == ACTION.tolist()
    assert not top_entropy_mask(entropies, torch.zeros_like(ACTION), share=0.2).any()


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^share must be in \(0, 1\], got 0$"):
        top_entropy_mask(torch.zeros(5), ACTION, share=0)


def test_tensors_of_another_number_of_tokens_are_refused():
    with pytest.raises(ValueError) as caught:
        sampler_ratio(OLD, SAMPLER[:1], ACTION, SEQS, level="token")
    assert str(caught.value) == (
        "old_logps (5,), sampler_logps (1,), mask (5,): the shapes must be equal (one entry per token)"
    )


def test_bounds_that_would_drop_every_token_are_refused():
    with pytest.raises(ValueError, match=r"^high must be > 0, got 0.0: no token would count$"):
        truncate(torch.ones(2), high=0.0)
    with pytest.raises(ValueError, match=r"^low must be below high, got 2.0 and 0.5: no token would count$"):
        mask_outside(torch.ones(2), low=2.0, high=0.5)
