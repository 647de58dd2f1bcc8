"""The fused divergence against the dense one on projected logits: value and every gradient, for every option."""

import itertools
import math

import pytest
import torch

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.from_logits import divergence_from_logits
from composer_core.loss.fused import fused_linear_divergence

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
K, V, H, H_T = 7, 13, 5, 6


def _specs():
    """Every kind x support x target x gate x clip that exists together."""
    gates = (None, SoftGate(), SoftGate(0.9), PaperGate(tau=1.5, k=2))
    for kind, support, taid, gate, tail, clip in itertools.product(
        DivergenceKind, Support, (None, 0.0, 0.3, 1.0), gates, (True, False), (None, 0.3)
    ):
        try:
            yield Divergence(kind, 0.3, 1.3, support, 3 if support.is_topk else None, tail, clip, taid, gate)
        except ValueError:
            continue


SPECS = list(_specs())
PLAIN = [Divergence(TEACHER_STUDENT), Divergence(STUDENT_TEACHER), Divergence(JSD, 0.3)]
every_plain = pytest.mark.parametrize("spec", PLAIN, ids=[str(spec.kind) for spec in PLAIN])


class Problem:
    """Random hidden states and heads, and the dense answer for them."""

    def __init__(self, spec, dtype=torch.float64, *, tokens=K, softcap=None, bias=True, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.spec, self.softcap = spec, softcap
        self.hidden, self.weight = normal(tokens, H).requires_grad_(), normal(V, H).requires_grad_()
        self.bias = normal(V).requires_grad_() if bias else None
        self.teacher_hidden, self.teacher_weight, self.teacher_bias = normal(tokens, H_T), normal(V, H_T), normal(V)
        self.rows = torch.rand(tokens, generator=generator, dtype=torch.float64)
        self.rows[2 : tokens - 1 : 3] = 0
        self.ids = torch.randint(0, V, (tokens,), generator=generator) if spec.support is Support.SAMPLED else None

    @property
    def leaves(self):
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None and leaf.requires_grad]

    def fused(self, **options):
        return fused_linear_divergence(
            self.hidden,
            self.weight,
            self.teacher_hidden,
            self.teacher_weight,
            self.spec,
            **{"weight": self.rows, "chunk": 3}
            | {"student_bias": self.bias, "teacher_bias": self.teacher_bias, "sampled_ids": self.ids}
            | {"logit_scale": 0.7, "softcap": self.softcap, "teacher_softcap": self.softcap}
            | options,
        )

    def logits(self):
        student, teacher = self.hidden @ self.weight.T, self.teacher_hidden @ self.teacher_weight.T + self.teacher_bias
        student = 0.7 * (student if self.bias is None else student + self.bias)
        if self.softcap is not None:
            student, teacher = (self.softcap * torch.tanh(z / self.softcap) for z in (student, teacher))
        return student, teacher

    def dense(self):
        return divergence(*self.logits(), self.spec, sampled_ids=self.ids)


def _grads(loss, leaves):
    return torch.autograd.grad(loss, leaves)


def _close(ours, theirs, *, rtol, atol):
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, check_dtype=False)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no-cap", "softcap"])
def test_every_combination_equals_the_dense_form_in_value_and_gradients(softcap):
    assert len(SPECS) > 300
    for spec in SPECS:
        problem = Problem(spec, softcap=softcap)
        dense, (loss, values) = problem.dense(), problem.fused()
        counted = problem.rows != 0
        torch.testing.assert_close(values[counted], dense[counted], rtol=1e-9, atol=1e-11, msg=str(spec))
        assert (values[~counted] == 0).all()
        torch.testing.assert_close(loss, (dense * problem.rows).sum(), rtol=1e-9, atol=1e-11)
        expected = _grads(1.7 * (dense * problem.rows).sum(), problem.leaves)
        _close(_grads(1.7 * loss, problem.leaves), expected, rtol=1e-8, atol=1e-10)


