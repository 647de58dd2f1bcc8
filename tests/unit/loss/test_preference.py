"""Preference forms on numbers worked by hand, and what holds for all of them."""

import math

import pytest
import torch

from composer_core.batch import Seqs
from composer_core.loss import preference
from composer_core.loss.preference import (
    FORMS,
    PairLogps,
    answer_logps,
    avg_sequence_logprob,
    complete_pairs,
    dpo_loss,
    log_odds,
    odds_ratio,
    reference_drift,
    simpo_loss,
)
from composer_core.loss.preference_forms import PREFERENCE_FORMS

NAN = math.nan


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def _pair(*, dtype=torch.float64, drift=0.25):
    """One pair: W = -3 + 4 = 1 over 2 tokens, L = -6 + 4 = -2 over 4 tokens; means -1.5 and -1.5."""

    def one(value, grad=False):
        return torch.tensor([value], dtype=dtype, requires_grad=grad)

    return PairLogps(
        chosen=one(-3.0, grad=True), rejected=one(-6.0, grad=True), chosen_tokens=one(2.0), rejected_tokens=one(4.0),
        ref_chosen=one(-4.0, grad=True), ref_rejected=one(-4.0, grad=True), drift=torch.tensor(drift, dtype=dtype),
    )  # fmt: skip


