"""Gradients of every public loss that has no test of its own against finite differences, in float64.

What a loss holds still (targets, importance ratios) is held still for the differences too. Divergences, fused losses,
log-probs, policy objectives and preference forms are checked beside their formulas.
"""

import math

import pytest
import torch
from torch.autograd import gradcheck

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.compat import entropy_aware_opd_loss, generalized_jsd_loss, sampled_opd_loss
from composer_core.loss.distributions import sampled_kl
from composer_core.loss.divergence import divergence
from composer_core.loss.from_logits import divergence_from_logits
from composer_core.loss.kl import k1, k2, k3
from composer_core.loss.lm_ce import smoothed_cross_entropy
from composer_core.loss.preference import dpo_loss, simpo_loss
from composer_core.loss.targets import taid_loss, taid_target

B, T, V = 2, 3, 5
LABELS = torch.tensor([[0, 4, -100], [-100, -100, 2]])


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER = _normal(B, T, V), _normal(B, T, V, seed=1)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 2}, {"top_k": 2, "tail": True}, {"token_clip": 0.2}, {"temperature": 1.7, "num_items": 3.0}],
    ids=["plain", "top-k", "tail", "clip", "temperature"],
)
def test_generalized_jsd(beta, options, reduction):
    def loss(student):
        return generalized_jsd_loss(student, TEACHER, LABELS, beta=beta, reduction=reduction, **options)

    assert gradcheck(loss, STUDENT.clone().requires_grad_())


def test_generalized_jsd_of_probabilities():
    student, teacher = STUDENT.softmax(-1), TEACHER.softmax(-1)
    assert gradcheck(
        lambda q: generalized_jsd_loss(q, teacher, LABELS, logits_are_probs=True), student.clone().requires_grad_()
    )


@pytest.mark.parametrize("h_max", [None, 1.2])
def test_entropy_aware_opd(h_max):
    mask = (LABELS != -100).long()
    assert gradcheck(
        lambda student: entropy_aware_opd_loss(student, TEACHER, labels=mask, h_max=h_max, temperature=1.3),
        STUDENT.clone().requires_grad_(),
    )


def test_sampled_opd_with_its_gap_held():
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    log_q, log_p = (x.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for x in (STUDENT, TEACHER))
    gap = log_q - log_p
    student = STUDENT.clone().requires_grad_()
    (found,) = torch.autograd.grad(sampled_opd_loss(student, TEACHER, ids, reduction="sum"), student)
    held = STUDENT.clone().requires_grad_()
    (expected,) = torch.autograd.grad((gap * held.log_softmax(-1).gather(-1, ids[..., None])[..., 0]).sum(), held)
    assert torch.allclose(found, expected, rtol=1e-12)
    with_gate = STUDENT.clone().requires_grad_()
    loss = sampled_opd_loss(with_gate, TEACHER, ids, gate=PaperGate(tau=0.1, k=2), reduction="sum")
    added = loss - sampled_opd_loss(with_gate, TEACHER, ids, reduction="sum")
    (slope,) = torch.autograd.grad(added, with_gate)
    assert torch.allclose(slope, _differences(lambda s: _gate_term(s), STUDENT), rtol=1e-6, atol=1e-9)


def _gate_term(student):
    log_q, p = student.log_softmax(-1), TEACHER.softmax(-1)
    top = p.topk(2, -1).indices
    return (p * (p.log() - log_q)).gather(-1, top).sum()  # every teacher's entropy is above 0.1


@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_taid_with_its_target_held(t):
    target = taid_target(STUDENT, TEACHER, t=t).softmax(-1)

    def held(student):
        return -(target * student.log_softmax(-1)).sum(-1)[LABELS != -100].mean()

    student = STUDENT.clone().requires_grad_()
    (found,) = torch.autograd.grad(taid_loss(student, TEACHER, LABELS != -100, t=t), student)
    assert torch.allclose(found, _differences(held, STUDENT), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        Divergence(DivergenceKind.KL_STUDENT_TEACHER, gate=SoftGate()),
        Divergence(DivergenceKind.KL_TEACHER_STUDENT, temperature=1.4, clip=0.3),
        Divergence(support=Support.TOPK_UNION, k=2),
    ],
    ids=["soft", "clip", "union"],
)
@pytest.mark.parametrize("form", [divergence, divergence_from_logits], ids=["dense", "from-logits"])
def test_divergences_from_logits(spec, form):
    student, teacher = STUDENT.reshape(-1, V), TEACHER.reshape(-1, V)
    assert gradcheck(lambda s: form(s, teacher, spec), student.clone().requires_grad_())


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_smoothed_cross_entropy(smoothing):
    ids = torch.tensor([0, 4, 2])
    assert gradcheck(
        lambda logits: smoothed_cross_entropy(logits, ids, label_smoothing=smoothing), _normal(3, V).requires_grad_()
    )


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_kl_estimators(estimator):
    reference = _normal(4, seed=1)
    assert gradcheck(lambda logps: estimator(logps, reference), _normal(4).requires_grad_())


def test_the_sampled_kls_gradient_is_its_gap():
    log_q, log_p = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -0.5], dtype=torch.float64)
    leaf = log_q.clone().requires_grad_()
    sampled_kl(leaf, log_p).sum().backward()
    assert leaf.grad.tolist() == [0.5, -1.5]


@pytest.mark.parametrize("loss", [simpo_loss, dpo_loss])
def test_preference_fronts(loss):
    assert gradcheck(loss, (_normal(3).requires_grad_(), _normal(3, seed=1).requires_grad_()))


def _differences(loss, at, *, step=1e-6):
    """Central differences of a scalar by each entry."""
    flat = at.flatten()
    slopes = []
    for index in range(len(flat)):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[index] += sign * step
            ends.append(loss(moved.reshape(at.shape)).item())
        slopes.append((ends[0] - ends[1]) / (2 * step))
    result = torch.tensor(slopes, dtype=at.dtype).reshape(at.shape)
    assert math.isfinite(result.sum())
    return result
