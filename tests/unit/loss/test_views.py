"""`ModelView` against a model small enough to know its log-probs by hand, and `LeafView` against `ModelView`."""

import math

import pytest
import torch
from torch import nn

from composer_core.batch import Batch, Hints, Rollouts, Seqs
from composer_core.divergences import Divergence, DivergenceKind, Support
from composer_core.errors import RunFailed
from composer_core.loss.divergence import divergence
from composer_core.loss.views import KnownLogps, LeafView, ModelView
from composer_core.testing.fakes import Brevity


class Bigram(nn.Module):
    """Logits of the next token depend on the current one only: a (V, V) table. Counts its forwards."""

    def __init__(self, vocabulary=6, dropout=0.0, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))
        self.dropout = nn.Dropout(dropout)
        self.forwards = 0

    def forward(self, input_ids, attention_mask, use_cache):
        assert not use_cache
        self.forwards += 1
        return type("Output", (), {"logits": self.dropout(self.table[input_ids])})


SEQS = Seqs.from_lists([[1, 2, 3, 4], [5], [2, 2]])


def test_log_probs_are_packed_aligned_with_their_token_and_zero_for_first_ones():
    model = Bigram()
    logps = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=1.0)
    table = model.table.detach().log_softmax(-1)
    expected = [0.0, table[1, 2], table[2, 3], table[3, 4], 0.0, 0.0, table[2, 2]]
    assert logps.tolist() == pytest.approx([float(x) for x in expected])


def test_log_probs_divide_logits_by_the_temperature():
    model = Bigram()
    logps = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=0.5)
    assert logps[1].item() == pytest.approx((model.table[1] / 0.5).log_softmax(-1)[2].item())


def test_the_gradient_is_that_of_the_log_softmax():
    model = Bigram()
    ModelView(model, rollouts=SEQS).logps(Seqs.from_lists([[1, 2]]), grad=True, temperature=1.0).sum().backward()
    expected = torch.zeros(6)
    expected[2] = 1.0
    assert torch.allclose(model.table.grad[1], expected - model.table[1].softmax(-1).detach())
    assert not model.table.grad[[0, 2, 3, 4, 5]].any()


def test_bf16_logits_are_upcast_before_the_softmax():
    model = Bigram().bfloat16()
    logps = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=1.0)
    assert logps.dtype is torch.float32
    assert logps[1].item() == pytest.approx(model.table.double().log_softmax(-1)[1, 2].item(), rel=1e-6)


def test_without_grad_there_is_no_dropout_and_every_module_gets_its_own_mode_back():
    model = Bigram(dropout=0.9)
    model.train()
    frozen = nn.Dropout(0.5).eval()
    model.add_module("frozen", frozen)
    view = ModelView(model, rollouts=SEQS)
    quiet = view.logps(SEQS, grad=False, temperature=1.0)
    assert not quiet.requires_grad
    assert quiet[1].item() == pytest.approx(model.table.log_softmax(-1)[1, 2].item())
    assert (model.training, model.dropout.training, frozen.training) == (True, True, False)


def test_with_grad_the_dropout_of_training_stays():
    model = Bigram(dropout=0.9)
    model.train()
    torch.manual_seed(0)
    noisy = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=1.0)
    assert noisy[1].item() != pytest.approx(model.table.log_softmax(-1)[1, 2].item())


def test_one_policy_forward_serves_log_probs_divergence_and_logits():
    model = Bigram()
    view = ModelView(model, rollouts=SEQS)
    view.logps(SEQS, grad=True, temperature=1.0)
    view.logits(SEQS, torch.tensor([1]), grad=True, temperature=1.0)
    assert model.forwards == 1
    view.divergence(_hints(), Divergence())
    assert model.forwards == 2  # the teacher's
    view.logps(Seqs(SEQS.ids, SEQS.cu), grad=True, temperature=1.0)
    assert model.forwards == 3  # equal but another object


def _hints(weight=(1.0, 1.0)):
    """Tokens 3 and 4 of the first sequence, which the teacher reads after another beginning."""
    return Hints(
        seqs=Seqs.from_lists([[5, 5, 3, 4]]),
        student=torch.tensor([2, 3]),
        teacher=torch.tensor([2, 3]),
        weight=torch.tensor(weight),
    )


@pytest.mark.parametrize("teacher", ["policy", "teacher"])
def test_a_divergence_compares_the_rows_that_predict_the_paired_tokens(teacher):
    model, other = Bigram(), Bigram(seed=1)
    view = ModelView(model, rollouts=SEQS, teacher=other)
    value = view.divergence(_hints(), Divergence(), teacher=teacher)
    reads = model.table if teacher == "policy" else other.table
    # token 3 follows 2 for the student and 5 for the teacher; token 4 follows 3 for both
    expected = divergence(model.table[[2, 3]], reads[[5, 3]], Divergence())
    assert torch.allclose(value, expected)
    value.sum().backward()
    assert model.table.grad[2].any()
    assert not model.table.grad[5].any()  # only the teacher read it
    assert other.table.grad is None