# form -> numbers, loss, slope by the chosen and by the rejected sum
BY_HAND = {
    # margin 3: -log s(0.3), slope -0.1 s(-0.3)
    "dpo": ({"beta": 0.1}, math.log(1 + math.exp(-0.3)), -0.1 * sigmoid(-0.3), 0.1 * sigmoid(-0.3)),
    # (-0.8 ls(0.3) + 0.2 ls(-0.3)) / 0.6, slope -0.1 (0.8 s(-0.3) + 0.2 s(0.3)) / 0.6
    "robust": (
        {"beta": 0.1, "label_smoothing": 0.2},
        (-0.8 * math.log(sigmoid(0.3)) + 0.2 * math.log(sigmoid(-0.3))) / 0.6,
        -0.1 * (0.8 * sigmoid(-0.3) + 0.2 * sigmoid(0.3)) / 0.6,
        0.1 * (0.8 * sigmoid(-0.3) + 0.2 * sigmoid(0.3)) / 0.6,
    ),
    # 1/2 + 2/4 = 1 per token, 1 - 1 / (2 x 0.25) = -1: square 1, slope 2 x -1 / 2 tokens
    "ipo": ({"beta": 0.25}, 1.0, -1.0, 0.5),
    # equal means: -log s(-1), slope -2 s(1) / 2 tokens
    "simpo": ({"beta": 2.0, "gamma": 1.0}, math.log(1 + math.e), -sigmoid(1), sigmoid(1) / 2),
    # -log s(5), slope -5 s(-5) / 2
    "sigmoid-norm": ({"beta": 5.0}, math.log(1 + math.exp(-5)), -2.5 * sigmoid(-5), 1.25 * sigmoid(-5)),
    # s(-0.1) + s(-0.2)
    "apo-zero": (
        {"beta": 0.1},
        sigmoid(-0.1) + sigmoid(-0.2),
        -0.1 * sigmoid(0.1) * sigmoid(-0.1),
        0.1 * sigmoid(0.2) * sigmoid(-0.2),
    ),
    # s(0.1) + s(-0.3)
    "apo-down": (
        {"beta": 0.1},
        sigmoid(0.1) + sigmoid(-0.3),
        0.1 * (sigmoid(0.1) * sigmoid(-0.1) - sigmoid(0.3) * sigmoid(-0.3)),
        0.1 * sigmoid(0.3) * sigmoid(-0.3),
    ),
    # drift 0.25: s(0.1 (0.25 - 1)) + 2 s(0.1 (-2 - 0.25))
    "kto": (
        {"beta": 0.1, "undesirable_weight": 2.0},
        sigmoid(-0.075) + 2 * sigmoid(-0.225),
        -0.1 * sigmoid(0.075) * sigmoid(-0.075),
        0.2 * sigmoid(0.225) * sigmoid(-0.225),
    ),
    # equal means: 1.5 + 0.1 ln 2; d log-odds / d logp = 1 / (1 - p), p = e^-1.5, halved by s(0) = 1/2
    "orpo": (
        {"beta": 0.1},
        1.5 + 0.1 * math.log(2),
        -0.5 - 0.1 * 0.5 / (1 - math.exp(-1.5)) / 2,
        0.1 * 0.5 / (1 - math.exp(-1.5)) / 4,
    ),
    "imitate": ({}, 1.5, -0.5, 0.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_value_and_slopes_worked_by_hand(name):
    numbers, value, by_chosen, by_rejected = BY_HAND[name]
    pair = _pair()
    loss = FORMS[name](pair, **numbers)
    loss.sum().backward()
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(value)
    assert pair.chosen.grad.item() == pytest.approx(by_chosen)
    assert pair.rejected.grad.item() == pytest.approx(by_rejected)
    assert pair.ref_chosen.grad is None, "the reference is a constant"
    assert pair.ref_rejected.grad is None


def test_every_row_of_the_table_has_its_function_which_takes_its_numbers():
    assert list(FORMS) == list(PREFERENCE_FORMS)
    for name, form in PREFERENCE_FORMS.items():
        assert FORMS[name].__kwdefaults__ in (None, dict(form.defaults)), name
        assert FORMS[name](_pair(), **form.defaults).isfinite().all(), name


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_finite_differences(name):
    generator = torch.Generator().manual_seed(0)
    sums = [-5 * torch.rand(3, generator=generator, dtype=torch.float64) - 1 for _ in range(4)]
    lengths = torch.tensor([2.0, 1.0, 7.0], dtype=torch.float64), torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64)

    def loss(chosen, rejected):
        return FORMS[name](PairLogps(chosen, rejected, *lengths, *sums[2:], drift=torch.tensor(0.3)))

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in sums[:2]])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("gap", [5e3, -5e3], ids=["right", "wrong"])
def test_an_extreme_margin_is_finite_in_value_and_gradient(name, gap):
    chosen, rejected = torch.tensor([gap - 6e3], requires_grad=True), torch.tensor([-6e3], requires_grad=True)
    one, ref = torch.ones(1), torch.full((1,), -6e3)
    loss = FORMS[name](PairLogps(chosen, rejected, one, one, ref, ref, drift=torch.tensor(0.0)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()


@pytest.mark.parametrize("name", FORMS)
def test_one_pair_never_sees_another(name):
    generator = torch.Generator().manual_seed(1)
    rows = [-4 * torch.rand(5, generator=generator) - 0.5 for _ in range(4)]
    lengths = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    order = torch.tensor([3, 0, 4, 2, 1])

    def loss(at):
        drift = torch.tensor(0.1)
        chosen, rejected, ref_chosen, ref_rejected = (row[at] for row in rows)
        pairs = PairLogps(chosen, rejected, lengths[at], lengths.flip(0)[at], ref_chosen, ref_rejected, drift)
        return FORMS[name](pairs)

    whole = loss(torch.arange(5))
    assert torch.equal(loss(order), whole[order])
    assert torch.equal(torch.cat([loss(torch.arange(2)), loss(torch.arange(2, 5))]), whole)


def test_dpo_with_smoothing_is_the_mix_of_both_labels():
    pair = _pair()
    mixed = FORMS["dpo"](pair, beta=0.1, label_smoothing=0.2).item()
    assert mixed == pytest.approx(-0.8 * math.log(sigmoid(0.3)) - 0.2 * math.log(sigmoid(-0.3)))


def test_kto_without_drift_is_apo_zero():
    pair = _pair(drift=0.0)
    assert FORMS["kto"](pair, beta=0.1).item() == pytest.approx(FORMS["apo-zero"](pair, beta=0.1).item())


def test_imitation_gives_the_rejected_answer_a_zero_gradient_whatever_it_holds():
    one = torch.ones(1)
    rejected = torch.tensor([NAN], requires_grad=True)
    loss = FORMS["imitate"](PairLogps(torch.tensor([-3.0]), rejected, one, one))
    loss.sum().backward()
    assert (loss.item(), rejected.grad.item()) == (3.0, 0.0)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, form in PREFERENCE_FORMS.items() if form.reference])
