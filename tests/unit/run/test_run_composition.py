"""One optimiser step by hand and against `testing.accumulate`, which is written without a `Composition`."""

import math

import pytest
import torch
from torch import nn

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import NonFinite
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.loss.reduce import masked_sum
from composer_core.loss.teachers import SelfTeacher
from composer_core.loss.views import ModelView
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Aggregation, Need, RolloutText, Term
from composer_core.run import composition as module
from composer_core.run.composition import Composition
from composer_core.testing.accumulate import Window, accumulate_gradients, take
from composer_core.testing.contracts.channel import SmallModel
from composer_core.testing.fakes import Brevity, HintFake

pytestmark = pytest.mark.filterwarnings("ignore:.* is no model type")

VOCABULARY = 4
PROMPTS, COMPLETIONS = [[1], [2, 3], [1]], [[2, 3], [1], [3, 3, 2]]
SEQS = Seqs.from_lists([p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
ACTION = torch.tensor([False, True, True, False, False, True, False, True, True, True])
ROLLOUTS = Rollouts(
    SEQS,
    action=ACTION,
    advantages=torch.tensor([1.0, -0.5, 2.0])[SEQS.owner],
    ref_logps=torch.full((10,), -1.0),
    uid=("a", "b", "c"),
)
TEXTS = [
    RolloutText(uid, p, c, [True] * len(c), reward)
    for uid, p, c, reward in zip("abc", PROMPTS, COMPLETIONS, [0.0, 1.0, 0.0], strict=True)
]
BASE = Batch(step=3, total_steps=9)
OWN = {"tokens": 6.0, "sequences": 3.0, "max_tokens": 15.0, "micro_batches": 1.0}


class Bigrams(nn.Module):
    """Logits of the next token from the last one alone; all tokens are equally likely."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))

    def forward(self, input_ids, **_):
        return type("Output", (), {"logits": self.table[input_ids]})


class Likelihood:
    """NLL of the actions, and how many there are."""

    aggregation = Aggregation.TOKEN_MEAN

    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        tokens = batch.rollouts.action.sum()
        return Term(-masked_sum(logps, batch.rollouts.action), "tokens", {"seen": tokens, "step": batch.step * tokens})


class Nan(ChannelDefaults):
    def loss(self, view, batch):
        return Term(torch.tensor(math.nan, requires_grad=True), "tokens")


class Asking(ChannelDefaults):
    """Wants a teacher and learns nothing."""

    def __init__(self, teacher):
        self.teacher = teacher

    def loss(self, view, batch):
        return Term(torch.zeros(()), "tokens")


def _opened(policy, *channels, objective=None, native=False, own=OWN):
    loss = CompositeLoss([ActiveChannel(*channel) for channel in channels], objective)
    rows = _rows(loss)
    composition = Composition(loss, policy, native=native)
    composition.open({**own, **loss.count(rows)}, base=BASE)
    return composition, rows


def _rows(loss):
    prepared = loss.prepare_all(TEXTS)
    return {active.name: [row[active.name] for row in prepared] for active in loss.active}


def _view(policy, rollouts=ROLLOUTS):
    return ModelView(policy, rollouts=rollouts.seqs)


def test_a_step_by_hand():
    policy = Bigrams()
    composition, rows = _opened(policy, ("short", 0.5, Brevity()), objective=Likelihood())
    loss = composition.loss_of(_view(policy), ROLLOUTS, rows)
    loss.backward()
    composition.add_up()
    metrics = composition.close()
    # 6 actions of log-prob -log 4: the objective is log 4, the channel 0.5 x -log 4
    nll = math.log(4)
    assert loss.item() == pytest.approx(nll / 2)
    norm = metrics.pop("grad_norm/short")
    assert norm == pytest.approx(0.5 / 6 * math.sqrt(6))  # 0.5 / 6 for each of 6 log-probs
    assert metrics == pytest.approx(
        {
            "loss/policy": nll,
            "loss/total": nll / 2,
            "loss/short": -nll,
            "policy/seen": 1.0,
            "policy/step": 3.0,
            "weight/short": 0.5,
            "active/short": 1.0,
            "tokens/short": 6.0,
        }
    )
    # -0.5 / 6 x log-prob of each action; a 2 predicts one of them, the 3 of "a" (that of "b" is in the prompt)
    expected = torch.tensor([1.0, 1.0, 1.0, -3.0]) / 4 * 0.5 / 6
    torch.testing.assert_close(policy.table.grad[2], expected)


def _grpo():
    return PolicyObjective(PRESETS["grpo"], OBJECTIVE_SETTINGS["grpo"](kl_coef=0.1))


@pytest.mark.parametrize("splits", [[[0, 1, 2]], [[1], [2, 0]], [[2], [0], [1]]], ids=["one", "two", "three"])
def test_any_split_gives_the_gradient_and_metrics_of_the_plain_way(splits):
    channels = [("short", 0.5, Brevity()), ("hint", 2.0, HintFake())]
    policy, plain = SmallModel(), SmallModel()
    composition, rows = _opened(policy, *channels, objective=_grpo())
    split = composition.loss.split(rows, splits)
    for indices, own in zip(splits, split, strict=True):
        rollouts = take(ROLLOUTS, indices)
        composition.loss_of(_view(policy, rollouts), rollouts, own).backward()
        composition.add_up()
    metrics = composition.close()
    window = Window(ROLLOUTS, rows, splits=[[0, 1, 2]], longest=5)
    expected = accumulate_gradients(plain, composition.loss, window, base=BASE)
    assert expected.pop("tokens") == 6.0
    assert {"grad_norm/hint", "policy/kl", "tokens/hint"} <= set(metrics)
    assert metrics == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_trainers_own_policy_loss_is_scaled_for_a_mean_over_ranks_and_the_whole_is_too(monkeypatch):
    monkeypatch.setattr(module, "world_size", lambda: 2)
    policy = Bigrams()
    composition, rows = _opened(
        policy, ("short", 0.5, Brevity()), objective=Likelihood(), native=True, own={**OWN, "tokens": 12.0}
    )
    loss = composition.loss_of(_view(policy), ROLLOUTS, rows, stock=torch.tensor(8.0))
    # this rank's share of the policy loss is 4; the channel's is 0.5 x -6 log 4 / 12
    share = 4 - 0.25 * math.log(4)
    assert loss.item() == pytest.approx(2 * share)
    composition.add_up()
    metrics = composition.close()
    assert (metrics["loss/policy"], metrics["loss/total"]) == pytest.approx((4.0, share))
    assert "policy/seen" not in metrics  # the objective was not asked


def test_the_objective_can_be_asked_for_in_the_middle_of_a_trainers_loss(monkeypatch):
    monkeypatch.setattr(module, "world_size", lambda: 2)
    policy = Bigrams()
    composition, rows = _opened(policy, ("short", 0.5, Brevity()), objective=Likelihood())
    view = _view(policy)
    share = composition.policy_of(view, ROLLOUTS)
    assert share.item() == pytest.approx(math.log(4))  # not times the ranks
    together = composition.loss_of(view, ROLLOUTS, rows, stock=2 * share + 2.0)  # the trainer adds a term of its own
    assert together.item() == pytest.approx(2 * (math.log(4) + 1 - math.log(4) / 2))
    composition.add_up()
    metrics = composition.close()
    assert metrics["policy/seen"] == 1.0  # booked once
    assert metrics["loss/policy"] == pytest.approx(math.log(4) + 1)


def test_the_loss_is_the_sum_of_its_two_parts():
    policy = SmallModel()
    composition, rows = _opened(policy, ("hint", 2.0, HintFake()), objective=Likelihood())
    view = _view(policy)
    policy_part = composition.policy_of(view, ROLLOUTS)
    channels = composition.channels_of(view, ROLLOUTS, rows, policy=policy_part)
    whole = composition.loss_of(_view(policy), ROLLOUTS, rows)
    assert channels.item() > 0
    assert whole.item() == pytest.approx(policy_part.item() + channels.item())


def test_without_an_objective_the_channels_are_the_loss():
    policy = Bigrams()
    composition, rows = _opened(policy, ("short", 1.0, Brevity()))
    assert composition.policy_of(_view(policy), ROLLOUTS).item() == 0.0
    assert composition.loss_of(_view(policy), ROLLOUTS, rows).item() == pytest.approx(-math.log(4))


def test_the_open_step_says_what_it_counted_and_where_it_is():
    composition, _ = _opened(Bigrams(), ("short", 1.0, Brevity()))
    assert composition.counts == {**OWN, "short.rows": 3.0, "short.active": 3.0}
    assert (composition.base.step, composition.base.total_steps, composition.base.counts) == (3, 9, composition.counts)
    composition.close()
    with pytest.raises(AssertionError, match="a micro-batch outside of a step"):
        _ = composition.counts


def test_parts_that_were_dropped_are_not_added_up():
    policy = Bigrams()
    composition, rows = _opened(policy, ("short", 1.0, Brevity()))
    composition.loss_of(_view(policy), ROLLOUTS, rows).backward()
    composition.drop()
    composition.add_up()
    assert "loss/short" not in composition.close()


def test_a_channel_that_is_not_finite_is_named():
    policy = Bigrams()
    composition, rows = _opened(policy, ("broken", 1.0, Nan()))
    with pytest.raises(NonFinite, match=r"the loss of 'broken' is nan at step 3"):
        composition.loss_of(_view(policy), ROLLOUTS, rows)


# -- teachers and state ------------------------------------------------------------------------------------------------


def _composition(teacher, needs=frozenset()):
    channel = ActiveChannel("asks", 1.0, Asking(teacher), needs)
    return Composition(CompositeLoss([channel], None), Bigrams(), native=False)


@pytest.mark.parametrize(
    ("teacher", "needs", "has_teacher", "has_reference", "same"),
    [
        (None, frozenset(), False, False, True),
        (None, frozenset({Need.REFERENCE}), False, True, False),
        (SelfTeacher("frozen"), frozenset(), True, True, True),
        (SelfTeacher("live"), frozenset(), True, False, False),
        (SelfTeacher("ema", 0.5), frozenset({Need.REFERENCE}), True, True, False),
    ],
    ids=["none", "reference", "frozen", "live", "ema-and-reference"],
)
def test_teacher_and_reference_are_made_where_somebody_asks(teacher, needs, has_teacher, has_reference, same):
    composition = _composition(teacher, needs)
    assert (composition.teacher is not None, composition.reference is not None) == (has_teacher, has_reference)
    assert (composition.teacher is composition.reference) == same


def test_an_average_moves_once_per_step_and_its_state_comes_back():
    composition = _composition(SelfTeacher("ema", 0.25))
    start = composition.state_dict()["teacher"]["table"].clone()
    with torch.no_grad():
        composition.teacher.network.table += 1.0
    composition.stepped(1, {})
    saved = {"loss": {}, "teacher": {"table": composition.state_dict()["teacher"]["table"].clone()}}
    torch.testing.assert_close(saved["teacher"]["table"], start + 0.25)
    composition.stepped(2, {})
    composition.load_state_dict(saved)
    torch.testing.assert_close(composition.state_dict()["teacher"]["table"], start + 0.25)