def test_filler_runs_both_forwards_and_gives_a_finite_value_on_the_graph():
    model = Bigram()
    view = ModelView(model, rollouts=SEQS)
    filler = Hints(Seqs.from_lists([[1]]), torch.tensor([0]), torch.tensor([0]), torch.tensor([0.0]))
    value = view.divergence(filler, Divergence())
    assert model.forwards == 2
    assert value.isfinite().all()
    assert value.requires_grad


@pytest.mark.parametrize(
    ("student", "teacher", "said"),
    [
        (1, 2, "hint token 0 pairs rollout token 1 with teacher token 2: student and teacher have different tokens"),
        # both are token 5, but the rollout's second sequence begins with it
        (4, 1, "hint token 0 pairs rollout token 4 with teacher token 1: nothing predicts it"),
    ],
)
def test_hints_that_do_not_line_up_are_refused(student, teacher, said):
    hints = Hints(
        Seqs.from_lists([[5, 5, 3, 4]]), torch.tensor([student]), torch.tensor([teacher]), torch.tensor([1.0])
    )
    with pytest.raises(RunFailed) as caught:
        ModelView(Bigram(), rollouts=SEQS).divergence(hints, Divergence())
    assert str(caught.value) == (
        f"{said}\n  fix: the channel's collate must point both at one and the same token, not the first of its sequence"
    )


def test_a_divergence_without_rollouts_is_refused():
    with pytest.raises(RunFailed, match=r"^a divergence needs rollouts, and this view has none"):
        ModelView(Bigram(), rollouts=None).divergence(_hints(), Divergence())


def test_a_model_that_is_not_there_is_named():
    view = ModelView(Bigram(), rollouts=SEQS)
    with pytest.raises(RunFailed, match=r"^a loss asks for the reference model, and this trainer was given none$"):
        view.logps(SEQS, model="reference", grad=False, temperature=1.0)


def test_logits_are_the_scaled_rows_that_predict_the_tokens():
    model = Bigram()
    rows = ModelView(model, rollouts=SEQS).logits(SEQS, torch.tensor([3, 6]), grad=True, temperature=2.0)
    assert torch.allclose(rows, model.table[[3, 2]] / 2)


@pytest.mark.parametrize("sequences", [[], [[]], [[1, 2], [], [3]]], ids=["none", "empty", "one-empty-among-others"])
def test_empty_sequences_run_a_forward_and_stay_on_the_graph(sequences):
    model, seqs = Bigram(), Seqs.from_lists(sequences)
    logps = ModelView(model, rollouts=seqs).logps(seqs, grad=True, temperature=1.0)
    assert model.forwards == 1
    assert logps.shape == seqs.ids.shape
    logps.sum().backward()
    assert model.table.grad is not None
    assert model.table.grad.isfinite().all()


def test_padding_side_and_packing_do_not_matter_on_a_real_transformer(tiny_model_folder):
    from composer_core.hf.models import load_policy

    model = load_policy(tiny_model_folder, dtype="float32")
    sequences = [[10, 11, 12, 13, 14], [20, 21], [30, 31, 32]]
    together = Seqs.from_lists(sequences)
    alone = [Seqs.from_lists([sequence]) for sequence in sequences]
    packed = ModelView(model, rollouts=together).logps(together, grad=False, temperature=1.0)
    single = [ModelView(model, rollouts=one).logps(one, grad=False, temperature=1.0) for one in alone]
    assert torch.allclose(packed, torch.cat(single), atol=1e-5)


# -- LeafView ----------------------------------------------------------------------------------------------------------


def test_coefficients_times_log_probs_have_the_channels_gradient():
    model = Bigram()
    batch = Batch(rollouts=Rollouts(SEQS, action=torch.tensor([0, 1, 0, 1, 0, 0, 1]).bool()))

    class Squares(Brevity):
        """Not linear in the log-probs, so that coefficients depend on them."""

        def loss(self, view, batch):
            term = super().loss(view, batch)
            return type(term)(sum=term.sum**2, count=term.count)

    Squares().loss(ModelView(model, rollouts=SEQS), batch).sum.backward()
    direct = model.table.grad.clone()

    logps = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=1.0)
    leaf = LeafView([KnownLogps(SEQS, logps)], temperature=1.0)
    (coefficients,) = leaf.coefficients(Squares().loss(leaf, batch).sum)
    model.table.grad = None
    (coefficients * logps).sum().backward()
    assert torch.allclose(model.table.grad, direct, rtol=1e-6)


def test_other_models_log_probs_are_constants():
    known = [KnownLogps(SEQS, torch.ones(7)), KnownLogps(SEQS, torch.full((7,), 3.0), model="reference")]
    view = LeafView(known, temperature=1.0)
    reference = view.logps(SEQS, model="reference", grad=False, temperature=1.0)
    loss = (view.logps(SEQS, grad=True, temperature=1.0) * reference).sum()
    assert [c.tolist() for c in view.coefficients(loss)] == [[3.0] * 7]


