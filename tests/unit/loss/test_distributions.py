"""An infinite KL is made finite, and whoever asked for it is told; the formulas are tested in test_divergence.py."""

import warnings

import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate
from composer_core.loss.divergence import divergence
from composer_core.loss.from_logits import divergence_from_logits
from composer_core.loss.fused import fused_linear_divergence

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
INF = float("inf")
SAID = (
    "the {} of some token is infinite: one side gives no mass at all (a logit of -inf) to an entry that the other "
    "allows; it is counted with a log-probability of -100"
)


def _fused(student, teacher, spec):
    # a head of ones on states of zeros: the biases are the logits
    states, head = torch.zeros(len(student), 2), torch.ones(student.shape[1], 2)
    sides = (states, head, states, head)
    return [
        fused_linear_divergence(*(side[:1] if side is states else side for side in sides), spec, **biases)[1]
        for biases in ({"student_bias": q, "teacher_bias": p} for q, p in zip(student, teacher, strict=True))
    ]


WAYS = {"dense": divergence, "from_logits": divergence_from_logits, "fused": _fused}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def _logits(excluded):
    """Two tokens of three entries, of which the second has entry 1 excluded on some side."""
    student, teacher = torch.tensor([[0.0, 1.0, 2.0]] * 2), torch.tensor([[1.0, 0.0, 1.0]] * 2)
    if "student" in excluded:
        student[1, 1] = -INF
    if "teacher" in excluded:
        teacher[1, 1] = -INF
    return student, teacher


@ways
@pytest.mark.parametrize(
    ("spec", "excluded"),
    [
        (Divergence(TEACHER_STUDENT), "student"),
        (Divergence(STUDENT_TEACHER), "teacher"),
        (Divergence(STUDENT_TEACHER, gate=SoftGate()), "student"),
        (Divergence(STUDENT_TEACHER, gate=PaperGate()), "student"),
    ],
    ids=["forward", "reverse", "soft", "paper"],
)
def test_an_infinite_kl_is_told(way, spec, excluded):
    with pytest.warns(UserWarning, match="is infinite") as told:
        way(*_logits(excluded), spec)
    assert {str(warning.message) for warning in told} == {SAID.format(spec.kind)}


@ways
@pytest.mark.parametrize(
    ("spec", "excluded"),
    [
        (Divergence(TEACHER_STUDENT), "student and teacher"),
        (Divergence(STUDENT_TEACHER), "student and teacher"),
        (Divergence(TEACHER_STUDENT), "teacher"),
        (Divergence(STUDENT_TEACHER), "student"),
        (Divergence(JSD), "student"),
        (Divergence(JSD), "teacher"),
        (Divergence(STUDENT_TEACHER), "nobody"),
    ],
)
def test_what_is_finite_by_itself_is_not(way, spec, excluded):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way(*_logits(excluded), spec)
