import math

import pytest
import torch

from composer_core.batch import Batch, Hints, Pairs, Rollouts, Seqs
from composer_core.errors import RunFailed, UsageError
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.teachers import SelfTeacher
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.protocols import Aggregation, LossChannel, Need, RolloutText, Term

SEQS = Seqs.from_lists([[5, 6], [5]])
BASE = Batch(rollouts=Rollouts(SEQS, action=torch.tensor([False, True, False])), step=7)


class Constant(ChannelDefaults):
    """A channel whose local sum is given."""

    def __init__(self, value=6.0, count="tokens", own=None, metrics=None):
        self.value, self.name, self.own, self.metrics = value, count, own, metrics or {}
        self.calls = 0

    def count(self, row):
        return {} if self.own is None else {self.own: 0.0 if row is None else 2.0}

    def loss(self, view, batch):
        self.calls += 1
        return Term(torch.tensor(self.value, requires_grad=True), self.name, self.metrics)


class NoObjective:
    aggregation = Aggregation.TOKEN_MEAN

    def __init__(self, value=0.0):
        self.value = value

    def advantages(self, rewards, group, lengths, ref_kl):
        return rewards

    def loss(self, view, batch):
        return Term(torch.tensor(self.value), "tokens")


def _loss(**channels):
    active = [ActiveChannel(name, weight, channel) for name, (weight, channel) in channels.items()]
    return CompositeLoss(active, NoObjective())


def _compute(loss, **counts):
    batch = Batch(rollouts=BASE.rollouts, counts=counts, step=7)
    return loss.channels(None, {active.name: batch for active in loss.active})


def test_the_total_is_the_weighted_sum_over_global_counts():
    loss = _loss(a=(0.5, Constant(6.0)), b=(2.0, Constant(10.0, count="sequences")))
    result = _compute(loss, tokens=3.0, sequences=5.0)
    assert result.total.item() == 5.0  # 0.5 x 6 / 3 + 2 x 10 / 5
    assert {name: part.value.item() for name, part in result.terms.items()} == {"a": 2.0, "b": 2.0}
    assert {name: part.weight for name, part in result.terms.items()} == {"a": 0.5, "b": 2.0}


def test_a_channels_own_count_comes_before_the_backends():
    assert _compute(_loss(a=(1.0, Constant(6.0))), **{"a.tokens": 2.0, "tokens": 3.0}).total.item() == 3.0


def test_a_count_of_zero_divides_by_one():
    assert _compute(_loss(a=(1.0, Constant(0.0))), tokens=0.0).total.item() == 0.0


def test_a_count_nobody_made_is_an_error_that_names_both_places():
    with pytest.raises(RunFailed, match=r"neither 'a\.pairs' nor 'pairs' is among the counts of this step \(tokens\)"):
        _compute(_loss(a=(1.0, Constant(count="pairs"))), tokens=3.0)


def test_metrics_are_divided_by_the_same_count_and_carry_no_gradient():
    channel = Constant(metrics={"gap": torch.tensor(9.0, requires_grad=True)})
    part = _compute(_loss(a=(1.0, channel)), tokens=3.0).terms["a"]
    assert part.metrics["gap"].item() == 3.0
    assert not part.metrics["gap"].requires_grad
    assert not part.value.requires_grad


def test_the_gradient_carries_weight_and_count():
    class Leaf(ChannelDefaults):
        def __init__(self):
            self.leaf = torch.tensor(1.0, requires_grad=True)

        def loss(self, view, batch):
            return Term(self.leaf * 1.0, "tokens")

    channel = Leaf()
    _compute(_loss(a=(0.5, channel)), tokens=4.0).total.backward()
    assert channel.leaf.grad.item() == 0.125


def test_weight_zero_means_not_there_at_all():
    class Untouchable(ChannelDefaults):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} of a channel with weight 0")

    channel = Constant(6.0)
    loss = CompositeLoss([ActiveChannel("off", 0.0, Untouchable()), ActiveChannel("on", 1.0, channel)], NoObjective())
    rollout = RolloutText("u", [5], [6], [True], 1.0)
    assert loss.prepare(rollout) == {"on": {}}
    assert loss.count({"on": [{}]}) == {"on.rows": 1.0, "on.active": 1.0}
    assert set(loss.batches({"on": [{}]}, BASE)) == {"on"}
    assert set(_compute(loss, tokens=3.0).terms) == {"on"}
    assert channel.calls == 1
    assert loss.state_dict() == {}


