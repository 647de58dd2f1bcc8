"""Divergences from tapped logits against the dense form: values, gradients, what others see of it, and memory."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.tap import Tap

TEACHER_STUDENT, STUDENT_TEACHER, JSD = DivergenceKind
B, T, V = 2, 4, 13
AT = torch.tensor([1, 6, 2, 6, 7])
"""Rows out of order, and one of them twice."""
K = len(AT)
TOPK = {"support": Support.TOPK_UNION, "k": 3}
two_supports = pytest.mark.parametrize(
    "spec", [Divergence(JSD, 0.3), Divergence(JSD, 0.3, **TOPK)], ids=["full", "topk"]
)


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


class Problem:
    """Random logits of a model and a teacher, a loss of the trainer's own, and the dense answer."""

    def __init__(self, dtype=torch.float64, *, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.leaf = normal(B, T, V).requires_grad_()
        self.teacher = normal(K, V)
        self.labels = torch.randint(0, V, (B * T,), generator=generator)
        self.ids = torch.randint(0, V, (K,), generator=generator)
        self.weight = torch.rand(K, generator=generator, dtype=torch.float64) - 0.3

    def logits(self):
        """As a model gives them: no leaf."""
        return self.leaf * 1.0

    def own_loss(self, logits):
        return nn.functional.cross_entropy(logits.view(-1, V), self.labels)

    def tapped(self, tap, spec):
        return tap.divergence(AT, self.teacher.clone(), spec, ids=self.ids)

    def dense(self, logits, spec):
        ids = self.ids if spec.support is Support.SAMPLED else None
        return divergence(logits.view(-1, V)[AT], self.teacher, spec, sampled_ids=ids)

    def grad(self, loss):
        (grad,) = torch.autograd.grad(loss, self.leaf)
        return grad


def _close(got, expected, **options):
    torch.testing.assert_close(got, expected, **({"rtol": 1e-9, "atol": 1e-11} | options))


def test_every_combination_equals_the_dense_form_in_value_and_gradient():
    assert len(SPECS) > 300
    problem = Problem()
    with torch.no_grad():
        problem.leaf[..., 4] = -math.inf  # an entry the student cannot say
    problem.ids[problem.ids == 4] = 5
    problem.labels[problem.labels == 4] = 5
    for spec in SPECS:
        tap, logits = Tap(problem.logits()), problem.logits()
        (values, _, _), dense = problem.tapped(tap, spec), problem.dense(logits, spec)
        _close(values, dense, msg=str(spec))
        ours = problem.grad(problem.own_loss(tap.logits) + (values * problem.weight).sum())
        theirs = problem.grad(problem.own_loss(logits) + (dense * problem.weight).sum())
        _close(ours, theirs, rtol=1e-8, atol=1e-10, msg=str(spec))


@pytest.mark.parametrize("taid", [None, 0.0, 0.3], ids=["teacher", "taid-0", "taid"])
@pytest.mark.parametrize("options", [{}, TOPK], ids=["full", "topk"])
def test_the_gap_is_that_of_the_teacher_itself_at_the_temperature(taid, options):
    problem = Problem()
    _, gap, _ = problem.tapped(Tap(problem.logits()), Divergence(JSD, 0.3, 1.3, taid=taid, **options))
    log_q = (problem.leaf.detach().view(-1, V)[AT] / 1.3).log_softmax(-1)
    log_p = (problem.teacher / 1.3).log_softmax(-1)
    _close(gap, (log_q - log_p)[range(K), problem.ids])
    assert not gap.requires_grad


@pytest.mark.parametrize("spec", SPECS[::37], ids=str)
def test_the_probes_gradient_has_the_norm_of_what_is_sent_into_the_rows(spec):
    problem = Problem()
    values, _, probe = problem.tapped(Tap(problem.logits()), spec)
    (seen,) = torch.autograd.grad((values * problem.weight).sum(), probe)
    rows = problem.leaf.detach().view(-1, V)[AT].requires_grad_()
    ids = problem.ids if spec.support is Support.SAMPLED else None
    dense = divergence(rows, problem.teacher, spec, sampled_ids=ids)
    (expected,) = torch.autograd.grad((dense * problem.weight).sum(), rows)
    assert probe.tolist() == [0.0] * K
    _close(seen.norm(), expected.norm())


def test_without_a_divergence_a_tap_changes_no_bit():
    problem = Problem(torch.float32)
    assert torch.equal(
        problem.grad(problem.own_loss(Tap(problem.logits()).logits)), problem.grad(problem.own_loss(problem.logits()))
    )
    logits = problem.logits()
    assert Tap(logits).logits.data_ptr() == logits.data_ptr()


@two_supports
def test_several_divergences_and_readers_add_up(spec):
    problem, other = Problem(), Divergence(STUDENT_TEACHER, temperature=0.7)
    tap, logits = Tap(problem.logits()), problem.logits()

    def loss(logits, first, second):
        return problem.own_loss(logits) + logits.square().sum() + first.sum() - 2 * second.sum()

    ours = loss(tap.logits, problem.tapped(tap, spec)[0], problem.tapped(tap, other)[0])
    dense = loss(logits, problem.dense(logits, spec), problem.dense(logits, other))
    _close(problem.grad(ours), problem.grad(dense))


@two_supports
def test_divergences_alone_reach_the_logits(spec):
    problem = Problem()
    tap = Tap(problem.logits())
    values = problem.tapped(tap, spec)[0] + problem.tapped(tap, Divergence(TEACHER_STUDENT))[0]
    dense = problem.dense(problem.leaf, spec) + problem.dense(problem.leaf, Divergence(TEACHER_STUDENT))
    _close(problem.grad(values.sum()), problem.grad(dense.sum()))


@two_supports
def test_a_second_backward_of_other_readers_gets_no_gradient_that_an_earlier_one_had(spec):
    problem = Problem()
    tap = Tap(problem.logits())
    both = problem.own_loss(tap.logits) + problem.tapped(tap, spec)[0].sum()
    own = problem.own_loss(tap.logits)
    torch.autograd.grad(both, problem.leaf, retain_graph=True)
    _close(problem.grad(own), problem.grad(problem.own_loss(problem.logits())))


@two_supports
@pytest.mark.parametrize(
    "grad_values", [torch.zeros(K), torch.tensor([0.0, 3.0, -1.0, 2.0, 0.0])], ids=["none", "some"]
)
def test_any_gradient_by_the_values_is_right(spec, grad_values):
    problem = Problem()
    grad_values = grad_values.double()
    (ours,) = torch.autograd.grad(problem.tapped(Tap(problem.logits()), spec)[0], problem.leaf, grad_values)
    (dense,) = torch.autograd.grad(problem.dense(problem.leaf, spec), problem.leaf, grad_values)
    _close(ours, dense)


@two_supports
def test_no_rows_at_all_are_joined_to_the_graph(spec):
    problem = Problem()
    tap = Tap(problem.logits())
    empty = torch.empty(0, dtype=torch.int64)
    values, gap, probe = tap.divergence(empty, torch.empty(0, V, dtype=torch.float64), spec, ids=empty)
    assert (values.shape, gap.shape, probe.shape) == ((0,), (0,), (0,))
    assert problem.grad(values.sum()).abs().sum() == 0


def test_without_gradient_there_is_none():
    problem = Problem()
    values, _, probe = problem.tapped(Tap(problem.leaf.detach()), Divergence())
    assert not values.requires_grad
    assert not probe.requires_grad
    with torch.no_grad():
        values, _, _ = problem.tapped(Tap(problem.logits()), Divergence())
    assert not values.requires_grad


# -- tensors that are not the tap's ------------------------------------------------------------------------------------


@two_supports
def test_a_gradient_that_somebody_else_holds_is_not_written_into(spec):
    problem = Problem()
    tap = Tap(problem.logits())
    given = torch.ones(B, T, V, dtype=torch.float64)
    values, _, _ = problem.tapped(tap, spec)
    torch.autograd.backward([tap.logits, values.sum()], [given, None])
    assert (given == 1).all()
    _close(problem.leaf.grad, 1 + problem.grad(problem.dense(problem.leaf, spec).sum()))


@two_supports
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_gradient_shared_with_another_branch_is_not_written_into(spec, first):
    """The sum hands one and the same tensor to both of its sides, whichever is differentiated first."""
    problem = Problem()
    other = torch.zeros(B, T, V, dtype=torch.float64, requires_grad=True)
    early = other * 1.0
    tap = Tap(problem.logits())
    values, _, _ = problem.tapped(tap, spec)
    branch = early if first else other * 1.0
    scale = torch.arange(1.0, 1 + B * T * V, dtype=torch.float64).view(B, T, V)
    loss = ((tap.logits + branch) * scale).sum() + values.sum()
    ours, others = torch.autograd.grad(loss, [problem.leaf, other])
    assert torch.equal(others, scale)
    _close(ours, scale + problem.grad(problem.dense(problem.leaf, spec).sum()))


@two_supports
def test_an_expanded_gradient_and_logits_that_are_not_contiguous_are_served(spec):
    problem = Problem()
    turned = problem.leaf.transpose(0, 1)  # as of a model that puts the sequence first
    tap = Tap(turned)
    assert not tap.logits.is_contiguous()
    values, _, _ = problem.tapped(tap, spec)
    dense = divergence(turned.reshape(-1, V)[AT], problem.teacher, spec)
    _close(values, dense)
    _close(problem.grad(tap.logits.sum() + values.sum()), problem.grad(turned.sum() + dense.sum()))


class _InPlace(torch.autograd.Function):
    """The gradient of sum(0.5 logits^2), written over the logits and handed on, as a fused cross-entropy does."""

    @staticmethod
    def forward(ctx, logits):
        ctx.logits = logits.detach()
        return logits.square().sum() / 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.logits.data.mul_(grad)  # .data: a kernel of its own tells autograd nothing


def test_with_the_full_support_logits_may_be_overwritten_before_its_backward():
    problem, spec = Problem(), Divergence(JSD, 0.3, 1.3)
    logits = problem.logits()
    tap = Tap(logits)
    values, _, _ = problem.tapped(tap, spec)
    ours = problem.grad(3 * _InPlace.apply(tap.logits) + values.sum())
    dense = problem.dense(problem.leaf, spec)
    _close(ours, problem.grad(1.5 * problem.leaf.square().sum() + dense.sum()))
    _close(logits, 3 * problem.leaf)  # the trainer's own, without ours


def test_with_a_chosen_support_overwritten_logits_are_noticed():
    problem = Problem()
    tap = Tap(problem.logits())
    values, _, _ = problem.tapped(tap, Divergence(JSD, 0.3, **TOPK))
    with pytest.raises(RuntimeError) as caught:
        problem.grad(3 * _InPlace.apply(tap.logits) + values.sum())
    assert str(caught.value) == (
        "logits were overwritten before a divergence over a chosen support had read them again: the trainer's "
        "cross-entropy works in place; switch that off, or use the full support"
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_second_backward_and_a_derivative_of_it_are_refused():
    problem = Problem()
    values, _, _ = problem.tapped(Tap(problem.logits()), Divergence())
    with pytest.raises(RuntimeError, match=r"^a fused loss can be differentiated once only; with create_graph=True"):
        torch.autograd.grad(values.sum(), problem.leaf, create_graph=True)
    values, _, _ = problem.tapped(Tap(problem.logits()), Divergence())
    torch.autograd.grad(values.sum(), problem.leaf, retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"^a tapped divergence can be backpropagated once: its gradient is used up$"
    ):
        torch.autograd.grad(values.sum(), problem.leaf)


def test_a_change_of_the_logits_in_place_is_refused():
    tap = Tap(Problem().logits())
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        tap.logits.div_(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": AT + 1}, r"at must be in \[0, 8\), got 2 to 8"),
        ({"ids": torch.full((K,), V)}, r"ids must be in \[0, 13\), got 13 to 13"),
        ({"teacher_logits": torch.zeros(K, V - 1)}, r"teacher_logits \(5, 12\) must be \(5, 13\), as at and V"),
    ],
    ids=["row", "id", "vocabulary"],
)
def test_arguments_that_do_not_fit_are_refused(change, said):
    problem = Problem()
    arguments = {"at": AT, "teacher_logits": problem.teacher, "ids": problem.ids} | change
    with pytest.raises(ValueError, match=f"^{said}$"):
        Tap(problem.logits()).divergence(spec=Divergence(), **arguments)


def test_logits_without_a_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"^logits \(3,\) torch.float32 must be \(\.\.\., V\) and floating-point$"):
        Tap(torch.zeros(3))