def test_every_combination_from_logits_equals_the_dense_form_in_value_and_gradient():
    for spec in SPECS:
        problem = Problem(spec)
        student, teacher = (z.detach() for z in problem.logits())
        student[:, 4] = -math.inf  # an entry the student cannot say
        ours, dense = student.clone().requires_grad_(), student.clone().requires_grad_()
        loss, _ = divergence_from_logits(ours, teacher, spec, weight=problem.rows, sampled_ids=problem.ids, chunk=3)
        reference = (divergence(dense, teacher, spec, sampled_ids=problem.ids) * problem.rows).sum()
        torch.testing.assert_close(loss, reference, rtol=1e-9, atol=1e-11, msg=str(spec))
        _close(_grads(loss, [ours]), _grads(reference, [dense]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS[::29], ids=str)
def test_gradients_equal_finite_differences(spec):
    problem = Problem(spec, tokens=4, softcap=3.0)
    if problem.spec.support is Support.SAMPLED:
        pytest.skip("the value of a sampled estimate is not what its gradient belongs to")
    leaves = problem.leaves

    def loss(hidden, weight, bias):
        problem.hidden, problem.weight, problem.bias = hidden, weight, bias
        return problem.fused()[0]

    if spec.taid not in (None, 1.0):
        # the target moves with the student, but the gradient holds it still: compare with the dense form, which
        # autograd differentiates with the target detached
        problem_loss, dense = problem.fused()[0], (problem.dense() * problem.rows).sum()
        _close(_grads(problem_loss, leaves), _grads(dense, leaves), rtol=1e-8, atol=1e-10)
        return
    assert torch.autograd.gradcheck(loss, leaves)


@every_plain
def test_float32_equals_the_dense_form(spec):
    problem = Problem(spec, torch.float32)
    dense, (loss, values) = problem.dense(), problem.fused()
    counted = problem.rows != 0
    torch.testing.assert_close(values[counted], dense[counted], rtol=0, atol=1e-6)
    expected = _grads((dense * problem.rows).sum(), problem.leaves)
    _close(_grads(loss, problem.leaves), expected, rtol=1e-5, atol=1e-5)


@every_plain
def test_bf16_equals_a_float64_evaluation_of_the_rounded_inputs(spec):
    problem, exact = Problem(spec, torch.bfloat16), Problem(spec, torch.bfloat16)
    for name in ("hidden", "weight", "bias"):
        setattr(exact, name, getattr(exact, name).detach().double().requires_grad_())
    for name in ("teacher_hidden", "teacher_weight", "teacher_bias"):
        setattr(exact, name, getattr(exact, name).double())
    (loss, values), dense = problem.fused(), exact.dense()
    assert values.dtype is torch.float32
    counted = problem.rows != 0
    torch.testing.assert_close(values[counted].double(), dense[counted], rtol=1e-5, atol=1e-6)
    ours = _grads(loss, problem.leaves)
    assert {grad.dtype for grad in ours} == {torch.bfloat16}
    # accumulated in float32 and rounded to bf16 once: half a unit of its 8 bits
    expected = _grads((dense * exact.rows).sum(), exact.leaves)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-5)


@every_plain
@pytest.mark.parametrize("chunk", [1, 2, K, 100])
def test_the_chunk_size_changes_nothing(spec, chunk):
    problem = Problem(spec)
    _close(
        _grads(problem.fused(chunk=chunk)[0], problem.leaves),
        _grads(problem.fused(chunk=4)[0], problem.leaves),
        rtol=1e-12,
        atol=1e-13,
    )


@pytest.mark.parametrize(
    "combine",
    [
        lambda loss, values, rows: loss,
        lambda loss, values, rows: (3 * values * rows).sum(),
        lambda loss, values, rows: (values * rows).sum() - loss / 2,
        lambda loss, values, rows: (values * rows.square()).sum(),
        lambda loss, values, rows: values.square().sum() + loss,
    ],
    ids=["scalar", "proportional", "both", "other-weights", "a-function-of-the-values"],
)
def test_any_use_of_loss_and_values_has_the_right_gradient(combine):
    problem = Problem(Divergence())
    dense = torch.where(problem.rows != 0, problem.dense(), 0)
    expected = _grads(combine((dense * problem.rows).sum(), dense, problem.rows), problem.leaves)
    ours = _grads(combine(*problem.fused(), problem.rows), problem.leaves)
    _close(ours, expected, rtol=1e-9, atol=1e-11)


