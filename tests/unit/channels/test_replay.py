"""Pairs by hand; the loss forms are tested in tests/unit/loss/test_preference.py."""

import logging
import math

import pytest
import torch

from composer_core.batch import Batch
from composer_core.channels.replay import Replay
from composer_core.channels.rows import pair_row
from composer_core.channels.settings import ReplaySettings
from composer_core.errors import RunFailed, UsageError

ROWS = [
    pair_row([1, 2], [3, 4, 5], [6], reference=(-6.0, -1.0)),
    pair_row([1], [7], [8, 9], reference=(-2.0, -3.0)),
]


class View:
    """Log-prob of a token: -id / 10 under the policy, -id / 20 under the reference."""

    def __init__(self):
        self.asked = []

    def logps(self, seqs, *, model="policy", grad, temperature):
        self.asked.append((model, grad, temperature, seqs.ids.tolist()))
        return (-seqs.ids / (10.0 if model == "policy" else 20.0)).requires_grad_(grad)


def _replay(rows=ROWS, **settings):
    channel = Replay(ReplaySettings(**settings))
    channel.take_pairs(rows)
    return channel


def _term(channel, rows=ROWS):
    view = View()
    return channel.loss(view, Batch(pairs=channel.collate(rows, None), temperature=0.3)), view


def test_pairs_are_packed_and_only_answers_are_scored():
    pairs = _replay().collate([ROWS[0], None, ROWS[1]], None)
    assert pairs.chosen.ids.tolist() == [1, 2, 3, 4, 5, 1, 7]
    assert pairs.chosen_action.tolist() == [False, False, True, True, True, False, True]
    assert pairs.rejected.cu.tolist() == [0, 3, 6]
    assert pairs.rejected_action.tolist() == [False, False, True, False, True, True]
    assert pairs.weight.tolist() == [1.0, 1.0]
    assert (pairs.ref_chosen.tolist(), pairs.ref_rejected.tolist()) == ([-6.0, -2.0], [-1.0, -3.0])


def test_dpo_on_stored_reference_log_probs():
    term, view = _term(_replay(beta=0.5))
    # chosen -1.2 and -0.7, rejected -0.6 and -1.7; W = 4.8, 1.3; L = 0.4, 1.3
    margins = [4.8 - 0.4, 1.3 - 1.3]
    assert term.sum.item() == pytest.approx(sum(math.log(1 + math.exp(-0.5 * m)) for m in margins))
    assert term.count == "pairs"
    assert term.metrics["margin"].item() == pytest.approx(4.4)
    assert term.metrics["accuracy"].item() == pytest.approx(1.0)  # a tie is no win
    # pairs are nobody's samples at the rollouts' temperature
    assert {(model, temperature) for model, _, temperature, _ in view.asked} == {("policy", 1.0)}


def test_the_reference_model_is_asked_without_gradient():
    term, view = _term(_replay([pair_row([1, 2], [3, 4, 5], [6])], reference="model"), [ROWS[0]])
    # reference -0.6 and -0.3: W = -0.6, L = -0.3
    assert term.sum.item() == pytest.approx(math.log(1 + math.exp(0.1 * 0.3)))
    assert [(model, grad) for model, grad, _, _ in view.asked] == [
        ("policy", True), ("policy", True), ("reference", False), ("reference", False)
    ]  # fmt: skip


def test_simpo_reads_means_and_no_reference():
    term, view = _term(_replay(variant="simpo"))
    margins = [-0.4 + 0.6, -0.7 + 0.85]
    assert term.sum.item() == pytest.approx(sum(math.log(1 + math.exp(-(2 * m - 1))) for m in margins))
    assert term.metrics["margin"].item() == pytest.approx(sum(margins))
    assert len(view.asked) == 2


def test_imitation_does_not_read_the_rejected_answer():
    term, view = _term(_replay(variant="imitate"))
    assert term.sum.item() == pytest.approx(0.4 + 0.7)
    assert len(view.asked) == 1
    assert term.metrics == {}


@pytest.mark.parametrize("variant", ["dpo", "ipo", "simpo", "orpo", "imitate"])
def test_a_micro_batch_without_a_pair_runs_the_same_forwards_for_nothing(variant):
    channel = _replay(variant=variant)
    empty, view = _term(channel, [None, None])
    _, busy = _term(channel)
    assert empty.sum.item() == 0.0
    assert empty.sum.requires_grad
    assert len(view.asked) == len(busy.asked)


