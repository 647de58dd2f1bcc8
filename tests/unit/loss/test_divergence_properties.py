"""What holds for every divergence, dense and fused, on logits of any kind: drawn by hypothesis."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.from_logits import divergence_from_logits

quick = settings(max_examples=40, deadline=None, derandomize=True)
finite = st.floats(-50, 50, width=32)
large = st.one_of(finite, st.sampled_from([-math.inf, 1e4, -1e4, 0.0]))
extreme = st.one_of(finite, st.sampled_from([-math.inf, -1e30, 1e30, 1e4, -1e4, 0.0]))


@st.composite
def specs(draw, *, sampled=True):
    supports = list(Support) if sampled else [support for support in Support if support is not Support.SAMPLED]
    support = draw(st.sampled_from(supports))
    gate = draw(st.sampled_from([None, SoftGate(), PaperGate(tau=0.5, k=2)]))
    if support is Support.SAMPLED and isinstance(gate, SoftGate):
        gate = None
    only = [DivergenceKind.KL_STUDENT_TEACHER] if gate or support is Support.SAMPLED else list(DivergenceKind)
    topk = support.is_topk
    return Divergence(
        kind=draw(st.sampled_from(only)),
        beta=draw(st.floats(0.05, 0.95)),
        temperature=draw(st.floats(0.3, 3)),
        support=support,
        k=draw(st.integers(1, 6)) if topk else None,
        tail=draw(st.booleans()) if topk else True,
        taid=draw(st.sampled_from([None, 0.0, 0.4, 1.0])),
        gate=gate,
    )


@st.composite
def rows(draw, values=finite, *, sides=2, dtype=torch.float32):
    """Logits of `sides` sides, (K, V) each, every row with at least one entry that is not -inf."""
    k, v = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    made = []
    for _ in range(sides):
        cells = draw(st.lists(st.lists(values, min_size=v, max_size=v), min_size=k, max_size=k))
        logits = torch.tensor(np.array(cells), dtype=dtype)
        logits[:, 0] = logits[:, 0].nan_to_num(neginf=0.0)
        made.append(logits)
    return made


def _ids(spec, logits):
    return torch.zeros(len(logits), dtype=torch.int64) if spec.support is Support.SAMPLED else None


def _value_and_gradient(student, teacher, spec):
    student = student.clone().requires_grad_()
    value = divergence(student, teacher, spec, sampled_ids=_ids(spec, student))
    value.sum().backward()
    return value.detach(), student.grad


@quick
@given(specs(), rows(extreme))
def test_value_and_gradient_are_finite_on_extreme_and_excluded_entries(spec, logits):
    value, gradient = _value_and_gradient(*logits, spec)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@quick
@given(specs(), rows(large))
def test_from_logits_is_the_dense_form_on_every_input(spec, logits):
    student, teacher = logits
    value, gradient = _value_and_gradient(student.double(), teacher.double(), spec)
    ours = student.double().requires_grad_()
    loss, values = divergence_from_logits(ours, teacher.double(), spec, sampled_ids=_ids(spec, student), chunk=2)
    loss.backward()
    torch.testing.assert_close(values, value, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ours.grad, gradient, rtol=1e-7, atol=1e-7)


@quick
@given(specs(sampled=False), rows(sides=1, dtype=torch.float64))
def test_identical_distributions_have_no_divergence_and_no_gradient(spec, logits):
    if isinstance(spec.gate, PaperGate):
        return  # its truncated term has a gradient there, as published
    value, gradient = _value_and_gradient(logits[0], logits[0], spec)
    assert value.abs().max() <= 1e-12
    assert gradient.abs().max() <= 1e-12 / min(spec.temperature, 1)


@quick
@given(specs(sampled=False), rows(dtype=torch.float64))
def test_a_divergence_is_never_negative(spec, logits):
    if isinstance(spec.gate, PaperGate):
        return  # its truncated term may be, as published
    assert (_value_and_gradient(*logits, spec)[0] >= -1e-12).all()


@quick
@given(specs(), rows(st.floats(-3, 3, width=32)))
def test_the_gradient_of_a_token_sums_to_zero_as_a_shift_of_its_logits_changes_nothing(spec, logits):
    _, gradient = _value_and_gradient(*[x.double() for x in logits], spec)
    assert gradient.sum(-1).abs().max() <= 1e-7 * max(1.0, gradient.abs().max())


@quick
@given(specs(), rows(st.floats(-3, 3, width=32)), st.randoms(use_true_random=False))
def test_the_order_of_tokens_and_of_the_vocabulary_does_not_matter(spec, logits, random):
    student, teacher = (x.double() + torch.arange(x.shape[1]) * 1e-3 for x in logits)  # no ties among the top k
    tokens = random.sample(range(student.shape[0]), student.shape[0])
    entries = [0, *random.sample(range(1, student.shape[1]), student.shape[1] - 1)]  # entry 0 is the sampled one
    value, gradient = _value_and_gradient(student, teacher, spec)
    moved, moved_gradient = _value_and_gradient(student[tokens][:, entries], teacher[tokens][:, entries], spec)
    # a tail is 1 minus what the support holds, so its log knows fewer digits
    torch.testing.assert_close(moved, value[tokens], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved_gradient, gradient[tokens][:, entries], rtol=1e-6, atol=1e-6)


@quick
@given(specs(), rows())
def test_the_temperature_only_divides_both_logits(spec, logits):
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    cold = Divergence(**fields | {"temperature": 1.0})
    student, teacher = (x.double() for x in logits)
    value, gradient = _value_and_gradient(student, teacher, spec)
    scaled, scaled_gradient = _value_and_gradient(student / spec.temperature, teacher / spec.temperature, cold)
    torch.testing.assert_close(value, scaled, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, scaled_gradient / spec.temperature, rtol=1e-9, atol=1e-11)


@quick
@given(specs(), rows())
def test_the_teacher_never_gets_a_gradient(spec, logits):
    student, teacher = (x.clone().requires_grad_() for x in logits)
    for make in (
        lambda: divergence(student, teacher, spec, sampled_ids=_ids(spec, student)).sum(),
        lambda: divergence_from_logits(student, teacher, spec, sampled_ids=_ids(spec, student))[0],
    ):
        make().backward()
        assert teacher.grad is None


@quick
@given(specs(), rows(st.floats(-8, 8)))
def test_bf16_equals_a_float64_evaluation_of_the_rounded_logits(spec, logits):
    if spec.gate is not None or spec.support.is_topk:
        return  # a threshold or a tie may fall either way in the last bit
    student, teacher = (x.bfloat16() for x in logits)
    value = divergence(student, teacher, spec, sampled_ids=_ids(spec, student))
    exact = divergence(student.double(), teacher.double(), spec, sampled_ids=_ids(spec, student))
    assert value.dtype is torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


@quick
@given(rows())
def test_splitting_the_tokens_splits_the_sum(logits):
    student, teacher = (x.double() for x in logits)
    whole, whole_gradient = _value_and_gradient(student, teacher, Divergence())
    parts = [_value_and_gradient(student[i : i + 1], teacher[i : i + 1], Divergence()) for i in range(len(student))]
    torch.testing.assert_close(torch.cat([value for value, _ in parts]), whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole_gradient)


@pytest.mark.parametrize("kind", list(DivergenceKind))
def test_a_vocabulary_of_one_entry_has_no_divergence(kind):
    value, gradient = _value_and_gradient(torch.tensor([[3.0]]), torch.tensor([[-5.0]]), Divergence(kind))
    assert value.item() == 0
    assert gradient.item() == 0
