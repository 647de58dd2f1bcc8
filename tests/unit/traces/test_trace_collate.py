"""Rows of recorded traces as tensors, and what is left out rather than spoilt where they are too long."""

import math

import pytest

from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.protocols import RolloutText
from composer_core.traces.collate import TraceCollator

PROMPT = [10, 11, 12]
COMPLETION = [20, 21, 30, 31, 22, 23]
ACTION = [1, 1, 0, 0, 1, 1]  # turn 0 at 3-4, tool output at 5-6, turn 1 at 7-8


def segment(turn, hint=(90, 91)):
    """A hint before turn 0 or 1, whose sequence ends with that turn."""
    ids = PROMPT + COMPLETION
    start, end = ((3, 5), (7, 9))[turn]
    return Segment(
        teacher_ids=[*ids[:start], *hint, *ids[start:end]],
        student=range(start, end),
        teacher=range(start + len(hint), end + len(hint)),
        kind=f"kind{turn}",
        site=turn,
    )


def row(uid="a", *, segments=(), reward=1.0, prompt=PROMPT, completion=COMPLETION, action=ACTION, **more):
    rollout = RolloutText(uid, prompt, completion, [bool(flag) for flag in action], reward)
    hinted = pack(list(segments), rollout)
    return {
        "uid": uid,
        "source": "a.jsonl",
        "prompt_ids": list(prompt),
        "completion_ids": list(completion),
        "action": list(action),
        "reward": reward,
        "sdpo": None if hinted is None else dict(hinted),
        **more,
    }


def check_hints(batch):
    """Student and teacher point at equal ids, and students only at the agent's tokens."""
    hints, rollouts = batch.hints, batch.rollouts
    real = hints.weight > 0
    assert rollouts.seqs.ids[hints.student][real].tolist() == hints.seqs.ids[hints.teacher][real].tolist()
    assert rollouts.action[hints.student][real].all()


def test_rows_become_packed_sequences_with_their_actions_rewards_and_hints():
    batch = TraceCollator()([row(segments=[segment(1)]), row("b", reward=None, segments=[segment(0)])])
    assert batch.rollouts.seqs.ids.tolist() == (PROMPT + COMPLETION) * 2
    assert batch.rollouts.seqs.cu.tolist() == [0, 9, 18]
    assert batch.rollouts.action.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + (
        [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    )
    assert batch.rollouts.uid == ("a", "b")
    assert batch.rollouts.rewards[0].item() == 1.0
    assert math.isnan(batch.rollouts.rewards[1].item())
    assert batch.rollouts.advantages is None
    assert batch.hints.student.tolist() == [7, 8, 9 + 3, 9 + 4]
    assert batch.hints.seqs.lengths.tolist() == [11, 7]
    assert batch.pairs is None
    check_hints(batch)


def test_the_reward_may_stand_under_another_key():
    batch = TraceCollator(reward_key="final_reward")([row(final_reward=0.25)])
    assert batch.rollouts.rewards.tolist() == [0.25]


def test_a_long_row_is_cut_at_its_end_and_keeps_the_hints_that_are_whole_there():
    collator = TraceCollator(max_seq_len=8)
    batch = collator([row(segments=[segment(0), segment(1)])])
    assert batch.rollouts.seqs.ids.tolist() == [10, 11, 12, 20, 21, 30, 31, 22]
    assert batch.rollouts.action.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    # Turn 1 ends at token 8, one past the limit: its hint goes, that of turn 0 stays.
    assert batch.hints.student.tolist() == [3, 4]
    assert batch.hints.weight.tolist() == [1.0, 1.0]
    assert dict(collator.dropped) == {"hint: its turn does not end within max_seq_len": 1}
    check_hints(batch)


def test_a_hint_that_makes_the_teacher_read_too_much_is_left_out():
    collator = TraceCollator(max_seq_len=10)
    batch = collator([row(segments=[segment(0), segment(1)])])  # teachers of 7 and 11 tokens
    assert batch.hints.student.tolist() == [3, 4]
    assert dict(collator.dropped) == {"hint: with the hint the teacher would read more than max_seq_len": 1}


def test_a_row_without_a_token_of_the_agents_left_is_left_out():
    collator = TraceCollator(max_seq_len=3)
    batch = collator([row(), row("b", prompt=[1], completion=[2], action=[1])])
    assert batch.rollouts.uid == ("b",)
    assert dict(collator.dropped) == {"row: none of the agent's tokens within max_seq_len": 1}


def test_a_prompt_that_fills_the_limit_is_left_out_too():
    collator = TraceCollator(max_seq_len=2)
    assert len(collator([row()]).rollouts.seqs) == 0
    assert sum(collator.dropped.values()) == 1


def test_rows_without_hints_give_filler_of_weight_zero():
    batch = TraceCollator()([row()])
    assert batch.hints.weight.tolist() == [0.0]


def test_two_hints_in_one_row_keep_their_kinds_and_weights():
    weighted = Segment(**{**vars(segment(1)), "weight": (0.5, 0.25)})
    batch = TraceCollator(max_seq_len=11)([row(segments=[segment(0), weighted])])
    assert batch.hints.weight.tolist() == [1.0, 1.0, 0.5, 0.25]
    check_hints(batch)


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_pairs_that_fit_stay_as_they_are():
    batch = TraceCollator()([row()], [pair_row([1, 2], [3, 4], [5], reference=(-1.0, -2.0))])
    assert batch.pairs.chosen.ids.tolist() == [1, 2, 3, 4]
    assert batch.pairs.rejected.ids.tolist() == [1, 2, 5]
    assert batch.pairs.chosen_action.tolist() == [False, False, True, True]
    assert (batch.pairs.ref_chosen.tolist(), batch.pairs.ref_rejected.tolist()) == ([-1.0], [-2.0])


def test_a_long_answer_is_cut_and_keeps_at_least_a_token():
    collator = TraceCollator(max_dpo_seq_len=4)
    batch = collator([], [pair_row([1, 2], [3, 4, 5], [6])])
    assert batch.pairs.chosen.ids.tolist() == [1, 2, 3, 4]
    assert batch.pairs.rejected.ids.tolist() == [1, 2, 6]
    assert (batch.pairs.ref_chosen, batch.pairs.ref_rejected) == (None, None)
    assert not collator.dropped


@pytest.mark.parametrize(
    "pair",
    [pair_row([1, 2, 3, 4], [5], [6]), pair_row([1], [2, 3, 4, 5], [2, 3, 4, 6]), pair_row([1], [], [2])],
    ids=["prompt-fills-it", "differ-behind-the-cut", "no-answer"],
)
def test_a_pair_without_two_different_answers_left_is_left_out(pair):
    collator = TraceCollator(max_dpo_seq_len=4)
    batch = collator([], [pair])
    assert batch.pairs.weight.tolist() == [0.0]
    assert dict(collator.dropped) == {"pair: no answers left within max_dpo_seq_len, or equal ones": 1}


def test_a_long_pair_with_stored_reference_is_left_out_since_its_sums_are_of_whole_answers():
    collator = TraceCollator(max_dpo_seq_len=4)
    collator([], [pair_row([1, 2], [3, 4, 5], [6], reference=(-1.0, -2.0))])
    assert dict(collator.dropped) == {
        "pair: longer than max_dpo_seq_len, and its reference log-probs are of whole answers": 1
    }


@pytest.mark.parametrize("limit", ["max_seq_len", "max_dpo_seq_len"])
def test_a_limit_without_room_is_refused(limit):
    with pytest.raises(ValueError, match=f"^{limit} must be at least 2, got 1: one token to read and one to learn$"):
        TraceCollator(**{limit: 1})
