"""Rows by hand: indices count from the first prompt token, and teachers' sequences lie one behind the other."""

import pytest

from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.protocols import RolloutText

#                            0   1   2   3   4
ROLLOUT = RolloutText("u", [7, 8], [20, 21, 22], [True, True, True], 0.0)


def test_segments_are_packed_with_indices_into_the_whole():
    first = Segment([7, 9, 20, 21], student=[2, 3], teacher=[2, 3], kind="timeout", site=0)
    second = Segment([7, 8, 20, 5, 22], student=[4], teacher=[4], weight=[0.5], kind="missing-file", site=1)
    assert pack([first, second], ROLLOUT) == {
        "teacher_ids": [7, 9, 20, 21, 7, 8, 20, 5, 22],
        "teacher_lengths": [4, 5],
        "student": [2, 3, 4],
        "teacher": [2, 3, 8],
        "weight": [1.0, 1.0, 0.5],
        "kind": "timeout,missing-file",
        "site": [0, 1],
    }


def test_no_hinted_token_is_no_row():
    assert pack([], ROLLOUT) is None
    assert pack([Segment([7, 9], student=[], teacher=[])], ROLLOUT) is None


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (
            Segment([7, 9, 21], student=[2], teacher=[2]),
            "a segment pairs token 2, id 20, with teacher token 2, id 21: they must be the same",
        ),
        (
            Segment([7, 9, 20], student=[5], teacher=[2]),
            "a segment pairs token 5 of 5 with teacher token 2 of 3: one is outside, or the first of its sequence, "
            "which nothing predicts",
        ),
        (
            Segment([7], student=[0], teacher=[0]),
            "a segment pairs token 0 of 5 with teacher token 0 of 1: one is outside, or the first of its sequence, "
            "which nothing predicts",
        ),
        (
            Segment([7, 9, 20], student=[2], teacher=[2], weight=[1.0, 1.0]),
            "a segment has 1 student tokens, 1 teacher tokens and 2 weights",
        ),
    ],
    ids=["other-id", "outside", "first", "ragged"],
)
def test_what_does_not_line_up_is_refused(segment, said):
    with pytest.raises(ValueError) as caught:
        pack([segment], ROLLOUT)
    assert str(caught.value) == said


def test_a_pair_has_reference_log_probs_only_where_they_are_known():
    assert pair_row([1], [2], [3, 4]) == {"prompt": [1], "chosen": [2], "rejected": [3, 4]}
    assert pair_row([1], [2], [3], reference=(-0.5, -2.0))["ref_rejected"] == -2.0
