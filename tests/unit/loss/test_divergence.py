"""Against the formulas in numpy float64, written from their definitions; gradients by central differences."""

import math

import numpy as np
import pytest
import torch

from composer_core.loss.divergence import divergence
from composer_core.protocols import Divergence, DivergenceKind

SPECS = [
    Divergence(kind=DivergenceKind.KL_TEACHER_STUDENT),
    Divergence(kind=DivergenceKind.KL_STUDENT_TEACHER),
    Divergence(kind=DivergenceKind.JSD, beta=0.5),
    Divergence(kind=DivergenceKind.JSD, beta=0.1, temperature=1.7),
    Divergence(kind=DivergenceKind.KL_TEACHER_STUDENT, temperature=0.5),
]
IDS = ["teacher-student", "student-teacher", "jsd-half", "jsd-tenth-warm", "teacher-student-cold"]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=IDS)


def _oracle(student, teacher, spec):
    """Per token, in numpy float64, from probabilities; an entry without mass on the left side contributes 0."""
    q, p = (_softmax(logits / spec.temperature) for logits in (student, teacher))
    if spec.kind is DivergenceKind.KL_TEACHER_STUDENT:
        return _kl(p, q)
    if spec.kind is DivergenceKind.KL_STUDENT_TEACHER:
        return _kl(q, p)
    mixture = (1 - spec.beta) * q + spec.beta * p
    return spec.beta * _kl(p, mixture) + (1 - spec.beta) * _kl(q, mixture)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _kl(a, b):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a > 0, a * np.log(a / b), 0.0).sum(-1)


def _central_difference(student, teacher, spec, step=1e-6):
    gradient = np.zeros_like(student)
    for index in np.ndindex(*student.shape):
        up, down = student.copy(), student.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (_oracle(up, teacher, spec).sum() - _oracle(down, teacher, spec).sum()) / (2 * step)
    return gradient


def _ours(student, teacher, spec, dtype=torch.float64):
    s = torch.tensor(student, dtype=dtype, requires_grad=True)
    value = divergence(s, torch.tensor(teacher, dtype=dtype), spec)
    value.sum().backward()
    return value.detach(), s.grad


@pytest.fixture
def logits():
    generator = np.random.default_rng(0)
    return 2 * generator.normal(size=(3, 7)), 2 * generator.normal(size=(3, 7))


@every_spec
def test_value_and_gradient_equal_the_formula(spec, logits):
    value, gradient = _ours(*logits, spec)
    np.testing.assert_allclose(value, _oracle(*logits, spec), rtol=1e-12)
    np.testing.assert_allclose(gradient, _central_difference(*logits, spec), rtol=1e-6, atol=1e-9)


@every_spec
def test_two_way_choice_worked_by_hand(spec):
    # both uniform over two tokens after the first is shifted by ln 3 * temperature: q = (3/4, 1/4), p = (1/2, 1/2)
    student = np.array([[math.log(3) * spec.temperature, 0.0]])
    value, _ = _ours(student, np.zeros((1, 2)), spec)
    q, p = (0.75, 0.25), (0.5, 0.5)

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    mixture = tuple((1 - spec.beta) * x + spec.beta * y for x, y in zip(q, p, strict=True))
    expected = {
        DivergenceKind.KL_TEACHER_STUDENT: kl(p, q),  # 0.1438
        DivergenceKind.KL_STUDENT_TEACHER: kl(q, p),  # 0.1308
        DivergenceKind.JSD: spec.beta * kl(p, mixture) + (1 - spec.beta) * kl(q, mixture),
    }[spec.kind]
    assert value.item() == pytest.approx(expected, rel=1e-12)


@every_spec
def test_bf16_equals_the_formula_on_the_rounded_inputs(spec, logits):
    rounded = [torch.tensor(x).bfloat16().double().numpy() for x in logits]
    value, _ = _ours(*rounded, spec, dtype=torch.bfloat16)
    assert value.dtype is torch.float32
    np.testing.assert_allclose(value, _oracle(*rounded, spec), rtol=1e-5)


