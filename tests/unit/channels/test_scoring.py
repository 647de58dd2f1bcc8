"""The channel `sdpo` with a named teacher: what is asked, the row, the batch, the loss and its gradient."""

import math

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.channels.rows import Segment, pack
from composer_core.channels.scoring import questions, scored_rows
from composer_core.channels.sdpo import ScoredSdpo, sdpo
from composer_core.channels.settings import SdpoSettings
from composer_core.errors import RunFailed
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.protocols import RolloutText, ScoreRequest

#                       0   1   2   3   4   |  0   1   2
FIRST, SECOND = [7, 8, 20, 21, 22], [9, 30, 31]
SETTINGS = SdpoSettings(teacher="strong", divergence="kl_student_teacher")


def _texts():
    return [
        RolloutText("a", FIRST[:2], FIRST[2:], [True] * 3, 0.0),
        RolloutText("b", SECOND[:1], SECOND[1:], [True] * 2, 0.0),
        RolloutText("c", SECOND[:1], SECOND[1:], [True] * 2, 1.0),
    ]


def _rows():
    """Two segments in the first rollout, with text behind what they teach; one in the second."""
    first, second, _ = _texts()
    two = [Segment([7, 1, 8, 20, 21, 22], [2, 3], [3, 4]), Segment([7, 8, 20, 21, 1, 22], [4], [5], weight=[0.5])]
    return [pack(two, first), pack([Segment([1, 9, 30], [1], [2], weight=[2.0])], second)]


class Teacher:
    """Answers -id / 10; None for the rollouts it refuses. Keeps what it was asked, call by call."""

    def __init__(self, refuses=()):
        self.refuses, self.calls = refuses, []

    def score(self, requests):
        self.calls.append(list(requests))
        return [None if r.state_id in self.refuses else [-token / 10 for token in r.ids[r.start :]] for r in requests]


class Told(ScoredSdpo):
    """Hints without a tokenizer: the rows above."""

    def __init__(self, settings=SETTINGS):
        super().__init__(settings, "strong")
        hinted = dict(zip("abc", [*_rows(), None], strict=True))
        self.hinting.row = lambda rollout: hinted[rollout.uid]


def _channel(refuses=()):
    channel, teacher = Told(), Teacher(refuses)
    channel.take_scorers({"strong": teacher})
    return channel, teacher


def test_each_hinted_site_is_asked_about_up_to_its_last_token_from_its_first_on():
    first, second = (list(questions(row, uid)) for row, uid in zip(_rows(), "ab", strict=True))
    assert [question.request for question in first] == [
        ScoreRequest([7, 1, 8, 20, 21], 3, "a"),
        ScoreRequest([7, 8, 20, 21, 1, 22], 5, "a"),
    ]
    assert [(question.pairs, question.offsets) for question in first] == [([0, 1], [0, 1]), ([2], [0])]
    assert [question.request for question in second] == [ScoreRequest([1, 9, 30], 2, "b")]


def test_tokens_between_hinted_ones_are_scored_and_left_out_of_the_row():
    rollout = RolloutText("a", [7], [20, 50, 21], [True, False, True], 0.0)
    row = pack([Segment([7, 1, 20, 50, 21], [1, 3], [2, 4])], rollout)
    (scored,) = scored_rows([row], ["a"], Teacher())
    assert scored == {**row, "teacher_logps": [-2.0, -2.1]}


def test_all_rollouts_are_asked_about_in_one_call_and_get_their_own_answers():
    channel, teacher = _channel()
    first, second, none = channel.prepare_all(_texts())
    assert first == {**_rows()[0], "teacher_logps": [-2.0, -2.1, -2.2]}
    assert second == {**_rows()[1], "teacher_logps": [-3.0]}
    assert none is None
    (asked,) = teacher.calls
    assert [request.state_id for request in asked] == ["a", "a", "b"]


def test_the_loss_hands_all_rollouts_over_at_once_and_one_alone_as_well():
    channel, teacher = _channel()
    loss = CompositeLoss([ActiveChannel("sdpo", 1.0, channel)], None)
    assert [rows["sdpo"] is None for rows in loss.prepare_all(_texts())] == [False, False, True]
    assert len(teacher.calls) == 1
    assert loss.prepare(_texts()[1]) == {"sdpo": {**_rows()[1], "teacher_logps": [-3.0]}}


def test_a_rollout_that_was_not_scored_has_no_row_and_others_do():
    channel, _ = _channel(refuses="a")
    first, second, _ = channel.prepare_all(_texts())
    assert first is None
    assert second is not None
    assert [channel.count(row) for row in (first, second)] == [{"tokens": 0.0}, {"tokens": 1.0}]


