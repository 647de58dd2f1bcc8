"""Sentences about a logged step whose numbers look wrong and are not: a loss of 0, a channel without rows.

Each is said once in a run. What ends a run is in `tripwires.py`. To add one, write a function from a step's metrics to
a sentence or None, and list it in `Explainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from composer_core.run.metrics import FLAT_GROUPS, POLICY_LOSS, REWARD

Metrics = Mapping[str, float]
Explanation = Callable[[Metrics], str | None]

ZERO = 1e-7
"""Below it a loss of the order of 1 is rounding."""


class Explainer:
    """Sees every logged step, in order."""

    def __init__(self, channels: Sequence[str]) -> None:
        """`channels` are those that are computed."""
        self._left: list[Explanation] = [_flat, _on_policy]
        self._left += [partial(kind, name) for name in channels for kind in (_idle, _silent)]

    def step(self, step: int, metrics: Metrics) -> Iterator[str]:
        """What is to be said about this step."""
        for explanation in list(self._left):
            said = explanation(metrics)
            if said is not None:
                self._left.remove(explanation)
                yield f"step {step}: {said} (said once)"


def _flat(metrics: Metrics) -> str | None:
    if metrics.get(FLAT_GROUPS) != 1:
        return None
    return (
        "the rewards of every group are equal, so all advantages are 0 and the policy loss teaches nothing here; "
        f"{FLAT_GROUPS} is the share of such groups"
    )


def _on_policy(metrics: Metrics) -> str | None:
    loss = metrics.get(POLICY_LOSS)
    if loss is None or abs(loss) > ZERO or not metrics.get("grad_norm"):
        return None
    if REWARD not in metrics or metrics.get(FLAT_GROUPS) == 1:
        return None  # nothing was rewarded, or all alike: the gradient is a channel's
    return (
        f"{POLICY_LOSS} is 0 because the advantages of a group add up to 0 while the policy is the one that sampled; "
        "its gradient is not: look at grad_norm"
    )


def _idle(name: str, metrics: Metrics) -> str | None:
    if metrics.get(f"active/{name}") != 0:
        return None
    return f"channel {name!r} has nothing to learn from here: none of its rows held anything, so loss/{name} is 0"


def _silent(name: str, metrics: Metrics) -> str | None:
    if not metrics.get(f"active/{name}") or metrics.get(f"loss/{name}") or metrics.get(f"grad_norm/{name}"):
        return None
    return f"channel {name!r} has rows, and yet neither loss nor gradient: what it teaches is what the policy does"
