"""The channel's own arithmetic on a view that gives back chosen numbers; divergences are tested where they are made."""

import math

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.channels.rows import Segment, pack
from composer_core.channels.sdpo import Sdpo, sdpo
from composer_core.channels.settings import SdpoSettings
from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.errors import RunFailed
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.protocols import Need, RolloutText

#                       0   1   2   3   4   |  0   1   2
FIRST, SECOND = [7, 8, 20, 21, 22], [9, 30, 31]


def _texts(rewards=(0.0, 0.0)):
    return [
        RolloutText("a", FIRST[:2], FIRST[2:], [True] * 3, rewards[0]),
        RolloutText("b", SECOND[:1], SECOND[1:], [True] * 2, rewards[1]),
    ]


def _rows():
    """Two segments in the first rollout, one in the second."""
    first, second = _texts()
    return [
        pack(
            [Segment([7, 1, 8, 20, 21], [2, 3], [3, 4]), Segment([7, 8, 20, 21, 1, 22], [4], [5], weight=[0.5])], first
        ),
        pack([Segment([1, 9, 30], [1], [2], weight=[2.0])], second),
    ]


def _rollouts(old=None):
    seqs = Seqs.from_lists([FIRST, SECOND])
    action = torch.tensor([False, False, True, True, True, False, True, True])
    return Rollouts(seqs, action, old_logps=old)


class View:
    """Divergences 1, 2, 3, 4 ... and fixed log-probs; keeps what it was asked."""

    def __init__(self, own=None, taught=None):
        self.own, self.taught = own, taught
        self.spec = self.hints = self.teacher = None

    def divergence(self, hints, spec, *, teacher="policy"):
        self.hints, self.spec, self.teacher = hints, spec, teacher
        return torch.arange(1.0, 1 + len(hints.student)).requires_grad_()

    def logps(self, seqs, *, model="policy", grad, temperature):
        own = model == "policy" and len(seqs.ids) == 8
        return self.own if own else self.taught


def _loss(channel, view, *, rows=None, old=None, **more):
    rollouts = _rollouts(old)
    hints = channel.collate(_rows() if rows is None else rows, rollouts)
    return channel.loss(view, Batch(rollouts=rollouts, hints=hints, **more))


def test_rows_point_into_the_micro_batch_and_teachers_lie_one_behind_the_other():
    hints = Sdpo().collate(_rows(), _rollouts())
    assert hints.seqs.ids.tolist() == [7, 1, 8, 20, 21, 7, 8, 20, 21, 1, 22, 1, 9, 30]
    assert hints.seqs.cu.tolist() == [0, 5, 11, 14]
    assert hints.student.tolist() == [2, 3, 4, 6]
    assert hints.teacher.tolist() == [3, 4, 10, 13]
    assert hints.weight.tolist() == [1.0, 1.0, 0.5, 2.0]


def test_a_rollout_without_a_row_takes_no_place():
    hints = Sdpo().collate([None, _rows()[1]], _rollouts())
    assert hints.student.tolist() == [6]
    assert hints.teacher.tolist() == [2]


def test_no_hint_at_all_is_one_token_of_filler():
    hints = Sdpo().collate([None, None], _rollouts())
    assert (hints.seqs.ids.tolist(), hints.weight.tolist()) == ([0], [0.0])
    assert (hints.student.tolist(), hints.teacher.tolist()) == ([0], [0])


def test_the_loss_is_the_weighted_sum_over_hinted_tokens():
    term = _loss(Sdpo(SdpoSettings(hint_gain=False)), View())
    assert term.sum.item() == 1 + 2 + 0.5 * 3 + 2 * 4
    assert term.count == "tokens"
    assert [Sdpo().count(row) for row in (*_rows(), None)] == [{"tokens": 3.0}, {"tokens": 1.0}, {"tokens": 0.0}]


def test_the_importance_ratio_weighs_each_token_up_to_its_cap_and_goes_into_the_hints():
    own = torch.zeros(8)
    # ratios of tokens 2, 3, 4, 6: e^0, e^-1, e^1 (over 2: capped), e^1 / 2
    old = torch.tensor([9.0, 9.0, 0.0, 1.0, -1.0, 9.0, math.log(2) - 1, 9.0])
    view = View(own)
    term = _loss(Sdpo(SdpoSettings(hint_gain=False, is_clip=2.0)), view, old=old)
    expected = [1.0, math.exp(-1), 0.5 * 2.0, 2.0 * math.e / 2]
    assert view.hints.weight.tolist() == pytest.approx(expected)
    assert term.sum.item() == pytest.approx(sum(w * v for w, v in zip(expected, [1, 2, 3, 4], strict=True)))
    assert term.metrics["is_clipped"].item() == 1