def test_a_recorded_trace_is_scored_as_a_rollout_is():
    channel, teacher = _channel()
    row = {"uid": "t", "reward": None, "sdpo": _rows()[1]}
    assert channel.of_trace(row) == {**_rows()[1], "teacher_logps": [-3.0]}
    assert channel.of_trace({**row, "reward": 1.0}) is None
    assert [request.state_id for call in teacher.calls for request in call] == ["t"]


def test_without_the_teacher_it_says_so():
    with pytest.raises(RunFailed) as caught:
        Told().prepare(_texts()[0])
    assert str(caught.value) == "channel 'sdpo' learns from teacher 'strong', and nobody handed it over"


def _rollouts(old=None):
    seqs = Seqs.from_lists([FIRST, SECOND])
    action = torch.tensor([False, False, True, True, True, False, True, True])
    return Rollouts(seqs, action, old_logps=old)


def _loss(channel, own, rows, *, old=None):
    rollouts = _rollouts(old)
    view = LeafView([KnownLogps(rollouts.seqs, own)], rollouts=rollouts.seqs, temperature=1.0)
    term = channel.loss(view, Batch(rollouts=rollouts, hints=channel.collate(rows, rollouts)))
    return term, view.coefficients(term.sum)[0].tolist()


def test_the_teachers_log_probs_lie_beside_the_tokens_they_are_of():
    channel, _ = _channel()
    hints = channel.collate([None, channel.prepare(_texts()[1])], _rollouts())
    assert hints.student.tolist() == [6]
    assert hints.teacher_logps.tolist() == [-3.0]
    both = channel.collate(channel.prepare_all(_texts()[:2]), _rollouts())
    assert both.student.tolist() == [2, 3, 4, 6]
    assert both.teacher_logps.tolist() == pytest.approx([-2.0, -2.1, -2.2, -3.0])


def test_the_loss_is_the_weighted_gap_to_the_teacher_and_pulls_towards_it():
    channel, _ = _channel()
    # 2, 3, 4 and 6 are hinted; the teacher says -2.0, -2.1, -2.2 and -3.0
    own = torch.tensor([0.0, -9.0, -1.0, -2.1, -3.2, 0.0, -1.5, -9.0])
    term, gradient = _loss(channel, own, channel.prepare_all(_texts()[:2]))
    assert term.count == "tokens"
    # weights 1, 1, 0.5 and 2: 1 x 1.0 + 1 x 0 + 0.5 x -1.0 + 2 x 1.5
    assert term.sum.item() == pytest.approx(3.5)
    # the teacher's log-prob minus the student's: -(1.0 + 0 - 1.0 + 1.5)
    assert term.metrics["hint_gain"].item() == pytest.approx(-1.5)
    # weight x (own - taught): down where the teacher finds the token less likely, up where more
    assert gradient == pytest.approx([0, 0, 1.0, 0, -0.5, 0, 3.0, 0], abs=1e-6)


def test_the_importance_ratio_is_capped_as_with_a_self_teacher():
    channel, _ = _channel()
    own = torch.tensor([0.0, -9.0, -1.0, -2.1, -3.2, 0.0, -1.5, -9.0])
    old = own.clone()
    old[6] -= math.log(3.0)  # ratio 3, capped at 2
    old[2] += math.log(2.0)  # ratio 1/2
    term, gradient = _loss(channel, own, channel.prepare_all(_texts()[:2]), old=old)
    assert gradient == pytest.approx([0, 0, 0.5, 0, -0.5, 0, 6.0, 0], abs=1e-5)
    assert term.sum.item() == pytest.approx(0.5 * 1.0 + 0 - 0.5 + 2 * 2 * 1.5, rel=1e-5)
    assert term.metrics["is_clipped"].item() == 1.0


def test_a_micro_batch_without_a_hint_gives_zero_that_hangs_on_the_graph():
    channel, _ = _channel()
    own = torch.full((8,), -1.0)
    term, gradient = _loss(channel, own, [None, None])
    assert term.sum.item() == 0.0
    assert term.sum.requires_grad
    assert gradient == [0.0] * 8


def test_a_token_that_the_teacher_rules_out_has_a_finite_loss():
    channel, _ = _channel()
    row = {**_rows()[1], "teacher_logps": [-9999.0]}  # how vLLM writes minus infinity
    own = torch.full((8,), -1.0)
    term, _ = _loss(channel, own, [None, row])
    assert term.sum.item() == pytest.approx(2 * (-1 + 100))


def test_a_name_that_is_no_self_teacher_makes_this_channel():
    channel = sdpo(SETTINGS)
    assert isinstance(channel, ScoredSdpo)
    assert channel.teacher is None  # nothing for the trainer to make
    assert channel.divergences(1) == ()
