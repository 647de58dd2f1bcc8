"""`policy_loss` as a pure function: gradients, invariances, half precision, refused shapes.

The formulas by hand are in test_clip.py and test_kl.py, their official vectors in tests/unit/test_golden.py.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.clip import RULES, ppo
from composer_core.loss.policy import KlTerm, PolicyObjective, _tokens, policy_loss
from composer_core.loss.presets import PRESETS
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Aggregation
from composer_core.testing.accumulate import take

NAN = math.nan
LENGTHS = (3, 1, 4)


def _rollouts(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    seqs = Seqs.from_lists([[7] * (1 + n) for n in LENGTHS])

    def noise():
        return -2 * torch.rand(seqs.ids.shape, generator=generator, dtype=dtype)

    rollouts = Rollouts(
        seqs=seqs, action=~seqs.first, advantages=torch.tensor([1.0, -0.5, -2.0], dtype=dtype)[seqs.owner],
        old_logps=noise(), ref_logps=noise(),
    )  # fmt: skip
    return noise(), rollouts


# dppo's mask reads the log-probs themselves and gspo-token's ratio is a stop-gradient's value: both by hand elsewhere
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("dppo", "gspo-token")])
def test_gradients_are_those_of_finite_differences(preset):
    logps, rollouts = _rollouts()
    ratio, how = PRESETS[preset].ratio, PRESETS[preset].aggregation
    rule = RULES[PRESETS[preset].clip](OBJECTIVE_SETTINGS[preset]())
    held = _tokens(logps, rollouts, level=ratio)

    def still(tokens):
        # what stands under a stop-gradient must stand still for the differences too
        return rule(replace(tokens, level=held.level, log_ratio=held.log_ratio))

    used = still if PRESETS[preset].clip in ("cispo", "vespo") else rule

    def loss(x):
        return policy_loss(x, rollouts, rule=used, aggregation=how, ratio=ratio, kl=KlTerm(0.1, corrected=False))[0]

    assert torch.autograd.gradcheck(loss, logps.clone().requires_grad_())


def test_gspo_token_has_gspos_value_and_for_one_advantage_per_sequence_its_gradient():
    logps, rollouts = _rollouts()
    found = []
    for ratio in ("sequence", "sequence-token"):
        leaf = logps.clone().requires_grad_()
        rule = partial(ppo, epsilon=0.5)
        total, _ = policy_loss(leaf, rollouts, rule=rule, aggregation=Aggregation.SEQUENCE_MEAN, ratio=ratio)
        total.backward()
        found.append((total.item(), leaf.grad))
    assert found[0][0] == pytest.approx(found[1][0])
    assert torch.allclose(found[0][1], found[1][1])
    assert found[0][1].any()


@given(st.permutations(range(3)), st.integers(0, 4))
@settings(max_examples=20, deadline=None)
def test_neither_the_order_of_sequences_nor_masked_tokens_matter(order, padding):
    logps, rollouts = _rollouts()
    rule = partial(ppo, epsilon=0.2)
    expected, _ = policy_loss(logps, rollouts, rule=rule, aggregation=Aggregation.SEQUENCE_MEAN)
    shuffled = take(rollouts, order)
    bounds = rollouts.seqs.cu.tolist()
    moved = logps[torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])]
    # masked tokens behind the last sequence's own
    nan = torch.full((padding,), NAN, dtype=logps.dtype)
    cu = shuffled.seqs.cu.clone()
    cu[-1] += padding
    padded = Rollouts(
        seqs=Seqs(ids=torch.cat([shuffled.seqs.ids, torch.zeros(padding, dtype=torch.int64)]), cu=cu),
        action=torch.cat([shuffled.action, torch.zeros(padding, dtype=torch.bool)]),
        advantages=torch.cat([shuffled.advantages, nan]),
        old_logps=torch.cat([shuffled.old_logps, nan]),
    )
    leaf = torch.cat([moved, nan]).requires_grad_()
    total, _ = policy_loss(leaf, padded, rule=rule, aggregation=Aggregation.SEQUENCE_MEAN)
    total.backward()
    assert total.item() == pytest.approx(expected.item())
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[len(moved) :].any()


@pytest.mark.parametrize("preset", PRESETS)
def test_half_precision_log_probs_are_computed_in_single(preset):
    logps, rollouts = _rollouts(torch.float32)
    rule, how = RULES[PRESETS[preset].clip](OBJECTIVE_SETTINGS[preset]()), PRESETS[preset].aggregation
    rounded = logps.bfloat16()
    exact, _ = policy_loss(rounded.double(), rollouts, rule=rule, aggregation=how)
    total, _ = policy_loss(rounded, rollouts, rule=rule, aggregation=how)
    assert total.dtype is torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-5)


def test_shapes_that_would_broadcast_are_refused():
    logps, rollouts = _rollouts()
    rule, how = partial(ppo, epsilon=0.2), Aggregation.TOKEN_MEAN
    with pytest.raises(ValueError) as caught:
        policy_loss(logps[:1], rollouts, rule=rule, aggregation=how)
    assert str(caught.value) == (
        "ids (11,), logps (1,), action (11,), advantages (11,), old_logps (11,), ref_logps (11,): "
        "the shapes must be equal (one entry per token)"
    )
    with pytest.raises(ValueError, match=r"^rollouts.advantages is None: a policy loss needs them, \(N,\)$"):
        policy_loss(logps, replace(rollouts, advantages=None), rule=rule, aggregation=how)
    with pytest.raises(ValueError, match=r"^rollouts.ref_logps is None: a KL to the reference needs them, \(N,\)$"):
        policy_loss(logps, replace(rollouts, ref_logps=None), rule=rule, aggregation=how, kl=KlTerm(0.1))


@pytest.mark.parametrize("splits", [[[0], [1], [2]], [[2, 0], [1]]], ids=["one-each", "unequal"])
def test_weights_of_a_sequence_do_not_depend_on_the_split(splits):
    logps, rollouts = _rollouts()
    rollouts = replace(rollouts, sampler_logps=logps - 0.3)
    correction = {"level": "sequence", "high": 3.0}
    numbers = OBJECTIVE_SETTINGS["dapo"](rollout_correction=correction, off_policy_threshold=0.2, kl_coef=0.1)
    objective = PolicyObjective(PRESETS["dapo"], numbers)
    bounds = rollouts.seqs.cu.tolist()
    counts = {"tokens": float(sum(LENGTHS))}

    def gradient(parts):
        total = torch.zeros_like(logps)
        for part in parts:
            places = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in part])
            batch = Batch(rollouts=take(rollouts, part), counts=counts)
            view = LeafView([KnownLogps(batch.rollouts.seqs, logps[places])], temperature=1.0)
            total[places] += view.coefficients(objective.loss(view, batch).sum)[0]
        return total

    whole = gradient([[0, 1, 2]])
    assert whole.any()
    assert torch.allclose(gradient(splits), whole)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"coef": -0.1}, "coef must be >= 0, got -0.1"),
        ({"coef": 0.1, "estimator": "k4"}, "estimator must be one of k1, k2, k3, k3-straight-through, got 'k4'"),
    ],
    ids=["coef", "estimator"],
)
def test_a_kl_that_means_nothing_is_refused(arguments, said):
    with pytest.raises(ValueError) as caught:
        KlTerm(**arguments)
    assert str(caught.value) == said