def test_a_missing_reference_is_refused(name):
    one = torch.ones(1)
    with pytest.raises(ValueError) as caught:
        FORMS[name](PairLogps(-one, -one, one, one, drift=torch.tensor(0.0)))
    assert str(caught.value) == "ref_chosen is None: this preference loss compares the policy with a reference model"


def test_a_missing_drift_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError) as caught:
        FORMS["kto"](PairLogps(-one, -one, one, one, -one, -one))
    assert str(caught.value) == ("drift is None: kto compares each answer with the policy's drift, see reference_drift")


def test_a_drift_of_single_pairs_is_refused():
    one = torch.ones(2)
    with pytest.raises(ValueError, match=r"^drift \(2,\) must be a scalar: it is that of all pairs$"):
        PairLogps(-one, -one, one, one, drift=one)


def test_tensors_of_another_number_of_pairs_are_refused():
    one = torch.ones(2)
    with pytest.raises(ValueError) as caught:
        PairLogps(-one, -torch.ones(1), one, one)
    assert str(caught.value) == (
        "chosen (2,), rejected (1,), chosen_tokens (2,), rejected_tokens (2,): the shapes must be equal "
        "(one entry per pair)"
    )


@pytest.mark.parametrize("name", [name for name, form in PREFERENCE_FORMS.items() if "beta" in form.defaults])
def test_a_beta_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=r"^beta must be > 0, got 0$"):
        FORMS[name](_pair(), beta=0)


@pytest.mark.parametrize("name", ["dpo", "robust", "simpo"])
def test_a_smoothing_that_prefers_nobody_is_refused(name):
    with pytest.raises(ValueError) as caught:
        FORMS[name](_pair(), label_smoothing=0.5)
    assert str(caught.value) == "label_smoothing must be in [0, 0.5), got 0.5: at 0.5 neither answer is preferred"


# -- parts and fronts --------------------------------------------------------------------------------------------------


def test_simpo_loss_is_the_mean_over_pairs_of_the_margin_beyond_gamma():
    # 2 x 0.9 - 1 = 0.8 and 2 x 0.7 - 1 = 0.4
    loss = simpo_loss(torch.tensor([-2.1, -1.8]), torch.tensor([-3.0, -2.5]), beta=2.0, gamma=1.0)
    assert loss.item() == pytest.approx(-(math.log(sigmoid(0.8)) + math.log(sigmoid(0.4))) / 2)


def test_dpo_loss_is_the_mean_over_pairs():
    loss = dpo_loss(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.1)
    assert loss.item() == pytest.approx((-math.log(sigmoid(0.3)) + math.log(2)) / 2)


@pytest.mark.parametrize("loss", [simpo_loss, dpo_loss])
def test_no_pair_gives_zero_joined_to_the_graph(loss):
    chosen = torch.zeros(0, requires_grad=True)
    value = loss(chosen, torch.zeros(0))
    value.backward()
    assert value.item() == 0
    assert chosen.grad.shape == (0,)


@pytest.mark.parametrize("loss", [simpo_loss, dpo_loss])
def test_fronts_refuse_shapes_that_would_broadcast(loss):
    with pytest.raises(ValueError, match=r"\(3,\), .* \(1,\): the shapes must be equal \(one entry per pair\)$"):
        loss(torch.zeros(3), torch.zeros(1))


def test_the_odds_ratio_is_finite_where_a_token_is_certain_or_hopeless():
    chosen, rejected = torch.tensor([0.0, -200.0], requires_grad=True), torch.tensor([-200.0, 0.0])
    value = odds_ratio(chosen, rejected)
    value.sum().backward()
    assert value.isfinite().all()
    assert chosen.grad.isfinite().all()


def test_log_odds_keep_their_digits_on_both_sides():
    avg = torch.tensor([math.log(0.999), math.log(0.5), math.log(1e-6)], dtype=torch.float64)
    expected = [math.log(0.999 / 0.001), 0.0, math.log(1e-6 / (1 - 1e-6))]
    assert log_odds(avg).tolist() == pytest.approx(expected, abs=1e-12)