@every_spec
def test_a_token_masked_out_on_both_sides_is_as_if_it_were_not_there(spec, logits):
    student, teacher = logits
    value, gradient = _ours(student[:, :-1], teacher[:, :-1], spec)
    student, teacher = student.copy(), teacher.copy()
    student[:, -1] = teacher[:, -1] = -np.inf
    with_column, wider = _ours(student, teacher, spec)
    np.testing.assert_allclose(with_column, value, rtol=1e-12)
    np.testing.assert_allclose(wider[:, :-1], gradient, rtol=1e-12)
    assert (wider[:, -1] == 0).all()


@every_spec
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_token_without_mass_on_one_side_is_finite_in_value_and_gradient(spec, side, logits):
    student, teacher = (x.copy() for x in logits)
    (student if side == "student" else teacher)[:, 0] = -np.inf
    value, gradient = _ours(student, teacher, spec, dtype=torch.float32)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_a_token_the_student_cannot_say_costs_its_mass_times_a_hundred_nats():
    # q = (1, 0), p = (1/2, 1/2): 1/2 ln(1/2 / 1) + 1/2 (ln 1/2 - (-100))
    spec = Divergence(kind=DivergenceKind.KL_TEACHER_STUDENT)
    value, _ = _ours(np.array([[0.0, -np.inf]]), np.zeros((1, 2)), spec)
    assert value.item() == pytest.approx(50 + math.log(0.5), rel=1e-12)


@every_spec
@pytest.mark.parametrize("scale", [1e4, 1e30], ids=["large", "huge"])
def test_extreme_logits_are_finite_in_value_and_gradient(spec, scale):
    student = np.array([[scale, -scale, 0.0], [0.0, 0.0, 0.0]])
    teacher = np.array([[-scale, scale, 0.0], [scale, 0.0, -scale]])
    value, gradient = _ours(student, teacher, spec, dtype=torch.float32)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value > 0).all()


@every_spec
def test_identical_distributions_have_no_divergence_and_no_gradient(spec, logits):
    student, _ = logits
    value, _ = _ours(student, student + 3.0, spec)  # a shift of all logits changes nothing
    assert value.abs().max() <= 1e-12
    _, gradient = _ours(student, student, spec, dtype=torch.float32)
    assert gradient.abs().max() <= 1e-7 / min(spec.temperature, 1)  # the gradient carries 1 / temperature


@every_spec
def test_the_teacher_never_gets_a_gradient(spec, logits):
    student = torch.tensor(logits[0], requires_grad=True)
    teacher = torch.tensor(logits[1], requires_grad=True)
    divergence(student, teacher, spec).sum().backward()
    assert teacher.grad is None


def test_jsd_with_beta_half_is_symmetric(logits):
    spec = Divergence(kind=DivergenceKind.JSD, beta=0.5)
    assert torch.allclose(_ours(*logits, spec)[0], _ours(*reversed(logits), spec)[0])


def test_beta_weights_the_teacher():
    # as beta -> 0, JSD / beta -> KL(teacher || student)
    student, teacher = np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]])
    jsd, _ = _ours(student, teacher, Divergence(kind=DivergenceKind.JSD, beta=1e-6))
    kl, _ = _ours(student, teacher, Divergence(kind=DivergenceKind.KL_TEACHER_STUDENT))
    assert jsd.item() / 1e-6 == pytest.approx(kl.item(), rel=1e-4)


def test_no_hint_tokens_give_no_values_joined_to_the_graph():
    student = torch.zeros(0, 5, requires_grad=True)
    value = divergence(student, torch.zeros(0, 5), Divergence())
    assert value.shape == (0,)
    assert value.requires_grad


def test_two_vocabularies_are_refused():
    with pytest.raises(ValueError) as caught:
        divergence(torch.zeros(2, 5), torch.zeros(2, 6), Divergence())
    assert str(caught.value) == (
        "student logits (2, 5) and teacher logits (2, 6) must both be (K, V) of one vocabulary"
    )
