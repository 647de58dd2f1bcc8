import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_core.batch import Seqs
from composer_core.errors import RunFailed
from composer_core.loss.reduce import (
    COUNT_OF,
    aggregate,
    aggregate_selected,
    global_count,
    masked_mean,
    masked_sum,
    segment_mean,
    segment_sum,
    select,
)
from composer_core.protocols import Aggregation

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
def test_a_masked_value_reaches_neither_sum_nor_gradient(bad):
    values = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, True]))
    total.backward()
    assert total.item() == 4.0
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_selecting_before_exp_keeps_the_gradient_finite_where_selecting_after_does_not():
    mask = torch.tensor([True, False])
    before = torch.tensor([0.0, 1000.0], requires_grad=True)
    masked_sum(select(before, mask).exp(), mask).backward()
    assert before.grad.tolist() == [1.0, 0.0]
    # the trap this file exists for: e^1000 overflows, and 0 x inf in exp's backward is NaN
    after = torch.tensor([0.0, 1000.0], requires_grad=True)
    masked_sum(after.exp(), mask).backward()
    assert after.grad[1].isnan()


def test_an_empty_mask_gives_zero_that_is_joined_to_the_graph():
    values = torch.tensor([NAN, 2.0], requires_grad=True)
    for result in (
        masked_sum(values, torch.tensor([False, False])),
        masked_mean(values, torch.tensor([False, False]), count=0),
    ):
        assert result.item() == 0.0
        assert torch.autograd.grad(result, values)[0].tolist() == [0.0, 0.0]


def test_no_tokens_at_all_give_zero_that_is_joined_to_the_graph():
    values = torch.zeros(0, requires_grad=True)
    result = masked_sum(values * 2, torch.zeros(0, dtype=torch.bool))
    assert result.item() == 0.0
    assert result.requires_grad


def test_masked_mean_divides_by_the_count_it_is_given_not_by_its_own():
    values, mask = torch.tensor([2.0, 4.0, 9.0]), torch.tensor([True, True, False])
    assert masked_mean(values, mask, count=12).item() == 0.5  # (2 + 4) / 12
    assert masked_mean(values, mask, count=torch.tensor(3)).item() == 2.0  # (2 + 4) / 3


def test_half_precision_is_summed_in_float32():
    # in bfloat16, 256 + 1 is 256: a sum of ones would stop growing there
    values = torch.ones(1000, dtype=torch.bfloat16)
    total = masked_sum(values, torch.ones(1000, dtype=torch.bool))
    assert total.dtype is torch.float32
    assert total.item() == 1000.0
    assert segment_sum(values, Seqs.from_lists([[0] * 600, [0] * 400])).tolist() == [600.0, 400.0]


def test_double_precision_is_kept():
    assert masked_sum(torch.ones(2, dtype=torch.float64), torch.tensor([True, True])).dtype is torch.float64


def test_segment_sums_follow_the_sequences_and_an_empty_one_gives_zero():
    seqs = Seqs.from_lists([[7, 7], [], [7, 7, 7]])
    assert segment_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), seqs).tolist() == [3.0, 0.0, 12.0]


def test_segment_mean_counts_selected_tokens_only():
    seqs = Seqs.from_lists([[7, 7], [7, 7, 7], [7]])
    mask = torch.tensor([True, False, True, True, False, False])
    # (1) / 1, (3 + 4) / 2, nothing selected
    assert segment_mean(torch.tensor([1.0, NAN, 3.0, 4.0, INF, 6.0]), mask, seqs).tolist() == [1.0, 3.5, 0.0]


def test_segment_sum_refuses_values_of_another_length():
    with pytest.raises(ValueError, match=r"^values have shape \(2,\), the sequences hold 3 tokens$"):
        segment_sum(torch.ones(2), Seqs.from_lists([[7, 7, 7]]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_segment_sum_equals_a_loop_over_the_sequences(lengths, random):
    values = [[random.uniform(-9, 9) for _ in range(n)] for n in lengths]
    flat = torch.tensor([v for sequence in values for v in sequence], dtype=torch.float64)
    seqs = Seqs.from_lists([[0] * n for n in lengths])
    assert segment_sum(flat, seqs).tolist() == pytest.approx([math.fsum(sequence) for sequence in values])


# two sequences, losses (1, 2) and (6), the first token of the second masked
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Aggregation.TOKEN_MEAN, 9.0),  # 1 + 2 + 6
        (Aggregation.TOKEN_MEAN_LOCAL, 3.0),  # (1 + 2 + 6) / 3
        (Aggregation.SEQUENCE_MEAN, 7.5),  # (1 + 2) / 2 + 6 / 1
        (Aggregation.SEQUENCE_SUM, 9.0),  # (1 + 2) + 6
        (Aggregation.CONSTANT, 9.0),  # 1 + 2 + 6
    ],
)
def test_aggregation_sums_what_its_count_will_divide(how, expected):
    seqs = Seqs.from_lists([[7, 7], [7, 7]])
    mask = torch.tensor([True, True, False, True])
    assert aggregate(torch.tensor([1.0, 2.0, NAN, 6.0]), mask, seqs, how=how).item() == expected


def test_every_aggregation_names_its_count():
    assert set(COUNT_OF) == set(Aggregation)


def test_a_count_is_at_least_one_and_the_first_known_name_wins():
    assert global_count({"tokens": 0.0}, "tokens") == 1.0
    assert global_count({"tokens": 5.0, "a.tokens": 2.0}, "a.tokens", "tokens") == 2.0
    assert global_count({"tokens": 5.0}, "a.tokens", "tokens") == 5.0


def test_a_count_that_nobody_made_is_named():
    with pytest.raises(RunFailed) as caught:
        global_count({"tokens": 5.0, "sequences": 2.0}, "a.pairs", "pairs")
    assert str(caught.value) == (
        "a loss is to be divided by a count that nobody made: neither 'a.pairs' nor 'pairs' is among the counts of "
        "this step (sequences, tokens)\n"
        "  fix: return this name from the channel's `count`, or name a count that the backend makes"
    )


def test_a_mask_of_another_shape_or_type_is_refused():
    with pytest.raises(ValueError) as caught:
        masked_sum(torch.zeros(3), torch.ones(1, dtype=torch.bool))
    assert str(caught.value) == "values (3,), mask (1,): the shapes must be equal (one entry each)"
    with pytest.raises(ValueError, match=r"^mask must be torch.bool, got torch.int64$"):
        select(torch.zeros(3), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("how", Aggregation)
def test_selected_losses_give_the_same_sum(how):
    seqs, mask = Seqs.from_lists([[1, 2, 3], [4]]), torch.tensor([False, True, True, False])
    values = torch.tensor([5.0, 1.0, 3.0, 7.0])
    assert aggregate_selected(select(values, mask), mask, seqs, how=how) == aggregate(values, mask, seqs, how=how)
