"""The one-call losses: reductions, masks and clips by hand; their official values are among the golden vectors."""

import math
import warnings

import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.compat import entropy_aware_opd_loss, generalized_jsd_loss, sampled_opd_loss
from composer_core.loss.divergence import divergence

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
B, T, V = 2, 3, 5
LABELS = torch.tensor([[-100, 4, 0], [1, -100, -100]])
COUNTED = LABELS != -100


@pytest.fixture
def logits():
    return torch.randn(2, B, T, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def _per_token(logits, spec):
    return divergence(logits[0].flatten(0, 1), logits[1].flatten(0, 1), spec).view(B, T)


@pytest.mark.parametrize(
    ("beta", "spec"),
    [(0, Divergence(TEACHER_STUDENT)), (0.3, Divergence(JSD, 0.3)), (1, Divergence(STUDENT_TEACHER))],
    ids=["teacher-student", "jsd", "student-teacher"],
)
def test_each_reduction_divides_by_what_its_docstring_says(beta, spec, logits):
    per_token = _per_token(logits, spec)
    total, everything = per_token[COUNTED].sum(), per_token.sum()
    expected = {
        "batchmean": (total / 3, everything / B),
        "sum": (total, everything),
        "mean": (total / (3 * V), everything / (B * T * V)),
        "none": (torch.where(COUNTED, per_token, 0), per_token),
    }
    for reduction, (labelled, unlabelled) in expected.items():
        ours = generalized_jsd_loss(*logits, LABELS, beta, reduction=reduction)
        torch.testing.assert_close(ours, labelled, rtol=1e-12, atol=1e-14)
        ours = generalized_jsd_loss(*logits, beta=beta, reduction=reduction)
        torch.testing.assert_close(ours, unlabelled, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(generalized_jsd_loss(*logits, LABELS, beta, num_items=17), total / 17)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
def test_without_a_token_that_counts_the_loss_is_zero_joined_to_the_graph(reduction, logits):
    student = logits[0].clone().requires_grad_()
    for loss in (
        generalized_jsd_loss(student, logits[1], torch.full((B, T), -100), reduction=reduction),
        entropy_aware_opd_loss(student, logits[1], labels=torch.zeros(B, T), reduction=reduction),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert (loss == 0).all()
        assert (gradient == 0).all()


def test_what_a_token_that_does_not_count_holds_reaches_neither_value_nor_gradient(logits):
    student, teacher = (x.clone() for x in logits)
    student[~COUNTED], teacher[~COUNTED] = math.nan, math.inf
    student.requires_grad_()
    clean = logits[0].clone().requires_grad_()
    for loss, expected in (
        (
            generalized_jsd_loss(student, teacher, LABELS, reduction="none"),
            generalized_jsd_loss(clean, logits[1], LABELS, reduction="none"),
        ),
        (
            entropy_aware_opd_loss(student, teacher, labels=COUNTED.long()),
            entropy_aware_opd_loss(clean, logits[1], labels=COUNTED.long()),
        ),
    ):
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), clean)[0])


def test_the_clip_bounds_a_tokens_divergence_after_the_vocabulary_sum(logits):
    per_token = _per_token(logits, Divergence(TEACHER_STUDENT))
    clip = per_token.median().item()
    ours = generalized_jsd_loss(*logits, beta=0, reduction="none", token_clip=clip)
    torch.testing.assert_close(ours, per_token.clamp(max=clip))
    assert (ours >= 0).all()


