"""Each tripwire by itself; through a worker in test_run_control.py."""

import math
import time

import pytest

from composer_core.errors import RunFailed
from composer_core.run.tripwires import DeadChannel, HighKl, NonFiniteMetric, RewardDrop, tripwires
from composer_core.spec.model import LimitsSpec


def first_trip(tripwire, lines):
    """(index from 1, text) of the first line that trips it."""
    for index, line in enumerate(lines, 1):
        if (text := tripwire.check(index, line)) is not None:
            return index, text
    return None


@pytest.mark.parametrize("name", ["loss/total", "loss/sdpo", "grad_norm", "grad_norm/sdpo"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_loss_or_gradient_that_is_not_finite_trips(name, value):
    assert first_trip(NonFiniteMetric(), [{name: 1.0}, {name: value}]) == (2, f"{name} is {value}")


def test_other_metrics_may_be_what_they_like():
    assert first_trip(NonFiniteMetric(), [{"reward/mean": math.nan, "upstream/kl": math.inf}]) is None


def test_a_kl_above_the_bound_trips_and_one_at_the_bound_does_not():
    lines = [{"policy/kl": 0.5}, {"policy/kl": 0.50001}]
    assert first_trip(HighKl(0.5), lines) == (2, "limits.kl: policy/kl is 0.5, above 0.5")


def test_a_limit_on_a_kl_that_nobody_logs_is_a_failure():
    with pytest.raises(RunFailed) as caught:
        HighKl(0.5).check(1, {"loss/total": 1.0})
    assert str(caught.value) == "limits.kl is set, but the backend logs no policy/kl\n  fix: remove limits.kl"


def test_a_reward_that_falls_by_the_share_from_its_best_mean_trips():
    # ten times 1.0: mean 1, the best. Each 0.0 takes 0.1 off the mean: 0.5 is still (1 - 0.5) x 1, 0.4 is not
    rewards = [1.0] * 10 + [0.0] * 9
    found = first_trip(RewardDrop(0.5), [{"reward/mean": reward} for reward in rewards])
    assert found == (
        16,
        "limits.reward_drop: the mean reward of the last 10 logged steps is 0.4, more than 50% below the best, 1",
    )


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, *[0.0] * 8],  # no ten steps yet
        [-1.0] * 10 + [-5.0] * 10,  # no share of a negative best
        [0.5, math.nan] * 15,  # steps without a reward do not count
    ],
    ids=["too-few", "negative", "unrewarded"],
)
def test_what_is_no_collapse_does_not_trip(rewards):
    assert first_trip(RewardDrop(0.1), [{"reward/mean": reward} for reward in rewards]) is None


def channel(active, loss=0.0, norm=0.0):
    return {"active/sdpo": active, "loss/sdpo": loss, "grad_norm/sdpo": norm}


def test_rows_without_loss_and_gradient_for_so_many_steps_are_a_dead_channel():
    found = first_trip(DeadChannel("sdpo", after=3), [channel(0.5)] * 5)
    assert found == (
        3,
        "channel 'sdpo' is dead: neither loss nor gradient in the last 3 logged steps, 3 of them with rows",
    )


def test_a_channel_without_any_row_in_that_time_is_dead_too():
    found = first_trip(DeadChannel("sdpo", after=3), [channel(0.5, loss=1.0), *[channel(0.0)] * 3])
    assert found == (4, "channel 'sdpo' is dead: no row in the last 3 logged steps")


@pytest.mark.parametrize(
    "sign",
    [channel(0.1, loss=1e-9), channel(0.1, norm=1e-9)],
    ids=["a-loss", "a-gradient-alone"],
)
def test_one_sign_of_life_starts_the_count_anew(sign):
    idle = [channel(0.0)] * 2
    assert first_trip(DeadChannel("sdpo", after=3), [*idle, sign, *idle, sign, *idle]) is None


def test_a_backend_that_logs_nothing_of_a_channel_is_not_blamed():
    assert first_trip(DeadChannel("sdpo", after=1), [{"loss/total": 0.0}] * 3) is None


def test_with_allow_dead_it_is_reported_once_in_that_time_and_nothing_stops():
    said = []
    watching = tripwires(LimitsSpec(dead_after=2, allow_dead=True), channels=["sdpo"], warn=said.append)
    for step in range(1, 6):
        assert [tripwire.check(step, channel(0.0)) for tripwire in watching] == [None] * len(watching)
    assert said == [f"channel 'sdpo' is dead: no row in the last 2 logged steps at step {step}" for step in (2, 4)]


def test_only_what_the_limits_ask_for_is_watched():
    names = [type(one).__name__ for one in tripwires(LimitsSpec(), channels=[], warn=print)]
    assert names == ["NonFiniteMetric"]
    limits = LimitsSpec(kl=1.0, reward_drop=0.5)
    names = [type(one).__name__ for one in tripwires(limits, channels=["a", "b"], warn=print)]
    per_channel = ["DeadChannel", "Reported"]  # the second: hints that say nothing
    assert names == ["NonFiniteMetric", "HighKl", "RewardDrop", *per_channel, *per_channel]


def test_hints_that_change_nothing_are_told_and_stop_nothing():
    said = []
    watching = tripwires(LimitsSpec(dead_after=3), channels=["sdpo"], warn=said.append)

    def step(number, *, gain, active=1.0):
        line = {"loss/sdpo": 0.1, "grad_norm/sdpo": 0.1, "active/sdpo": active, "sdpo/hint_gain": gain}
        assert [tripwire.check(number, line) for tripwire in watching] == [None] * len(watching)

    for number, gain in enumerate([0.01, -0.01, -3.4, 0.0, 0.019], 1):  # wrong tokens: a good hint lowers them
        step(number, gain=gain)
    step(6, gain=0.0, active=0.0)  # no hint, so nothing is known
    assert said == []
    step(7, gain=-0.019)
    assert said == [
        "channel 'sdpo': hints say nothing, and such hints hurt: in the last 3 logged steps with any they changed the "
        "log-prob of a sampled token by less than 0.02 on average at step 7"
    ]


def test_watching_a_step_costs_less_than_a_tenth_of_a_millisecond():
    limits = LimitsSpec(kl=1e9, reward_drop=1.0, allow_dead=True)
    watching = tripwires(limits, channels=["sdpo", "replay"], warn=lambda reason: None)
    line = {f"upstream/{i}": 1.0 for i in range(40)} | channel(1.0, loss=1.0) | {"policy/kl": 0.1, "reward/mean": 1.0}
    times = []
    for step in range(300):
        start = time.perf_counter()
        for tripwire in watching:
            tripwire.check(step, line)
        times.append(time.perf_counter() - start)
    assert sorted(times)[150] < 1e-4
