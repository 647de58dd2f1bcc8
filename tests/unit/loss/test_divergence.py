"""Against the formulas in numpy float64, written from their definitions; gradients by central differences."""

import math

import numpy as np
import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.distributions import sampled_kl, sampled_surrogate
from composer_core.loss.divergence import divergence

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


@every_spec
def test_log_probabilities_far_below_the_floor_of_excluded_entries_count_in_full(spec):
    # q = (1, e^-8000), p = (e^-8000, 1): either KL is 8000 nats, JSD a two-way choice's entropy
    student, teacher = np.array([[8000.0, 0.0]]), np.array([[0.0, 8000.0]])
    value, _ = _ours(student, teacher, spec, dtype=torch.float32)
    binary = -spec.beta * math.log(spec.beta) - (1 - spec.beta) * math.log(1 - spec.beta)
    expected = binary if spec.kind is DivergenceKind.JSD else 8000 / spec.temperature
    assert value.item() == pytest.approx(expected, rel=1e-5)


@every_spec
def test_the_clip_bounds_the_value_after_the_sum_and_stops_the_gradient_of_clipped_tokens_only(spec, logits):
    value, gradient = _ours(*logits, spec)
    clip = value.median().item()
    fields = {name: getattr(spec, name) for name in ("kind", "beta", "temperature")}
    clipped, after = _ours(*logits, Divergence(**fields, clip=clip))
    over = value > clip
    assert over.any()
    assert not over.all()
    torch.testing.assert_close(clipped, value.clamp(max=clip))
    assert (after[over] == 0).all()
    torch.testing.assert_close(after[~over], gradient[~over])


SAMPLED = Divergence(kind=DivergenceKind.KL_STUDENT_TEACHER, support=Support.SAMPLED)


def test_the_sampled_value_is_log_q_minus_log_p_and_averages_to_the_kl(logits):
    student, teacher = (torch.tensor(x[:1]).repeat(7, 1) for x in logits)  # every token of the vocabulary once
    values = divergence(student, teacher, SAMPLED, sampled_ids=torch.arange(7))
    exact = divergence(student[:1], teacher[:1], Divergence(kind=DivergenceKind.KL_STUDENT_TEACHER))
    torch.testing.assert_close(values, student.log_softmax(-1).diagonal() - teacher.log_softmax(-1).diagonal())
    torch.testing.assert_close((student[0].softmax(-1) * values).sum(), exact[0])


def test_the_sampled_gradient_averages_to_the_gradient_of_the_kl(logits):
    student = torch.tensor(logits[0][:1], requires_grad=True)
    teacher = torch.tensor(logits[1][:1])
    values = divergence(student.repeat(7, 1), teacher.repeat(7, 1), SAMPLED, sampled_ids=torch.arange(7))
    (ours,) = torch.autograd.grad((student.detach()[0].softmax(-1) * values).sum(), student)
    exact = divergence(student, teacher, Divergence(kind=DivergenceKind.KL_STUDENT_TEACHER))
    torch.testing.assert_close(ours, torch.autograd.grad(exact.sum(), student)[0])


def test_the_published_surrogate_has_the_same_gradient_and_another_value():
    log_q, log_p = torch.tensor([-2.0], requires_grad=True), torch.tensor([-0.5])
    for form, value in ((sampled_kl, -1.5), (sampled_surrogate, 3.0)):  # -1.5 and -1.5 x -2
        result = form(log_q, log_p)
        assert result.item() == value
        assert torch.autograd.grad(result.sum(), log_q)[0].item() == -1.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"beta": 1.0},
            "jsd needs 0 < beta < 1, got 1.0: at the ends it is a plain KL, use kl_teacher_student (0) or "
            "kl_student_teacher (1)",
        ),
        ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0.0"),
        ({"temperature": math.inf}, "temperature must be > 0 and finite, got inf"),
        ({"clip": 0.0}, "clip must be > 0, got 0.0"),
        ({"taid": 1.1}, "taid must be in [0, 1], got 1.1"),
        ({"k": 3}, "k is for the top-k supports and they need it: support full, k 3"),
        (
            {"support": Support.TOPK_UNION},
            "k is for the top-k supports and they need it: support topk_union, k None",
        ),
        ({"support": Support.TOPK_TEACHER, "k": 0}, "k must be >= 1, got 0"),
        ({"tail": False}, "tail is for the top-k supports, got tail False with support full"),
        (
            {"support": Support.SAMPLED},
            "the sampled support estimates kl_student_teacher only, as the tokens are the student's; got jsd",
        ),
        (
            {"support": Support.SAMPLED, "kind": DivergenceKind.KL_STUDENT_TEACHER, "clip": 1.0},
            "clip bounds a divergence; with support sampled the value is an estimate of either sign",
        ),
        (
            {"gate": PaperGate()},
            "a gate adds KL(teacher || student) to kl_student_teacher and needs that kind, got jsd",
        ),
        (
            {"support": Support.SAMPLED, "kind": DivergenceKind.KL_STUDENT_TEACHER, "gate": SoftGate()},
            "the soft gate needs KL(teacher || student), which the student's samples do not give",
        ),
    ],
)
def test_a_spec_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        Divergence(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftGate(h_max=0.0), "h_max must be > 0 nats, got 0.0"),
        (lambda: PaperGate(tau=-1.0), "tau and alpha must be >= 0, got tau -1.0, alpha 1.0"),
        (lambda: PaperGate(tau=math.nan), "tau and alpha must be >= 0, got tau nan, alpha 1.0"),
        (lambda: PaperGate(k=0), "k must be >= 1, got 0"),
    ],
    ids=["h-max", "tau", "nan", "k"],
)
def test_a_gate_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "sampled_ids", "message"),
    [
        (SAMPLED, None, "sampled_ids are for the sampled support and needed there: missing with sampled"),
        (
            Divergence(),
            torch.zeros(2, dtype=torch.int64),
            "sampled_ids are for the sampled support and needed there: given with full",
        ),
        (
            SAMPLED,
            torch.zeros(3, dtype=torch.int64),
            "sampled_ids (3,) torch.int64 must be (2,) torch.int64, one id per token",
        ),
        (SAMPLED, torch.tensor([0, 5]), "sampled_ids must be in [0, 5), got 0 to 5"),
    ],
    ids=["missing", "not-wanted", "count", "range"],
)
def test_sampled_ids_that_do_not_fit_are_refused(spec, sampled_ids, message):
    with pytest.raises(ValueError) as caught:
        divergence(torch.zeros(2, 5), torch.zeros(2, 5), spec, sampled_ids=sampled_ids)
    assert str(caught.value) == message
