"""Preference losses that the package leaves to plugins, one value per pair, (P,).

W and L: policy minus reference log-prob of chosen and rejected; d = W - L.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def hinge(d: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta d)."""
    return (1 - beta * d).relu()


def exo_pair(d: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """KL from the policy's preference (sigmoid of beta d) to the label's (1 - e, e). 2402.00856, eq. 16."""
    preferred, dispreferred = torch.sigmoid(beta * d), torch.sigmoid(-beta * d)
    return preferred * (logsigmoid(beta * d) - math.log(1 - label_smoothing)) + dispreferred * (
        logsigmoid(-beta * d) - math.log(label_smoothing)
    )


def nca_pair(w: Tensor, ll: Tensor, *, beta: float) -> Tensor:
    """-ls(bW) - ls(-bW) / 2 - ls(-bL) / 2. 2402.05369."""
    return -logsigmoid(beta * w) - (logsigmoid(-beta * w) + logsigmoid(-beta * ll)) / 2


def bco_pair(w: Tensor, ll: Tensor, *, beta: float) -> Tensor:
    """-ls(bW) - ls(-bL). 2404.04656."""
    return -logsigmoid(beta * w) - logsigmoid(-beta * ll)


def sppo_hard(w: Tensor, ll: Tensor, *, beta: float) -> Tensor:
    """(W - 1/2b)^2 + (L + 1/2b)^2. 2405.00675."""
    return (w - 0.5 / beta).square() + (ll + 0.5 / beta).square()


def sorted_pairs(better: Tensor, worse: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """AOT: the k-th best of one sample against the k-th best of another. 2406.05882."""
    d = better.sort().values - worse.sort().values
    return -(1 - label_smoothing) * logsigmoid(beta * d) - label_smoothing * logsigmoid(-beta * d)


def discopop(d: Tensor, *, beta: float, tau: float) -> Tensor:
    """(1 - m) (-ls(bd)) + m e^(-bd) with m = sigmoid(bd / tau). 2406.08414, eq. 5."""
    m = torch.sigmoid(beta * d / tau)
    return (1 - m) * -logsigmoid(beta * d) + m * (-beta * d).exp()


def dpo_sigmoid(d: Tensor, *, beta: float) -> Tensor:
    """-log sigmoid(beta d), on scores of any f-divergence."""
    return -logsigmoid(beta * d)


F_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_kl": lambda u: u,
    "forward_kl": lambda u: 1 - (-u).exp(),
    "js_divergence": lambda u: math.log(2) + logsigmoid(u),
}
"""f-DPO: the score of a log-ratio u. 2309.16240."""


def length_desensitised(per_token: Tensor, mask: Tensor, *, ld_alpha: float) -> Tensor:
    """LD-DPO: log-prob of the part both answers of a pair have, plus ld_alpha x the rest, (2P,). 2409.06411.

    Rows 0..P-1 are chosen, the others rejected; (2P, T).
    """
    place = mask.cumsum(1)
    lengths = mask.sum(1).view(2, -1).min(0).values.repeat(2)[:, None]
    shared, rest = (place > 0) & (place <= lengths), place > lengths
    return (per_token * shared).sum(1) + ld_alpha * (per_token * rest).sum(1)


def alphapo(chosen_avg: Tensor, rejected_avg: Tensor, *, beta: float, gamma: float, alpha: float) -> Tensor:
    """SimPO on rewards (1 - p^-alpha) / alpha. 2501.03884."""
    chosen, rejected = ((1 - (-alpha * avg).exp()) / alpha for avg in (chosen_avg, rejected_avg))
    return -logsigmoid(beta * (chosen - rejected) - gamma)