def test_without_a_cap_or_on_policy_no_ratio_is_taken():
    old = torch.full((8,), -5.0)
    assert _loss(Sdpo(SdpoSettings(hint_gain=False, is_clip=None)), View(torch.zeros(8)), old=old).sum.item() == 12.5
    assert _loss(Sdpo(SdpoSettings(hint_gain=False)), View()).sum.item() == 12.5


def test_an_overflowing_ratio_under_filler_reaches_nothing():
    channel = Sdpo(SdpoSettings(hint_gain=False))
    view = View(torch.full((8,), math.nan))
    term = _loss(channel, view, rows=[None, None], old=torch.zeros(8))
    assert term.sum.item() == 0.0
    assert term.sum.requires_grad


GAP = Divergence(DivergenceKind.KL_STUDENT_TEACHER, support=Support.SAMPLED)


def test_hint_gain_is_what_the_hint_adds_to_the_taught_tokens_without_a_gradient():
    class Gap(View):
        def divergence(self, hints, spec, *, teacher="policy"):
            if spec != GAP:
                return super().divergence(hints, spec, teacher=teacher)
            assert (teacher, torch.is_grad_enabled()) == ("teacher", False)
            return torch.tensor([-2.0, 0.5, 0.0, -3.5])  # log q - log p

    channel = Sdpo()
    assert channel.divergences(1) == (Divergence(), GAP)
    term = _loss(channel, Gap())
    assert term.sum.item() == 12.5
    assert term.metrics["hint_gain"].item() == 2.0 - 0.5 + 0.0 + 3.5  # a sum: the adapter divides it by `tokens`


def test_hint_gain_is_asked_for_at_the_temperature_and_with_the_hints_of_the_divergence():
    asked = []

    class Asked(View):
        def divergence(self, hints, spec, *, teacher="policy"):
            asked.append((hints, spec.temperature, spec.support))
            return super().divergence(hints, spec, teacher=teacher)

    channel = Sdpo(SdpoSettings(temperature=1.5))
    assert [spec.temperature for spec in channel.divergences(1)] == [1.5, 1.5]
    # an importance ratio makes new hints: both questions are about those
    _loss(channel, Asked(torch.zeros(8)), old=torch.zeros(8))
    (hints, *main), (same, *gap) = asked
    assert same is hints
    assert (main, gap) == ([1.5, Support.FULL], [1.5, Support.SAMPLED])


def test_the_sampled_estimate_says_its_gain_itself():
    channel = Sdpo(SdpoSettings(divergence="kl_student_teacher", support="sampled"))
    assert channel.divergences(1) == (GAP,)
    assert _loss(channel, View()).metrics["hint_gain"].item() == -(1 + 2 + 3 + 4)


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        ({}, Divergence()),
        ({"divergence": "kl_teacher_student", "token_clip": 0.5, "temperature": 2.0},
         Divergence(DivergenceKind.KL_TEACHER_STUDENT, temperature=2.0, clip=0.5)),
        ({"support": "topk", "k": 7, "side": "teacher", "tail": False},
         Divergence(support=Support.TOPK_TEACHER, k=7, tail=False)),
        ({"divergence": "kl_student_teacher", "support": "sampled"},
         Divergence(DivergenceKind.KL_STUDENT_TEACHER, support=Support.SAMPLED)),
        ({"gate": {"use": "soft", "h_max": 2.0}},
         Divergence(DivergenceKind.KL_STUDENT_TEACHER, gate=SoftGate(2.0))),
        ({"gate": {"use": "paper", "tau": 0.5}},
         Divergence(DivergenceKind.KL_STUDENT_TEACHER, gate=PaperGate(0.5, 1.0, 16))),
        ({"target": {"use": "taid", "start": 0.25}}, Divergence(taid=0.25)),
    ],
    ids=["default", "clipped", "topk", "sampled", "soft", "paper", "taid"],
)  # fmt: skip
def test_settings_become_the_divergence_that_is_announced_and_asked_for(settings, spec):
    channel, view = sdpo(SdpoSettings(hint_gain=False, **settings)), View()
    _loss(channel, view)
    assert view.spec == spec
    assert channel.divergences(1) == (spec,)