def test_opsd_compat_caps_single_terms_and_warns_where_that_can_turn_the_gradient_round(logits):
    student = torch.tensor([[[0.0, 0.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[math.log(3), 0.0]]], dtype=torch.float64)
    # terms of KL(teacher || student): 3/4 ln(3/2) = 0.304, capped at 0.1, and 1/4 ln(1/2) = -0.173
    with pytest.warns(UserWarning, match="opsd_compat caps single terms of kl_teacher_student"):
        loss = generalized_jsd_loss(student, teacher, beta=0, token_clip=0.1, opsd_compat=True)
    assert loss.item() == pytest.approx(0.1 + 0.25 * math.log(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generalized_jsd_loss(student, teacher, beta=0.5, token_clip=0.1, opsd_compat=True)
        terms = generalized_jsd_loss(*logits, LABELS, 0.5, reduction="none", opsd_compat=True)
    assert terms.shape == (3, V)


def test_top_k_renormalises_over_the_teachers_entries_unless_asked_otherwise(logits):
    for options, spec in (
        ({}, Divergence(JSD, support=Support.TOPK_TEACHER, k=2, tail=False)),
        ({"support": Support.TOPK_UNION, "tail": True}, Divergence(JSD, support=Support.TOPK_UNION, k=2)),
    ):
        ours = generalized_jsd_loss(*logits, reduction="none", top_k=2, **options)
        torch.testing.assert_close(ours, _per_token(logits, spec), rtol=1e-12, atol=1e-14)


def test_probabilities_give_what_their_logits_give(logits):
    probabilities = [x.softmax(-1) for x in logits]
    ours = generalized_jsd_loss(*probabilities, LABELS, logits_are_probs=True)
    torch.testing.assert_close(ours, generalized_jsd_loss(*logits, LABELS))
    probabilities[1][..., 0] = 0
    assert generalized_jsd_loss(*probabilities, LABELS, 0, logits_are_probs=True).isfinite()


def test_entropy_aware_loss_is_the_soft_gate_over_the_mask(logits):
    per_token = _per_token(logits, Divergence(STUDENT_TEACHER, temperature=1.5, gate=SoftGate(0.9)))
    expected = {"batchmean": per_token[COUNTED].sum() / 3, "mean": per_token[COUNTED].mean()}
    for reduction, value in expected.items():
        ours = entropy_aware_opd_loss(*logits, labels=COUNTED, h_max=0.9, temperature=1.5, reduction=reduction)
        torch.testing.assert_close(ours, value)


def test_the_sampled_losss_gradient_is_that_of_the_kl_estimate_and_its_value_is_not(logits):
    tokens = torch.tensor([[0, 4, 2], [1, 3, 0]])
    student = logits[0].clone().requires_grad_()
    loss = sampled_opd_loss(student, logits[1], tokens, gate=PaperGate(tau=1.0, k=2), reduction="sum")
    spec = Divergence(STUDENT_TEACHER, support=Support.SAMPLED, gate=PaperGate(tau=1.0, k=2))
    estimate = divergence(student.flatten(0, 1), logits[1].flatten(0, 1), spec, sampled_ids=tokens.flatten()).sum()
    (ours,), (expected,) = (torch.autograd.grad(x, student) for x in (loss, estimate))
    torch.testing.assert_close(ours, expected)
    assert abs(loss.item() - estimate.item()) > 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: generalized_jsd_loss(s, s[..., :4]),
            "student_logits (2, 3, 5) and teacher_logits (2, 3, 4) must both be (B, T, V) of one vocabulary",
        ),
        (
            lambda s: generalized_jsd_loss(s, s, torch.zeros(3, 2)),
            "labels (3, 2) must be (B, T) of student_logits, (2, 3)",
        ),
        (
            lambda s: generalized_jsd_loss(s, s, torch.ones(B, T).bool()),
            "labels must be token ids with -100 where a token does not count, got torch.bool",
        ),
        (lambda s: generalized_jsd_loss(s, s, token_clip=0.0), "token_clip must be > 0, got 0.0"),
        (lambda s: generalized_jsd_loss(s, s, num_items=0.0), "num_items must be > 0, got 0.0"),
        (lambda s: generalized_jsd_loss(s, s, beta=1.5), "beta must be in [0, 1], got 1.5"),
        (
            lambda s: generalized_jsd_loss(s, s, reduction="median"),
            "reduction must be one of batchmean, sum, mean, none, got 'median'",
        ),
        (
            lambda s: generalized_jsd_loss(s, s, logits_are_probs=True, top_k=3),
            "temperature and top_k act on logits; with logits_are_probs they must be 1.0 and None",
        ),
        (
            lambda s: entropy_aware_opd_loss(s, s, labels=LABELS),
            "labels must be a mask of 0 and 1; from Hugging Face labels it is `labels != -100`",
        ),
        (
            lambda s: sampled_opd_loss(s, s, torch.full((B, T), 5)),
            "tokens must be in [0, 5), got 5 to 5",
        ),
    ],
    ids=["vocabulary", "labels", "labels-mask", "clip", "items", "beta", "reduction", "probs", "mask", "tokens"],
)
def test_what_does_not_fit_is_refused_by_name_shape_and_rule(call, message):
    with pytest.raises(ValueError) as caught:
        call(torch.zeros(B, T, V))
    assert str(caught.value) == message