# -- half precision, memory --------------------------------------------------------------------------------------------


@two_supports
def test_half_precision_is_accumulated_in_float32(spec):
    half, wide = Problem(torch.bfloat16), Problem()
    with torch.no_grad():
        wide.leaf.copy_(half.leaf)
        wide.teacher.copy_(half.teacher)
    values, _, _ = half.tapped(Tap(half.logits()), spec)
    dense = wide.dense(wide.leaf, spec)
    assert values.dtype is torch.float32
    _close(values.double(), dense, rtol=1e-5, atol=1e-6)
    ours = half.grad((values * half.weight).sum())
    assert ours.dtype is torch.bfloat16
    _close(ours.double(), wide.grad((dense * wide.weight).sum()), rtol=0.02, atol=1e-4)


def _peak(run):
    """The largest sum of tensor bytes alive that the run allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    alive = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@pytest.mark.parametrize(
    ("spec", "most"),
    [(Divergence(JSD), 1.1), (Divergence(TEACHER_STUDENT), 1.1)]
    + [(Divergence(kind, support=Support.TOPK_UNION, k=16), 0.25) for kind in DivergenceKind],
    ids=["jsd", "kl", "topk-kl", "topk-reverse-kl", "topk-jsd"],
)
def test_memory_above_the_trainers_own_cross_entropy(spec, most):
    n, vocab = 2048, 4000
    logits, labels = torch.randn(1, n, vocab, requires_grad=True), torch.zeros(n, dtype=torch.int64)

    def plain():
        nn.functional.cross_entropy(logits.view(n, vocab), labels).backward()
        logits.grad = None

    def tapped():
        tap = Tap(logits)
        values, _, _ = tap.divergence(torch.arange(n), torch.randn(n, vocab), spec, ids=labels)
        (nn.functional.cross_entropy(tap.logits.view(n, vocab), labels) + values.sum()).backward()
        logits.grad = None

    assert (_peak(tapped) - _peak(plain)) / (4 * n * vocab) <= most