def test_a_second_backward_through_a_kept_graph_gives_the_same_again():
    problem = Problem(Divergence())
    loss, _ = problem.fused()
    first = torch.autograd.grad(loss, problem.leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(2 * loss, problem.leaves)
    _close(first, kept, rtol=0, atol=0)
    _close(second, [2 * grad for grad in kept], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_a_frozen_tensor_gets_no_gradient_and_changes_no_other(frozen):
    whole, part = Problem(Divergence()), Problem(Divergence())
    getattr(part, frozen).requires_grad_(False)
    names = [name for name in ("hidden", "weight", "bias") if name != frozen]
    whole.fused()[0].backward()
    part.fused()[0].backward()
    assert getattr(part, frozen).grad is None
    for name in names:
        torch.testing.assert_close(getattr(part, name).grad, getattr(whole, name).grad, rtol=1e-12, atol=1e-13)


@every_plain
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_token_of_weight_zero_holds_reaches_nothing(spec, poison):
    clean, poisoned = Problem(spec, torch.float32), Problem(spec, torch.float32)
    masked = poisoned.rows == 0
    assert masked.any()
    with torch.no_grad():
        poisoned.hidden[masked] = poison
        poisoned.teacher_hidden[masked] = poison
    (loss, values), (clean_loss, clean_values) = poisoned.fused(), clean.fused()
    assert torch.equal(loss, clean_loss)
    assert torch.equal(values, clean_values)
    _close(_grads(loss, poisoned.leaves), _grads(clean_loss, clean.leaves), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, K], ids=["none", "one", "all-masked"])
def test_without_a_counted_token_the_loss_is_zero_joined_to_the_graph(tokens):
    problem = Problem(Divergence(), tokens=tokens)
    loss, values = problem.fused(weight=torch.zeros(tokens))
    loss.backward()
    assert loss.item() == 0
    assert values.shape == (tokens,)
    for leaf in problem.leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@every_plain
def test_an_entry_that_a_bias_excludes_on_both_sides_is_as_if_it_were_not_there(spec):
    problem, without = Problem(spec), Problem(spec)
    with torch.no_grad():
        problem.bias[-1] = problem.teacher_bias[-1] = -math.inf
    without.weight, without.bias, without.teacher_weight, without.teacher_bias = (
        tensor.detach()[:-1].requires_grad_(tensor.requires_grad)
        for tensor in (without.weight, without.bias, without.teacher_weight, without.teacher_bias)
    )
    loss, expected = problem.fused()[0], without.fused()[0]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    hidden, weight, bias = _grads(loss, problem.leaves)
    _close((hidden, weight[:-1], bias[:-1]), _grads(expected, without.leaves), rtol=1e-10, atol=1e-12)
    assert (weight[-1] == 0).all()
    assert bias[-1] == 0


def test_the_teacher_never_gets_a_gradient_even_where_it_is_the_same_head():
    problem = Problem(Divergence(), bias=False)
    problem.teacher_hidden = problem.hidden.detach().clone().requires_grad_() * 1.5
    problem.teacher_weight, problem.teacher_bias = problem.weight, torch.zeros(V, dtype=torch.float64)
    teacher_leaf = problem.teacher_hidden
    teacher_leaf.retain_grad()
    problem.fused()[0].backward()
    assert teacher_leaf.grad is None
    student = problem.hidden.detach().clone().requires_grad_()
    weight = problem.weight.detach().clone().requires_grad_()
    fixed = (teacher_leaf @ problem.weight.T).detach()
    (divergence(0.7 * student @ weight.T, fixed, Divergence()) * problem.rows).sum().backward()
    torch.testing.assert_close(problem.weight.grad, weight.grad, rtol=1e-9, atol=1e-11)


def test_identical_distributions_have_no_divergence_and_no_gradient():
    for spec in PLAIN:
        problem = Problem(spec, torch.float32, bias=False)
        problem.teacher_hidden, problem.teacher_weight = problem.hidden.detach(), problem.weight.detach()
        loss, values = problem.fused(logit_scale=1.0, teacher_bias=None)
        assert values.abs().max() <= 1e-6
        for grad in _grads(loss, problem.leaves):
            assert grad.abs().max() <= 1e-6


def test_under_no_grad_the_values_are_the_same_and_no_graph_is_made():
    problem = Problem(Divergence())
    with torch.no_grad():
        loss, values = problem.fused()
    expected_loss, expected = problem.fused()
    assert not loss.requires_grad
    assert torch.equal(loss, expected_loss)
    assert torch.equal(values, expected)


def test_inside_autocast_the_numbers_are_those_of_full_precision():
    problem = Problem(Divergence(), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = problem.fused()
    assert torch.equal(loss, problem.fused()[0])


def test_differentiating_twice_is_refused():
    problem = Problem(Divergence())
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(problem.fused()[0], problem.leaves, create_graph=True)
    assert str(caught.value) == (
        "a fused loss can be differentiated once only; with create_graph=True use loss.divergence"
    )


def test_logits_in_bf16_get_a_gradient_in_bf16():
    student = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    loss, values = divergence_from_logits(student, torch.zeros(4, 9).bfloat16(), Divergence())
    loss.backward()
    assert (values.dtype, student.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_of_weight_zero_reach_nothing(poison):
    student = torch.zeros(3, 4)
    student[1] = poison
    student.requires_grad_()
    loss, values = divergence_from_logits(
        student, torch.full((3, 4), poison), Divergence(), weight=torch.tensor([0.0, 0.0, 0.0])
    )
    (loss + (poison * values).nan_to_num()).sum().backward()
    assert loss.item() == 0
    assert torch.equal(student.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.taid != 0], ids=str)
def test_the_gap_of_the_sampled_tokens_is_that_of_student_and_teacher_whatever_the_divergence(spec):
    problem = Problem(spec)
    ids = torch.arange(K) if problem.ids is None else problem.ids
    gap, plain = torch.full((K,), math.nan, dtype=torch.float64), problem.fused()
    loss, values = problem.fused(sampled_ids=ids, sampled_gap=gap)
    log_q, log_p = ((z / spec.temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0] for z in problem.logits())
    expected = torch.where(problem.rows != 0, log_q - log_p, 0)
    assert torch.allclose(gap, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(loss, plain[0])
    assert torch.equal(values, plain[1])
    # a gradient that has to project once more leaves the gap as it is
    (values * torch.rand(K, dtype=torch.float64)).sum().backward()
    assert torch.allclose(gap, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "taid", "said"),
    [
        (
            {"sampled_ids": None},
            None,
            "sampled_ids are for the sampled support and needed there: missing with full and",
        ),
        ({"sampled_gap": torch.zeros(8)}, None, "sampled_gap (8,) torch.float32 must be (7,) float32 without gradient"),
        ({"sampled_gap": torch.arange(K)}, None, "sampled_gap (7,) torch.int64 must be (7,) float32 without gradient"),
        ({}, 0.0, "sampled_gap is a by-product, and with taid 0 nothing is computed"),
    ],
    ids=["no-ids", "shape", "dtype", "nothing-computed"],
)
def test_a_gap_that_does_not_fit_is_refused(change, taid, said):
    options = {"sampled_ids": torch.zeros(K, dtype=torch.int64), "sampled_gap": torch.zeros(K)} | change
    with pytest.raises(ValueError) as caught:
        Problem(Divergence(taid=taid)).fused(**options)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student_hidden": (4, 6)}, "student_hidden (4, 6) must be (K, H) and student_weight (9, 5) (V, H)"),
        ({"teacher_weight": (9, 5, 1)}, "teacher_hidden (4, 3) must be (K, H) and teacher_weight (9, 5, 1) (V, H)"),
        (
            {"teacher_hidden": (5, 3)},
            "teacher_hidden (5, 3) and teacher_weight (9, 3) must have the student's 4 tokens and 9 vocabulary entries",
        ),
        (
            {"teacher_weight": (8, 3)},
            "teacher_hidden (4, 3) and teacher_weight (8, 3) must have the student's 4 tokens and 9 vocabulary entries",
        ),
        ({"weight": (5,)}, "weight (5,) torch.float32 must be (4,) floating-point, one per token"),
        ({"student_bias": (5,)}, "student_bias (5,) must be (V,) of student_weight, (9,)"),
        ({"chunk": 0}, "chunk must be >= 1 tokens or None, got 0"),
        ({"softcap": -1.0}, "softcap must be > 0 or None, got -1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_name_shape_and_rule(change, message):
    shapes = {"student_hidden": (4, 5), "student_weight": (9, 5), "teacher_hidden": (4, 3), "teacher_weight": (9, 3)}
    arguments = {
        name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in (shapes | change).items()
    }
    with pytest.raises(ValueError) as caught:
        fused_linear_divergence(spec=Divergence(), **arguments)
    assert str(caught.value) == message