def test_counts_are_pairs_and_the_tokens_of_their_answers():
    channel = _replay()
    assert [channel.count(row) for row in (*ROWS, None)] == [
        {"pairs": 1.0, "tokens": 4.0},
        {"pairs": 1.0, "tokens": 3.0},
        {"pairs": 0.0, "tokens": 0.0},
    ]


# -- drawing --


def _numbered(n, **settings):
    return _replay([pair_row([1], [i], [i]) for i in range(n)], variant="simpo", **settings)


def _drawn(channel, step, rank=0, world=1):
    return [row["chosen"][0] for row in channel.draw(step, rank, world)]


def test_each_pair_comes_once_per_round_in_an_order_of_its_own():
    channel = _numbered(6, pairs_per_step=3)
    rounds = [_drawn(channel, step) + _drawn(channel, step + 1) for step in range(0, 40, 2)]
    assert all(sorted(one) == list(range(6)) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 10


def test_ranks_share_a_step_and_a_step_is_the_same_whenever_it_is_asked():
    channel, again = _numbered(50, pairs_per_step=5), _numbered(50, pairs_per_step=5)
    whole = _drawn(channel, 7)
    assert sorted(_drawn(again, 7, 0, 2) + _drawn(again, 7, 1, 2)) == sorted(whole)
    assert (len(_drawn(again, 7, 0, 2)), len(_drawn(again, 7, 1, 2))) == (3, 2)
    assert _drawn(again, 7) == whole != _drawn(_numbered(50, pairs_per_step=5, seed=1), 7)


def test_few_pairs_come_more_than_once_in_a_step():
    assert sorted(_drawn(_numbered(2, pairs_per_step=4), 0)) == [0, 0, 1, 1]


# -- taking pairs --


def test_pairs_with_an_empty_or_too_long_side_are_left_out_and_counted(caplog):
    rows = [*ROWS, pair_row([1], [], [2]), pair_row([], [1], [2]), pair_row([1], [2] * 5, [3])]
    channel = Replay(ReplaySettings(variant="simpo", max_tokens=5, pairs_per_step=9))
    with caplog.at_level(logging.WARNING):
        channel.take_pairs(rows)
    assert {tuple(row["chosen"]) for row in channel.draw(0, 0, 1)} == {(3, 4, 5), (7,)}
    assert caplog.messages == ["replay: 3 of 5 pairs have an empty or too long side, left out"]


def test_nothing_left_is_an_error():
    with pytest.raises(UsageError) as caught:
        Replay(ReplaySettings(max_tokens=2)).take_pairs([ROWS[0]])
    assert str(caught.value) == (
        "data.pairs: none of the 1 pairs has two answers of at most 2 tokens\n"
        "  fix: raise max_tokens of the channel replay, or make pairs"
    )


def test_a_form_with_a_reference_needs_one():
    with pytest.raises(UsageError) as caught:
        _replay([pair_row([1], [2], [3])])
    assert str(caught.value) == (
        "data.pairs: dpo compares with a reference, and some pairs have no reference log-probs\n"
        "  fix: set reference: model in the channel replay, or a variant without one (simpo, orpo, imitate)"
    )


def test_without_pairs_it_says_where_they_come_from():
    with pytest.raises(RunFailed, match=r"^channel 'replay' has no pairs to draw from\n  fix: data\.pairs: "):
        Replay().draw(0, 0, 1)
    with pytest.raises(RunFailed, match=r"^channel 'replay' got no pairs: the backend did not collate its rows$"):
        Replay().loss(View(), Batch())


def test_its_gradient_pushes_the_answers_apart():
    channel = _replay(beta=0.5)
    pairs = channel.collate(ROWS, None)
    leaves = {}

    class Leaves(View):
        def logps(self, seqs, *, model="policy", grad, temperature):
            leaves[id(seqs)] = super().logps(seqs, model=model, grad=grad, temperature=temperature)
            return leaves[id(seqs)]

    channel.loss(Leaves(), Batch(pairs=pairs)).sum.backward()
    chosen, rejected = leaves[id(pairs.chosen)].grad, leaves[id(pairs.rejected)].grad
    assert (chosen[pairs.chosen_action] < 0).all()
    assert (rejected[pairs.rejected_action] > 0).all()
    assert not torch.cat([chosen[~pairs.chosen_action], rejected[~pairs.rejected_action]]).any()
