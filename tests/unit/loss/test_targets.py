"""TAID and trust-region targets, gates by the teacher's entropy, EMA: values by hand, ends to the last bit."""

import math

import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.targets import (
    ema_update,
    soft_weight,
    taid_loss,
    taid_target,
    teacher_entropy,
    trust_region_target,
)

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
BASES = [
    Divergence(TEACHER_STUDENT),
    Divergence(STUDENT_TEACHER, temperature=1.7),
    Divergence(JSD, 0.3),
    Divergence(JSD, support=Support.TOPK_UNION, k=2),
    Divergence(STUDENT_TEACHER, gate=SoftGate()),
    Divergence(STUDENT_TEACHER, gate=PaperGate(tau=0.5, k=2)),
]
IDS = ["teacher-student", "student-teacher", "jsd", "union", "soft-gate", "paper-gate"]
every_base = pytest.mark.parametrize("base", BASES, ids=IDS)


def _with_taid(spec, t):
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return Divergence(**fields | {"taid": t})


def _value_and_gradient(student, teacher, spec):
    student = student.clone().requires_grad_()
    value = divergence(student, teacher, spec)
    value.sum().backward()
    return value.detach(), student.grad


@pytest.fixture
def logits():
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).unbind()


@every_base
def test_at_t_zero_value_and_gradient_are_exactly_zero(base, logits):
    value, gradient = _value_and_gradient(*logits, _with_taid(base, 0.0))
    assert torch.equal(value, torch.zeros(3))
    assert torch.equal(gradient, torch.zeros(3, 6))


@every_base
def test_at_t_one_it_is_the_base_divergence_to_the_last_bit(base, logits):
    for ours, plain in zip(
        _value_and_gradient(*logits, _with_taid(base, 1.0)), _value_and_gradient(*logits, base), strict=True
    ):
        assert torch.equal(ours, plain)


def test_the_target_in_between_is_the_divergence_to_the_mixed_logits(logits):
    student, teacher = logits
    mixed = 0.6 * student + 0.4 * teacher
    for base in BASES[:4]:
        ours = _value_and_gradient(student, teacher, _with_taid(base, 0.4))
        for got, expected in zip(ours, _value_and_gradient(student, mixed, base), strict=True):
            torch.testing.assert_close(got, expected)


def test_excluded_entries_stay_excluded_in_every_mixture():
    student, teacher = torch.tensor([0.0, -math.inf, 1.0]), torch.tensor([2.0, -math.inf, -math.inf])
    for t, expected in [(0.0, student), (1.0, teacher), (0.5, torch.tensor([1.0, -math.inf, -math.inf]))]:
        assert torch.equal(taid_target(student, teacher, t=t), expected)


def test_trust_region_moves_a_twentieth_from_the_reference_towards_the_student():
    got = trust_region_target(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(got, torch.tensor([0.95, 0.1]))


def test_taid_loss_is_the_cross_entropy_over_the_mask():
    # student uniform over two, teacher (3/4, 1/4): at t = 1 the cross-entropy is ln 2 whatever the teacher
    student = torch.zeros(1, 2, 2, requires_grad=True)
    teacher = torch.tensor([[[math.log(3), 0.0], [math.nan, math.nan]]])
    loss = taid_loss(student, teacher, torch.tensor([[1, 0]]), t=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(student.grad, torch.tensor([[[0.5 - 0.75, 0.5 - 0.25], [0.0, 0.0]]]))


def test_taid_loss_at_t_zero_is_the_students_entropy_with_no_gradient(logits):
    student, teacher = logits[0].clone().requires_grad_(), logits[1]
    loss = taid_loss(student, teacher, t=torch.tensor(0.0))
    loss.backward()
    assert loss.item() == pytest.approx(teacher_entropy(student).mean().item())
    assert student.grad.abs().max() <= 1e-7


def test_taid_loss_without_a_token_is_zero_joined_to_the_graph(logits):
    student = logits[0].clone().requires_grad_()
    loss = taid_loss(student, logits[1], torch.zeros(3), t=0.4)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_entropy_of_a_uniform_teacher_is_log_v_and_of_a_certain_one_zero():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]], requires_grad=True)
    h = teacher_entropy(logits)
    torch.testing.assert_close(h, torch.tensor([math.log(4), 0.0]))
    assert not h.requires_grad