def test_a_loss_that_uses_no_log_prob_has_zero_coefficients():
    view = LeafView([KnownLogps(SEQS, torch.ones(7))], temperature=1.0)
    assert view.coefficients(torch.tensor(1.0))[0].tolist() == [0.0] * 7


def test_sequences_are_found_by_content_and_unknown_ones_are_refused():
    view = LeafView([KnownLogps(SEQS, torch.ones(7))], temperature=1.0)
    equal = Seqs(SEQS.ids.clone(), SEQS.cu.clone())
    assert view.logps(equal, grad=False, temperature=1.0).tolist() == [1.0] * 7
    with pytest.raises(
        RunFailed, match=r"^a loss asks for policy log-probs of sequences that this trainer has none of$"
    ):
        view.logps(Seqs.from_lists([[9]]), grad=False, temperature=1.0)


@pytest.mark.parametrize(
    ("ask", "what", "need"),
    [
        (lambda view: view.divergence(_hints(), Divergence()), "divergence", "divergence-full"),
        (lambda view: view.logits(SEQS, torch.tensor([1]), grad=True, temperature=1.0), "logits", "logits"),
    ],
)
def test_what_needs_a_model_is_refused_with_the_need(ask, what, need):
    with pytest.raises(RunFailed) as caught:
        ask(LeafView([], temperature=1.0))
    assert str(caught.value) == (
        f"a loss asks for {what} (need {need!r}), and this trainer has log-probs only\n"
        "  fix: declare the need in the channel's contribution: `plan` then refuses the spec or takes an alternative"
    )


def test_log_one_third_is_what_a_uniform_model_gives():
    model = Bigram(vocabulary=3)
    nn.init.zeros_(model.table)
    seqs = Seqs.from_lists([[0, 1, 2]])
    logps = ModelView(model, rollouts=seqs).logps(seqs, grad=True, temperature=1.0)
    assert logps.tolist() == pytest.approx([0.0, -math.log(3), -math.log(3)])


SAMPLED = Divergence(DivergenceKind.KL_STUDENT_TEACHER, support=Support.SAMPLED)


def test_a_leaf_view_estimates_the_divergence_from_sampled_tokens():
    model, other = Bigram(), Bigram(seed=1)
    view = ModelView(model, rollouts=SEQS, teacher=other)
    hints = _hints(weight=(1.0, 0.0))
    known = [
        KnownLogps(SEQS, view.logps(SEQS, grad=True, temperature=1.0)),
        KnownLogps(hints.seqs, view.logps(hints.seqs, model="teacher", grad=False, temperature=1.0), "teacher"),
    ]
    leaf = LeafView(known, temperature=1.0, rollouts=SEQS)
    values = leaf.divergence(hints, SAMPLED, teacher="teacher")
    gap = (model.table.log_softmax(-1)[2, 3] - other.table.log_softmax(-1)[5, 3]).item()
    assert values.tolist() == pytest.approx([gap, 0.0])  # the second is filler
    (coefficients,) = leaf.coefficients(values.sum())
    assert coefficients.tolist() == pytest.approx([0.0, 0.0, gap, 0.0, 0.0, 0.0, 0.0])
    assert torch.allclose(view.divergence(hints, SAMPLED, teacher="teacher"), values)


def test_a_leaf_view_refuses_every_other_divergence():
    leaf = LeafView([KnownLogps(SEQS, torch.zeros(7))], temperature=1.0, rollouts=SEQS)
    with pytest.raises(RunFailed, match=r"^a loss asks for divergence \(need 'divergence-full'\)"):
        leaf.divergence(_hints(), Divergence())


def test_log_probs_are_computed_once_for_the_same_question():
    view = ModelView(Bigram(), rollouts=SEQS)
    first = view.logps(SEQS, grad=True, temperature=1.0)
    assert view.logps(SEQS, grad=True, temperature=1.0) is first
    assert view.logps(SEQS, grad=True, temperature=0.5) is not first
    assert not view.logps(SEQS, grad=False, temperature=1.0).requires_grad


@pytest.mark.parametrize("spec", [Divergence(), SAMPLED], ids=["jsd", "sampled"])
def test_what_filler_points_at_reaches_neither_value_nor_gradient(spec):
    model = Bigram()
    with torch.no_grad():
        model.table[3] = math.nan  # predicts token 4, which only the second hint is about
    values = ModelView(model, rollouts=SEQS, teacher=Bigram(seed=1)).divergence(
        _hints(weight=(1.0, 0.0)), spec, teacher="teacher"
    )
    values.sum().backward()
    assert values.isfinite().all()
    assert model.table.grad.isfinite().all()
    assert model.table.grad[2].any()


def test_filler_has_no_divergence_whatever_it_points_at():
    view = ModelView(Bigram(), rollouts=SEQS, teacher=Bigram(seed=1))
    values = view.divergence(_hints(weight=(1.0, 0.0)), Divergence(), teacher="teacher")
    assert values[0] > 0
    assert values[1] == 0
