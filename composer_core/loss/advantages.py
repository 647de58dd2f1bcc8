"""From the rewards of a step to advantages: each rollout against the others of its prompt.

Length penalties and a KL are in the rewards by then (`policy.py`). Letters: S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_core.errors import RunFailed
from composer_core.loss.presets import Scale
from composer_core.loss.reduce import check_shapes, select

STD_EPS = 1e-4
"""Added to the standard deviation of rewards, as in TRL 1.16; verl adds 1e-6."""


def group_advantages(rewards: Tensor, group: Tensor, *, scale: Scale, eps: float = STD_EPS) -> tuple[Tensor, int]:
    """Rewards less their group's mean, over a scale: (S,), and how many rollouts had no other to compare with.

    `group` and `batch` divide by the standard deviation (n - 1) of the group or of all, plus `eps`: Shao et al. 2024
    (2402.03300). `none` does not divide: Liu et al. 2025 (2503.20783). `mean` divides by the group's mean, 0 where
    that is 0: MaxRL (2602.02710), for rewards of 0 and 1.

    A NaN reward means "not rewarded": it enters neither mean nor deviation, and its advantage is 0. The only rewarded
    rollout of a group gets advantage 0 (verl would give it its raw reward) and is counted in the second result.

    Raises:
        ValueError: `rewards` and `group` differ in shape, or rewards are whole numbers.
        RunFailed: scale `mean` with a negative reward, which would turn good into bad.
    """
    check_shapes("one entry per sequence", rewards=rewards, group=group)
    if not rewards.is_floating_point():  # advantages have the rewards' type: a half would become 0
        raise ValueError(f"rewards must be floating-point, got {rewards.dtype}")
    rewarded = ~rewards.isnan()
    # float64: the mean of equal rewards such as 0.1 must give 0, which a deviation of about 0 would else magnify
    values = select(rewards, rewarded).double()
    ids, index = torch.unique(group, return_inverse=True)
    total = values.new_zeros(len(ids))
    sizes = total.index_add(0, index, rewarded.double())
    means = total.index_add(0, index, values) / sizes.clamp(min=1)
    centred = select(values - means[index], rewarded)
    if scale == "group":
        squares = total.index_add(0, index, centred.square())
        centred = centred / ((squares / (sizes - 1).clamp(min=1)).sqrt()[index] + eps)
    elif scale == "batch":
        centred = centred / (_deviation(values, rewarded) + eps)
    elif scale == "mean":
        centred = _over_mean(centred, values, means[index])
    return centred.to(rewards.dtype), int((sizes == 1).sum())


def _deviation(values: Tensor, rewarded: Tensor) -> Tensor:
    n = rewarded.sum().clamp(min=1)
    spread = select(values - values.sum() / n, rewarded)
    return (spread.square().sum() / (n - 1).clamp(min=1)).sqrt()


def _over_mean(centred: Tensor, values: Tensor, means: Tensor) -> Tensor:
    if (values < 0).any():
        raise RunFailed(
            f"advantages over the group's mean need rewards >= 0, and one is {float(values.min()):g}",
            fix="use rewards from 0 to 1, without penalties in them, or another loss.objective.scale_rewards",
        )
    return torch.where(means > 0, centred / means.clamp(min=torch.finfo(means.dtype).tiny), 0.0)