@pytest.mark.parametrize(
    ("h_max", "vocab", "expected"),
    [(None, 4, [0.0, 0.5, 1.0]), (0.5, 4, [0.0, 1.0, 1.0]), (None, 1, [0.0, 0.0, 0.0])],
    ids=["log-v", "given", "one-entry"],
)
def test_the_soft_weight_rises_with_the_entropy_to_one(h_max, vocab, expected):
    h = torch.tensor([0.0, math.log(2), math.log(4)])
    torch.testing.assert_close(soft_weight(h, SoftGate(h_max), vocab=vocab), torch.tensor(expected))


def test_the_soft_gate_mixes_the_two_directions_by_the_teachers_entropy(logits):
    student, teacher = logits
    share = soft_weight(teacher_entropy(teacher), SoftGate(), vocab=6)
    forward, reverse = (divergence(student, teacher, Divergence(kind)) for kind in (TEACHER_STUDENT, STUDENT_TEACHER))
    torch.testing.assert_close(divergence(student, teacher, BASES[4]), share * forward + (1 - share) * reverse)


def test_the_gate_looks_at_the_teacher_itself_also_under_taid():
    # the teacher is certain, the mixture is not: the gate stays shut
    student, teacher = torch.zeros(1, 3), torch.tensor([[4.0, 0.0, 0.0]])
    closed = Divergence(STUDENT_TEACHER, taid=0.1, gate=PaperGate(tau=0.9, k=2))
    assert teacher_entropy(teacher) < 0.9 < teacher_entropy(taid_target(student, teacher, t=0.1))
    assert torch.equal(
        divergence(student, teacher, closed), divergence(student, teacher, Divergence(STUDENT_TEACHER, taid=0.1))
    )


@pytest.mark.parametrize(("tau", "opened"), [(0.5, True), (0.6, False)], ids=["unsure", "sure"])
def test_the_papers_gate_adds_the_teachers_top_k_terms_above_its_threshold(tau, opened):
    # p = (3/4, 1/4) with entropy 0.5623, q = (1/2, 1/2); the likeliest entry's term is 3/4 ln(3/2)
    student, teacher = torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]])
    base = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    spec = Divergence(STUDENT_TEACHER, gate=PaperGate(tau=tau, alpha=2.0, k=1))
    expected = base + (2 * 0.75 * math.log(1.5) if opened else 0)
    assert divergence(student, teacher, spec).item() == pytest.approx(expected, rel=1e-5)


def test_ema_moves_the_teacher_in_place_by_the_rate():
    teacher, student = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0], requires_grad=True)
    ema_update([teacher], [student], rate=0.05)
    torch.testing.assert_close(teacher, torch.tensor([0.95, 0.1]))
    assert not teacher.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: taid_target(torch.zeros(2, 3), torch.zeros(2, 4), t=0.5),
            "teacher_logits (2, 4) must have the shape of student_logits, (2, 3)",
        ),
        (lambda: taid_target(torch.zeros(3), torch.zeros(3), t=1.5), "t must be in [0, 1], got 1.5"),
        (
            lambda: taid_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), t=0.5),
            "mask (3,) must have the shape of student_logits without the vocabulary, (2,)",
        ),
        (
            lambda: taid_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([5, -100]), t=0.5),
            "mask must be a mask of 0 and 1; from Hugging Face labels it is `labels != -100`",
        ),
        (lambda: trust_region_target(torch.zeros(3), torch.zeros(3), mix=-1), "mix must be in [0, 1], got -1"),
        (lambda: ema_update([], [torch.zeros(1)], rate=0.1), "teacher_params holds 0 tensors, student_params 1"),
        (
            lambda: ema_update([torch.zeros(2)], [torch.zeros(3)], rate=0.1),
            "teacher_params[0] (2,) must have the shape of student_params[0], (3,)",
        ),
        (lambda: ema_update([], [], rate=2.0), "rate must be in [0, 1], got 2.0"),
    ],
)
def test_wrong_shapes_and_numbers_are_refused_by_name(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message
