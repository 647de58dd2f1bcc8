"""Tripwires: what a logged step can say that makes it pointless to train on.

Each looks at one logged step after the other and returns a sentence when it trips. Between logged steps nothing is
checked. A loss or gradient that a backend finds non-finite before the step is applied never gets here (`NonFinite` in
`errors.py`). To add one, write a class with `check` and list it in `tripwires`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from composer_core.errors import RunFailed
from composer_core.run.metrics import REWARD
from composer_core.spec.model import LimitsSpec

KL = "policy/kl"
"""Mean KL per action token to the starting model, on every backend that has `limits.kl` among its `honours`."""
REWARD_STEPS = 10
"""Logged steps in a mean of `limits.reward_drop`."""

VOID_GAIN = 0.02
"""Nats per token below which a hint has no effect worth the name; in `examples/ablation` right hints have 3, void 0."""

Metrics = Mapping[str, float]


class Tripwire(Protocol):
    """Sees every logged step once, in order."""

    def check(self, step: int, metrics: Metrics) -> str | None:
        """Why the run should end, as a sentence without the step; None to go on."""
        ...


def tripwires(limits: LimitsSpec, *, channels: Sequence[str], warn: Callable[[str], None]) -> list[Tripwire]:
    """Those of a run.

    Args:
        limits: the spec's.
        channels: names of the channels that are computed.
        warn: takes what is only to be reported.
    """
    return list(_tripwires(limits, channels, warn))


def _tripwires(limits: LimitsSpec, channels: Sequence[str], warn: Callable[[str], None]) -> Iterator[Tripwire]:
    yield NonFiniteMetric()
    if limits.kl is not None:
        yield HighKl(limits.kl)
    if limits.reward_drop is not None:
        yield RewardDrop(limits.reward_drop)
    for name in channels:
        dead = DeadChannel(name, after=limits.dead_after)
        yield Reported(dead, warn) if limits.allow_dead else dead
        yield Reported(VoidHints(name, after=limits.dead_after), warn)


class NonFiniteMetric:
    """A loss or gradient norm that is NaN or infinite."""

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`."""
        for name, value in metrics.items():
            if name.startswith(("loss/", "grad_norm")) and not math.isfinite(value):
                return f"{name} is {value}"
        return None


class HighKl:
    """`limits.kl`."""

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`.

        Raises:
            RunFailed: the backend logs no KL: a limit that is never looked at must not look like one that holds.
        """
        if KL not in metrics:
            raise RunFailed(f"limits.kl is set, but the backend logs no {KL}", fix="remove limits.kl")
        value = metrics[KL]
        return f"limits.kl: {KL} is {value:.4g}, above {self._bound:g}" if value > self._bound else None


class RewardDrop:
    """`limits.reward_drop`: mean reward of the last 10 logged steps against the best such mean so far.

    Only a positive best can be fallen from by a share of it; below that nothing is checked.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last: deque[float] = deque(maxlen=REWARD_STEPS)
        self._best = 0.0

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`."""
        reward = metrics.get(REWARD, math.nan)
        if not math.isfinite(reward):
            return None
        self._last.append(reward)
        if len(self._last) < REWARD_STEPS:
            return None
        mean = sum(self._last) / REWARD_STEPS
        self._best = max(self._best, mean)
        if self._best <= 0 or mean >= (1 - self._share) * self._best:
            return None
        return (
            f"limits.reward_drop: the mean reward of the last {REWARD_STEPS} logged steps is {mean:.4g}, more than "
            f"{self._share:.0%} below the best, {self._best:.4g}"
        )


class DeadChannel:
    """A channel that had no rows, or rows without any loss or gradient, for `after` logged steps in a row.

    A step without rows alone is idle, which `active/<name>` reports and which is no error.
    """

    def __init__(self, name: str, *, after: int) -> None:
        self._name = name
        self._after = after
        self._silent = 0
        self._with_rows = 0

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`."""
        active = metrics.get(f"active/{self._name}")
        if active is None:
            return None
        signs = (metrics.get(f"loss/{self._name}", 0.0), metrics.get(f"grad_norm/{self._name}", 0.0))
        if active > 0 and any(signs):
            self._silent = self._with_rows = 0
            return None
        self._silent += 1
        self._with_rows += active > 0
        if self._silent < self._after:
            return None
        silent, with_rows = self._silent, self._with_rows
        self._silent = self._with_rows = 0
        if not with_rows:
            return f"channel {self._name!r} is dead: no row in the last {silent} logged steps"
        return (
            f"channel {self._name!r} is dead: neither loss nor gradient in the last {silent} logged steps, "
            f"{with_rows} of them with rows"
        )


class VoidHints:
    """Hints that change nothing: a gain within `VOID_GAIN` of 0 in `after` logged steps with rows, one after the other.

    Of wrong tokens a good hint lowers the log-prob, so only the distance from 0 says something.
    """

    def __init__(self, name: str, *, after: int) -> None:
        self._name = name
        self._after = after
        self._void = 0

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`."""
        gain = metrics.get(f"{self._name}/hint_gain")
        if gain is None or not metrics.get(f"active/{self._name}"):
            return None
        self._void = self._void + 1 if abs(gain) < VOID_GAIN else 0
        if self._void < self._after:
            return None
        self._void = 0
        return (
            f"channel {self._name!r}: hints say nothing, and such hints hurt: in the last {self._after} logged steps "
            f"with any they changed the log-prob of a sampled token by less than {VOID_GAIN:g} on average"
        )


class Reported:
    """Another tripwire that warns instead of stopping."""

    def __init__(self, tripwire: Tripwire, warn: Callable[[str], None]) -> None:
        self._tripwire = tripwire
        self._warn = warn

    def check(self, step: int, metrics: Metrics) -> str | None:
        """See `Tripwire`; always None."""
        tripped = self._tripwire.check(step, metrics)
        if tripped:
            self._warn(f"{tripped} at step {step}")
        return None