def test_without_channels_the_total_is_zero():
    result = _compute(_loss())
    assert (result.total.item(), result.terms) == (0.0, {})


def test_counts_add_up_over_rows_under_the_channels_name():
    loss = _loss(a=(1.0, Constant(own="pairs")))
    assert loss.count({"a": [{}, None, {}]}) == {"a.rows": 3.0, "a.active": 2.0, "a.pairs": 4.0}


def test_a_rank_without_rows_counts_the_same_names():
    assert _loss(a=(1.0, Constant(own="pairs"))).count({"a": []}) == {"a.rows": 0.0, "a.active": 0.0, "a.pairs": 0.0}


def test_a_channel_that_counts_other_names_for_a_missing_row_is_refused():
    class Ragged(Constant):
        def count(self, row):
            return {} if row is None else {"pairs": 1.0}

    with pytest.raises(RunFailed) as caught:
        _loss(a=(1.0, Ragged())).count({"a": [{}]})
    assert str(caught.value) == (
        "channel 'a' counts ['pairs'] for a row and [] for none\n"
        "  fix: return the same names from `count` for every row, None included"
    )


def test_a_channel_may_not_count_what_the_core_counts():
    with pytest.raises(RunFailed, match=r"^channel 'a' counts \['rows'\], which the core counts itself"):
        _loss(a=(1.0, Constant(own="rows"))).count({"a": [{}]})


def test_the_active_share_is_global():
    part = _compute(_loss(a=(1.0, Constant())), **{"tokens": 3.0, "a.rows": 8.0, "a.active": 2.0}).terms["a"]
    assert part.active == 0.25


def test_each_channel_gets_its_own_tensors_and_the_shared_rollouts():
    hints = Hints(SEQS, torch.tensor([1]), torch.tensor([1]), torch.tensor([1.0]))
    pairs = Pairs(SEQS, SEQS, torch.zeros(3).bool(), torch.zeros(3).bool(), torch.ones(2))
    extra = {"c.age": torch.tensor([1.0, 2.0])}

    class Collating(Constant):
        def __init__(self, made):
            super().__init__()
            self.made = made

        def collate(self, rows, rollouts):
            assert (rows, rollouts) == ([None, {}], BASE.rollouts)
            return self.made

    loss = _loss(a=(1.0, Collating(hints)), b=(1.0, Collating(pairs)), c=(1.0, Collating(extra)))
    made = loss.batches({name: [None, {}] for name in "abc"}, BASE)
    assert [(b.hints, b.pairs, dict(b.extra)) for b in made.values()] == [
        (hints, None, {}),
        (None, pairs, {}),
        (None, None, extra),
    ]
    assert all(batch.rollouts is BASE.rollouts and batch.step == 7 for batch in made.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_its_channel_and_step(value):
    with pytest.raises(RunFailed) as caught:
        _compute(_loss(a=(1.0, Constant(value))), tokens=3.0)
    assert str(caught.value) == (
        f"the loss of 'a' is {value} at step 7\n"
        "  fix: lower train.learning_rate or the channel's weight; `loss/` in metrics.jsonl shows where it began"
    )
    with pytest.raises(RunFailed, match=r"^the loss of 'policy' is .* at step 7"):
        CompositeLoss([], NoObjective(value)).policy(None, Batch(step=7))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "a"), "loss.channels: a channel is called 'a', which is the name of another channel"),
        (("policy",), "loss.channels: a channel is called 'policy', which is the name of the objective"),
    ],
)
def test_two_parts_of_one_name_are_refused(names, said):
    with pytest.raises(UsageError) as caught:
        CompositeLoss([ActiveChannel(name, 1.0, Constant()) for name in names], NoObjective())
    assert str(caught.value) == said