def test_drift_is_the_clamped_mean_without_a_gradient():
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    drift = reference_drift(logps, torch.tensor([-2.0, -2.5]))
    assert (drift.item(), drift.requires_grad) == (0.75, False)
    assert reference_drift(logps, torch.zeros(2)).item() == 0.0
    assert reference_drift(torch.zeros(0), torch.zeros(0)).item() == 0.0


# -- sequence log-probs ------------------------------------------------------------------------------------------------


def test_one_mask_gives_sum_and_length_of_each_answer():
    seqs = Seqs.from_lists([[5, 6, 7], [5], [5, 8]])
    logps = torch.tensor([NAN, -1.0, -2.0, NAN, NAN, -4.0], requires_grad=True)
    action = torch.tensor([False, True, True, False, False, True])
    sums, tokens = answer_logps(logps, action, seqs)
    sums.sum().backward()
    assert (sums.tolist(), tokens.tolist()) == ([-3.0, 0.0, -4.0], [2.0, 0.0, 1.0])
    assert logps.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]


def test_pairs_with_an_empty_side_are_not_complete():
    assert complete_pairs(torch.tensor([2.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 0.0])).tolist() == [True, False, False]


def test_the_mean_log_prob_is_over_the_masked_tokens_only():
    logps = torch.tensor([[NAN, -1.0, -3.0, NAN], [NAN, NAN, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])
    mean = avg_sequence_logprob(logps, mask)
    mean.sum().backward()
    assert mean.tolist() == [-2.0, 0.0]
    assert logps.grad.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0] * 4]


def test_padding_on_either_side_changes_no_mean():
    logps, mask = torch.tensor([[-1.0, -3.0]]), torch.tensor([[1, 1]])
    nothing, off = torch.full((1, 3), math.inf), torch.zeros(1, 3, dtype=torch.int64)
    for sides in ((nothing, logps), (logps, nothing)):
        masks = (off, mask) if sides[0] is nothing else (mask, off)
        assert avg_sequence_logprob(torch.cat(sides, 1), torch.cat(masks, 1)).item() == -2.0


def test_half_precision_is_summed_in_single():
    logps = torch.full((1, 1001), -1.0, dtype=torch.bfloat16)
    assert avg_sequence_logprob(logps, torch.ones(1, 1001)).item() == -1.0


@pytest.mark.parametrize(
    ("logps", "mask", "message"),
    [
        ((2, 3), (2, 1), r"model_logprobs \(2, 3\), response_mask \(2, 1\): the shapes must be equal \(\(B, T\), .*\)"),
        ((3,), (3,), r"model_logprobs must be \(B, T\), got \(3,\)"),
    ],
)
def test_masks_that_do_not_fit_are_refused(logps, mask, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        avg_sequence_logprob(torch.zeros(logps), torch.ones(mask))


def test_labels_in_the_place_of_a_mask_are_refused():
    with pytest.raises(ValueError, match=r"^response_mask must be a mask of 0 and 1; from Hugging Face labels it is"):
        avg_sequence_logprob(torch.zeros(1, 3), torch.tensor([[-100, 7, 8]]))


def test_gradients_of_the_parts_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(2)

    def leaf(*shape):
        return (-3 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.1).requires_grad_()

    seqs, action = Seqs.from_lists([[5, 6, 7], [5, 8]]), torch.tensor([False, True, True, False, True])
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    for loss in (simpo_loss, dpo_loss, odds_ratio):
        assert torch.autograd.gradcheck(loss, (leaf(4), leaf(4))), loss.__name__
    assert torch.autograd.gradcheck(lambda logps: avg_sequence_logprob(logps, mask), leaf(2, 3))
    assert torch.autograd.gradcheck(lambda logps: answer_logps(logps, action, seqs)[0], leaf(5))
    for half in (preference.kto_desirable, preference.kto_undesirable):
        assert torch.autograd.gradcheck(lambda ratio, half=half: half(ratio, 0.3, beta=0.5), leaf(4)), half.__name__
