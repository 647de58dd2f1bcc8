"""Fused log-probs of sampled tokens against log_softmax of projected logits."""

import math

import pytest
import torch

from composer_core.loss import fused_logps as module
from composer_core.loss.fused_logps import fused_logps

N, V, H = 7, 13, 5


class Problem:
    def __init__(self, dtype=torch.float64, *, softcap=None, tokens=N):
        generator = torch.Generator().manual_seed(0)
        self.hidden, self.weight, self.bias = (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in ((tokens, H), (V, H), (V,))
        )
        self.ids = torch.randint(0, V - 1, (tokens,), generator=generator)
        self.softcap = softcap

    @property
    def leaves(self):
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf.requires_grad]

    def fused(self, **options):
        numbers = {"temperature": 1.3, "bias": self.bias, "logit_scale": 0.7, "softcap": self.softcap, "chunk": 3}
        return fused_logps(self.hidden, self.weight, self.ids, **numbers | options)

    def log_softmax(self):
        logits = 0.7 * (self.hidden @ self.weight.T + self.bias)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return (logits / 1.3).log_softmax(-1)

    def dense(self):
        return self.log_softmax().gather(-1, self.ids[:, None]).squeeze(-1)


@pytest.fixture(
    params=[0, 3 * V * 8, 4 * V * 8, 2**20],
    ids=["nothing-kept", "less-than-the-first-chunk-kept", "one-chunk-kept", "all-kept"],
)
def _kept(request, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", request.param)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no-cap", "softcap"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable-head", "frozen-head"])
def test_values_entropies_and_gradients_equal_the_dense_form(softcap, frozen):
    problem = Problem(softcap=softcap)
    if frozen:
        problem.weight.requires_grad_(False)
        problem.bias.requires_grad_(False)
    wanted = torch.linspace(-1, 2, N, dtype=torch.float64)  # of both signs; 0 among them
    logps, entropies = problem.fused(entropy=True)
    log_q = problem.log_softmax()
    torch.testing.assert_close(logps, problem.dense(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(entropies, -(log_q.exp() * log_q).sum(-1), rtol=1e-12, atol=1e-13, check_dtype=False)
    assert not entropies.requires_grad
    ours = torch.autograd.grad((wanted * logps).sum(), problem.leaves)
    for got, expected in zip(ours, torch.autograd.grad((wanted * problem.dense()).sum(), problem.leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no-cap", "softcap"])
def test_gradients_equal_finite_differences(softcap):
    problem = Problem(softcap=softcap, tokens=4)

    def logps(hidden, weight, bias):
        return fused_logps(hidden, weight, problem.ids, temperature=1.3, bias=bias, softcap=softcap, chunk=3)[0]

    # what was kept serves one backward; the next projects again, in products of another shape
    assert torch.autograd.gradcheck(logps, (problem.hidden, problem.weight, problem.bias), nondet_tol=1e-12)


def test_bf16_equals_a_float64_evaluation_of_the_rounded_inputs():
    problem, exact = Problem(torch.bfloat16), Problem(torch.bfloat16)
    for name in ("hidden", "weight", "bias"):
        setattr(exact, name, getattr(exact, name).detach().double().requires_grad_())
    logps, _ = problem.fused()
    torch.testing.assert_close(logps.double(), exact.dense(), rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(logps.sum(), problem.leaves)
    for got, expected in zip(ours, torch.autograd.grad(exact.dense().sum(), exact.leaves), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable-head", "frozen-head"])
def test_a_token_whose_log_prob_is_not_used_reaches_no_gradient_whatever_it_holds(frozen):
    problem = Problem(torch.float32)
    with torch.no_grad():
        problem.hidden[1] = math.nan
    if frozen:
        problem.weight.requires_grad_(False)
        problem.bias.requires_grad_(False)
    logps, _ = problem.fused()
    mask = torch.arange(N) != 1
    torch.where(mask, logps, 0).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in problem.leaves)
    assert (problem.hidden.grad[1] == 0).all()


def test_an_entry_that_the_bias_excludes_has_no_probability_and_no_gradient():
    problem = Problem()
    with torch.no_grad():
        problem.bias[-1] = -math.inf
    logps, entropies = problem.fused(entropy=True)
    logps.sum().backward()
    torch.testing.assert_close(logps, problem.dense())
    assert entropies.isfinite().all()
    assert problem.bias.grad[-1] == 0
    assert (problem.weight.grad[-1] == 0).all()


def test_no_tokens_give_no_values_joined_to_the_graph():
    problem = Problem(tokens=0)
    logps, entropies = problem.fused(entropy=True)
    logps.sum().backward()
    assert logps.shape == entropies.shape == (0,)
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in problem.leaves)


def test_under_no_grad_the_values_are_the_same_and_entropies_only_come_when_asked_for():
    problem = Problem()
    with torch.no_grad():
        logps, entropies = problem.fused()
    assert torch.equal(logps, problem.fused()[0].detach())
    assert entropies is None


@pytest.mark.usefixtures("_kept")
def test_a_graph_can_be_used_twice():
    problem = Problem()
    logps, _ = problem.fused()
    first = torch.autograd.grad(logps[:3].sum(), problem.leaves, retain_graph=True)
    second = torch.autograd.grad(logps[3:].sum(), problem.leaves)
    whole = torch.autograd.grad(problem.dense().sum(), problem.leaves)
    for one, other, expected in zip(first, second, whole, strict=True):
        torch.testing.assert_close(one + other, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": (4, 6)}, "hidden (4, 6) must be (K, H) and weight (9, 5) (V, H)"),
        ({"bias": (8,)}, "bias (8,) must be (V,) of weight, (9,)"),
        ({"ids": torch.zeros(3)}, "ids (3,) torch.float32 must be (4,) torch.int64, one id per token"),
        ({"ids": torch.tensor([0, 1, 9, -1])}, "ids must be in [0, 9), got -1 to 9"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"chunk": 0}, "chunk must be >= 1 tokens or None, got 0"),
    ],
    ids=["width", "bias", "type", "range", "temperature", "chunk"],
)
def test_what_does_not_fit_is_refused_by_name_shape_and_rule(change, message):
    arguments = {"hidden": (4, 5), "weight": (9, 5), "ids": torch.zeros(4, dtype=torch.int64)} | change
    arguments = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    with pytest.raises(ValueError) as caught:
        fused_logps(**arguments)
    assert str(caught.value) == message