class Schedule(Constant):
    """A stateful channel."""

    def __init__(self, t=0.0):
        super().__init__()
        self.t = t

    def on_step_end(self, step, metrics):
        self.t += metrics["loss/total"]

    def state_dict(self):
        return {"t": self.t}

    def load_state_dict(self, state):
        self.t = state["t"]


def test_state_is_kept_by_channel_and_comes_back():
    loss = _loss(a=(1.0, Constant()), b=(1.0, Schedule()))
    loss.on_step_end(1, {"loss/total": 0.5})
    assert loss.state_dict() == {"b": {"t": 0.5}}
    again = _loss(a=(1.0, Constant()), b=(1.0, Schedule()))
    again.load_state_dict(loss.state_dict())
    assert again.state_dict() == {"b": {"t": 0.5}}


def test_state_of_other_channels_is_refused():
    with pytest.raises(RunFailed) as caught:
        _loss(b=(1.0, Schedule())).load_state_dict({"c": {"t": 0.5}})
    assert str(caught.value) == (
        "the checkpoint holds state of ['c'], this run has state in ['b']\n"
        "  fix: resume with the channels and weights that the checkpoint was made with"
    )


def test_loss_alone_is_a_whole_channel():
    class Smallest(ChannelDefaults):
        def loss(self, view, batch):
            return Term(torch.zeros(()), "tokens")

    channel: LossChannel = Smallest()
    assert channel.prepare(RolloutText("u", [5], [6], [True], None)) == {}
    assert channel.count(None) == {}
    assert channel.collate([{}], BASE.rollouts) == {}
    assert channel.divergences(0) == ()


# -- what a channel did to the gradient, and where it broke --


class Weighted(ChannelDefaults):
    """The sum of factor x log-prob."""

    def __init__(self, factor):
        self.factor = factor

    def loss(self, view, batch):
        return Term((view.logps(SEQS, grad=True, temperature=1.0) * self.factor).sum(), "tokens")


def _leaf_view(logps=(0.0, -1.0, 0.0)):
    return LeafView([KnownLogps(SEQS, torch.tensor(logps))], temperature=1.0)


def test_grad_norms_are_each_channels_own_and_known_after_the_backward():
    loss = _loss(a=(0.5, Weighted(torch.tensor([0.0, 3.0, 4.0]))), b=(2.0, Weighted(1.0)))
    view = _leaf_view()
    batch = Batch(rollouts=BASE.rollouts, counts={"tokens": 10.0})
    parts = loss.channels(view, {"a": batch, "b": batch})
    assert not any(key.startswith("grad_square") for key in parts.sums())
    # a backend multiplies by the number of ranks: that is not the channel's doing
    view.coefficients(4 * parts.total)
    norms = loss.metrics({key: float(value) for key, value in parts.sums().items()}, batch.counts)
    assert norms["grad_norm/a"] == pytest.approx(0.5 * 5 / 10)  # weight x |(0, 3, 4)| / count
    assert norms["grad_norm/b"] == pytest.approx(2 * 3**0.5 / 10)


def test_a_channel_without_a_gradient_has_norm_zero_and_one_without_the_model_none():
    loss = _loss(still=(1.0, Weighted(0.0)), apart=(1.0, Constant(6.0)))
    view, batch = _leaf_view(), Batch(rollouts=BASE.rollouts, counts={"tokens": 1.0})
    parts = loss.channels(view, {"still": batch, "apart": batch})
    parts.total.backward()
    metrics = loss.metrics({key: float(value) for key, value in parts.sums().items()}, batch.counts)
    assert metrics["grad_norm/still"] == 0.0
    assert "grad_norm/apart" not in metrics


def test_metrics_carry_weight_share_and_tokens_of_each_channel():
    loss = _loss(a=(0.5, Constant(metrics={"gap": torch.tensor(9.0)})))
    counts = {"tokens": 3.0, "a.rows": 8.0, "a.active": 2.0}
    parts = loss.channels(None, {"a": Batch(counts=counts)})
    sums = {key: float(value) for key, value in parts.sums().items()}
    assert loss.metrics(sums, counts) == {
        "loss/a": 2.0,
        "a/gap": 3.0,
        "weight/a": 0.5,
        "active/a": 0.25,
        "tokens/a": 3.0,
    }


