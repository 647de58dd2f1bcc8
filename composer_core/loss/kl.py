"""Estimators of the KL from the policy to a reference, per token, from the log-probs of the sampled token alone.

d = log pi - log ref of the sampled token. Its mean over samples of pi is KL(pi || ref), but a loss needs the right
GRADIENT: that of k1 has mean 0 whatever the policy does, so k1 belongs in the reward; k2 has the true gradient of the
KL on policy; k3 has the least variance as a value and a gradient of another divergence. Schulman 2020, "Approximating
KL Divergence". Where it enters, and its weight, is `policy.py`. To add one: a function here, a name in `ESTIMATORS`
and in `presets.Estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from composer_core.loss.clip import bounded
from composer_core.loss.presets import Estimator
from composer_core.loss.reduce import check_shapes


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d, any shape. Unbiased in value; for the reward only."""
    return _gap(logps, ref_logps)


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d^2 / 2, any shape. Biased in value; its gradient d grad log pi is that of KL(pi || ref) on policy."""
    return _k2(_gap(logps, ref_logps))


def k3(logps: Tensor, ref_logps: Tensor, *, cap: float | None = None) -> Tensor:
    """e^-d + d - 1, any shape: unbiased, never negative.

    `cap` bounds the value as verl does (10); beyond it the gradient is 0, so a token that drifted far is not pulled
    back any more.
    """
    value = _k3(_gap(logps, ref_logps))
    return value if cap is None else value.clamp(-cap, cap)


def k3_straight_through(logps: Tensor, ref_logps: Tensor, *, cap: float | None = None) -> Tensor:
    """The value of `k3` with the gradient of `k2`, any shape."""
    right_gradient = k2(logps, ref_logps)
    return right_gradient + (k3(logps, ref_logps, cap=cap) - right_gradient).detach()


def _k1(gap: Tensor) -> Tensor:
    return gap


def _k2(gap: Tensor) -> Tensor:
    return gap.square() / 2


def _k3(gap: Tensor) -> Tensor:
    gap = bounded(gap)
    return (-gap).exp() + gap - 1


def _k3_straight_through(gap: Tensor) -> Tensor:
    right_gradient = _k2(gap)
    return right_gradient + (_k3(gap) - right_gradient).detach()


ESTIMATORS: Mapping[Estimator, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "k3-straight-through": _k3_straight_through,
}
"""Each as a function of d itself, for whoever has subtracted and selected already."""


def _gap(logps: Tensor, ref_logps: Tensor) -> Tensor:
    check_shapes("one entry per token", logps=logps, ref_logps=ref_logps)
    return logps - ref_logps.detach()