def test_the_plan_decides_between_full_and_topk():
    channel = Sdpo(SdpoSettings(k=9, hint_gain=False))
    channel.planned(frozenset({Need.DIVERGENCE_TOPK, Need.LOGPS}))
    assert channel.divergences(1) == (Divergence(support=Support.TOPK_STUDENT, k=9),)


@pytest.mark.parametrize(
    ("teacher", "model", "weights"),
    [("self", "teacher", "frozen"), ("self-ema", "teacher", "ema"), ("self-live", "policy", "live")],
)
def test_the_teacher_is_the_model_it_asks_for(teacher, model, weights):
    channel, view = Sdpo(SdpoSettings(teacher=teacher, hint_gain=False, ema_rate=0.1)), View()
    _loss(channel, view)
    assert (view.teacher, channel.teacher.weights) == (model, weights)
    assert channel.teacher.rate == (0.1 if weights == "ema" else 0.05)


def test_without_collated_hints_it_says_so():
    with pytest.raises(RunFailed, match=r"^channel 'sdpo' got no hints: the backend did not collate its rows$"):
        Sdpo().loss(View(), Batch(rollouts=_rollouts()))


# -- which rollouts --


class Told(Sdpo):
    """A hint for whoever gets as far as asking for one."""

    def __init__(self, settings):
        super().__init__(settings)
        self.hinting = type("Hinting", (), {"row": staticmethod(lambda rollout: {"hinted": rollout.uid})})


@pytest.mark.parametrize(
    ("settings", "reward", "hinted"),
    [
        ({}, 0.0, True),
        ({}, 0.99, True),
        ({}, 1.0, False),
        ({"success": 0.5}, 0.5, False),
        # not rewarded is not failed
        ({}, None, False),
        ({"on": "all"}, 1.0, True),
        ({"on": "all"}, None, True),
    ],
)
def test_failed_rollouts_are_hinted_or_all(settings, reward, hinted):
    row = Told(SdpoSettings(**settings)).prepare(RolloutText("u", [1], [2], [True], reward))
    assert (row is not None) == hinted


# -- TAID's state --


def _taid(**target):
    return sdpo(SdpoSettings(hint_gain=False, target={"use": "taid", "start": 0.5, "adaptive": False, **target}))


def _step(channel, step, *, total=4, loss=1.0, active=1.0):
    _loss(channel, View(), step=step, total_steps=total)
    composite = CompositeLoss([ActiveChannel("mine", 1.0, channel)], objective=None)
    composite.on_step_end(step, {"loss/mine": loss, "active/mine": active})
    return channel.divergences(step + 1)[0].taid


def test_t_rises_in_a_line_over_the_run_or_the_steps_given():
    channel = _taid()
    assert [_step(channel, step) for step in (1, 2, 3, 4)] == [0.625, 0.75, 0.875, 1.0]
    channel = _taid(steps=2)
    assert [_step(channel, step) for step in (1, 2, 3)] == [0.75, 1.0, 1.0]


def test_t_is_logged_per_token():
    term = _loss(_taid(), View(), total_steps=4)
    assert term.metrics["t"].item() == 0.5 * 4  # four hinted tokens, to be divided by `tokens`


def test_its_state_goes_on_where_it_was_before_and_after_the_first_batch():
    channel = _taid(adaptive=True, alpha=1.0, momentum=0.0)
    for step, loss in ((1, 4.0), (2, 2.0)):
        _step(channel, step, loss=loss)
    saved = dict(channel.state_dict())
    again = _taid(adaptive=True, alpha=1.0, momentum=0.0)
    again.load_state_dict(saved)
    assert again.divergences(3)[0].taid == channel.divergences(3)[0].taid > 0.75
    assert dict(again.state_dict()) == saved
    assert _step(again, 3, loss=1.5) == _step(channel, 3, loss=1.5)


def test_a_step_without_a_hint_does_not_count_as_a_fall_of_the_loss():
    idle, busy = (_taid(adaptive=True, alpha=1.0, momentum=0.0) for _ in range(2))
    for channel in (idle, busy):
        _step(channel, 1, loss=4.0, total=1000)
    _step(idle, 2, loss=0.0, active=0.0, total=1000)
    assert _step(idle, 3, loss=4.0, total=1000) == _step(busy, 3, loss=4.0, total=1000)


def test_metrics_without_its_loss_are_refused():
    channel = _taid()
    _loss(channel, View(), total_steps=4)
    with pytest.raises(RunFailed, match=r"^channel 'sdpo': the step's metrics hold no loss of it, and TAID"):
        channel.on_step_end(1, {"loss/total": 1.0})
