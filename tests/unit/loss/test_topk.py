"""Top-k supports by hand on five-entry vocabularies, and against the full form they shrink from."""

import math

import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.topk import truncated_kl

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
TOPK = [Support.TOPK_TEACHER, Support.TOPK_STUDENT, Support.TOPK_UNION]
every_kind = pytest.mark.parametrize("kind", list(DivergenceKind))
every_topk = pytest.mark.parametrize("support", TOPK)
both_tails = pytest.mark.parametrize("tail", [True, False], ids=["tail", "renormalised"])

Q = (0.5, 0.2, 0.1, 0.15, 0.05)
P = (0.1, 0.3, 0.4, 0.15, 0.05)


def _logits(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def _kl(a, b):
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def _value(spec):
    return divergence(_logits(*Q), _logits(*P), spec).item()


# teacher's two likeliest are entries 1 and 2, the student's 0 and 1, so the union is 0, 1 and 2
@pytest.mark.parametrize(
    ("support", "q", "p"),
    [
        (Support.TOPK_TEACHER, (0.2, 0.1, 0.7), (0.3, 0.4, 0.3)),
        (Support.TOPK_STUDENT, (0.5, 0.2, 0.3), (0.1, 0.3, 0.6)),
        (Support.TOPK_UNION, (0.5, 0.2, 0.1, 0.2), (0.1, 0.3, 0.4, 0.2)),
    ],
)
def test_the_tail_is_one_more_entry_with_the_mass_of_all_others(support, q, p):
    assert _value(Divergence(TEACHER_STUDENT, support=support, k=2)) == pytest.approx(_kl(p, q), rel=1e-12)
    assert _value(Divergence(STUDENT_TEACHER, support=support, k=2)) == pytest.approx(_kl(q, p), rel=1e-12)


@pytest.mark.parametrize(
    ("support", "q", "p"),
    [
        (Support.TOPK_TEACHER, (2 / 3, 1 / 3), (3 / 7, 4 / 7)),
        (Support.TOPK_STUDENT, (5 / 7, 2 / 7), (1 / 4, 3 / 4)),
        (Support.TOPK_UNION, (5 / 8, 2 / 8, 1 / 8), (1 / 8, 3 / 8, 4 / 8)),
    ],
)
def test_without_the_tail_both_sides_are_renormalised_over_the_support(support, q, p):
    spec = Divergence(TEACHER_STUDENT, support=support, k=2, tail=False)
    assert _value(spec) == pytest.approx(_kl(p, q), rel=1e-12)


@every_kind
@every_topk
@both_tails
def test_from_the_vocabularys_size_on_it_is_the_full_form_to_the_last_bit(kind, support, tail):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, generator=generator)
    for k in (5, 6, 1000):
        spec = Divergence(kind, support=support, k=k, tail=tail)
        assert torch.equal(divergence(student, teacher, spec), divergence(student, teacher, Divergence(kind)))


@every_kind
@every_topk
@both_tails
def test_identical_distributions_have_no_divergence_and_no_gradient(kind, support, tail):
    teacher = torch.randn(4, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    student = teacher.clone().requires_grad_()
    value = divergence(student, teacher, Divergence(kind, support=support, k=7, tail=tail))
    value.sum().backward()
    assert value.abs().max() <= 1e-12
    assert student.grad.abs().max() <= 1e-12


@every_kind
@every_topk
def test_the_tail_never_makes_the_divergence_larger_than_the_full_one(kind, support):
    # merging entries cannot tell two distributions further apart
    generator = torch.Generator().manual_seed(2)
    student, teacher = 3 * torch.randn(2, 20, 30, generator=generator, dtype=torch.float64)
    merged = divergence(student, teacher, Divergence(kind, support=support, k=4))
    assert (merged <= divergence(student, teacher, Divergence(kind)) + 1e-12).all()
    assert (merged >= 0).all()


@every_kind
@every_topk
@both_tails
def test_gradients_equal_finite_differences(kind, support, tail):
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    spec = Divergence(kind, 0.3, 1.3, support, 3, tail)
    assert torch.autograd.gradcheck(lambda s: divergence(s, teacher, spec), student.requires_grad_())


def test_a_support_that_holds_all_the_mass_has_a_finite_gradient():
    student = torch.tensor([[40.0, 0.0, -90.0, -90.0]], requires_grad=True)
    value = divergence(
        student, torch.tensor([[0.0, 40.0, -90.0, -90.0]]), Divergence(JSD, support=Support.TOPK_UNION, k=1)
    )
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2), rel=1e-5)
    assert student.grad.isfinite().all()


def test_the_truncated_sum_is_neither_renormalised_nor_completed():
    q, p = _logits(0.5, 0.2), _logits(0.1, 0.3)
    assert truncated_kl(q, p).item() == pytest.approx(0.1 * math.log(0.2) + 0.3 * math.log(1.5), rel=1e-12)