def test_a_bad_token_is_named_with_its_row_and_place():
    rollouts = Rollouts(SEQS, action=torch.tensor([False, True, False]), uid=("7-0-0", "7-0-1"))
    with pytest.raises(RunFailed) as caught:
        _loss(a=(1.0, Weighted(1.0))).channels(
            _leaf_view((0.0, math.nan, 0.0)), {"a": Batch(rollouts=rollouts, counts={"tokens": 1.0}, step=7)}
        )
    assert str(caught.value).splitlines()[0] == (
        "the loss of 'a' is nan at step 7: the policy log-prob of row 0 (7-0-0), token 1 (id 6), is not finite"
    )


def test_where_steps_are_skipped_a_bad_loss_is_reported_and_not_raised():
    active = [ActiveChannel("a", 1.0, Constant(math.nan)), ActiveChannel("b", 1.0, Constant(1.0))]
    loss = CompositeLoss(active, NoObjective(), on_nonfinite="skip")
    parts = _compute(loss, tokens=3.0)
    assert not parts.finite
    assert math.isnan(parts.terms["a"].value)
    assert _compute(_loss(b=(1.0, Constant(1.0))), tokens=3.0).finite


# -- rows of its own --


class Drawing(Constant):
    rows_per_step = 5

    def draw(self, step, rank, world):
        return [{"n": float(i)} for i in range(rank, 5, world)]


def test_drawn_rows_are_dealt_out_and_those_of_rollouts_go_with_them():
    loss = _loss(a=(1.0, Constant()), d=(1.0, Drawing()))
    rows = {"a": [{"r": 0}, {"r": 1}, {"r": 2}], **loss.draw(3, 0, 1)}
    first, second = loss.split(rows, [[2], [0, 1]])
    assert first == {"a": [{"r": 2}], "d": [{"n": 0.0}, {"n": 2.0}, {"n": 4.0}]}
    assert second == {"a": [{"r": 0}, {"r": 1}], "d": [{"n": 1.0}, {"n": 3.0}]}


def test_ranks_share_drawn_rows_and_channels_without_any_are_not_asked():
    loss = _loss(a=(1.0, Constant()), d=(1.0, Drawing()))
    assert [loss.draw(3, rank, 2) for rank in (0, 1)] == [
        {"d": [{"n": 0.0}, {"n": 2.0}, {"n": 4.0}]},
        {"d": [{"n": 1.0}, {"n": 3.0}]},
    ]


# -- what the plan decided --


class Wanting(Constant):
    def __init__(self, teacher=None):
        super().__init__()
        self.teacher, self.told = teacher, []

    def planned(self, needs):
        self.told.append(needs)


def test_a_channel_is_told_which_of_its_alternatives_was_planned():
    channel, untold = Wanting(), Wanting()
    chosen = frozenset({Need.DIVERGENCE_TOPK})
    CompositeLoss([ActiveChannel("a", 1.0, channel, chosen), ActiveChannel("b", 1.0, untold)], NoObjective())
    assert (channel.told, untold.told) == ([chosen], [])


def test_the_trainer_learns_which_teacher_to_make():
    ema = SelfTeacher("ema", 0.1)
    assert _loss(a=(1.0, Constant()), b=(1.0, Wanting(ema)), c=(1.0, Wanting(ema))).teacher == ema
    assert _loss(a=(1.0, Constant())).teacher is None


def test_two_teachers_are_refused():
    loss = _loss(b=(1.0, Wanting(SelfTeacher("ema"))), c=(1.0, Wanting(SelfTeacher("frozen"))))
    with pytest.raises(UsageError) as caught:
        _ = loss.teacher
    assert str(caught.value) == (
        "loss.channels: the channels want different teachers: 'b' wants ema weights and 'c' wants frozen weights"
    )


def test_a_stateful_channel_finds_its_own_metrics_under_bare_names():
    class Listening(Schedule):
        def on_step_end(self, step, metrics):
            self.t = metrics["loss"]

    channel = Listening()
    _loss(b=(1.0, channel)).on_step_end(1, {"loss/b": 0.25, "loss/total": 9.0})
    assert channel.t == 0.25
