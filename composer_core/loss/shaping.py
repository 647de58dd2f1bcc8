"""Penalties on the length of a rollout, for the reward: `policy.PolicyObjective.advantages` adds them before comparing.

Letters: S sequences. Lengths are action tokens, (S,).
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, limit: int, cache: int) -> Tensor:
    """DAPO's soft overlong punishment, (S,): 0 up to limit - cache tokens, then linearly down to -1 at the limit.

    Yu et al. 2025 (2503.14476), eq. 13; there limit 20480 and cache 4096.

    Raises:
        ValueError: not 0 < cache <= limit.
    """
    if not 0 < cache <= limit:
        raise ValueError(f"cache must be in (0, limit], got cache {cache} and limit {limit}")
    return ((limit - cache - lengths) / cache).clamp(-1, 0)


def length_cost(amount: Tensor, *, k: float, q: float) -> Tensor:
    """Composer's effort penalty C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), (S,); log(1 + k x) / k at q = 1.

    It starts with slope 1 and flattens for q > 0: the first tokens of an easy task cost most, a hard task may think
    long. Cursor 2026 (2603.24477); k and q are not published.

    Args:
        amount: x >= 0, (S,), tokens in units of the caller's choice.
        k: how soon it flattens, > 0.
        q: how much, >= 0; 0 is linear.

    Raises:
        ValueError: k or q is out of range.
    """
    if k <= 0 or q < 0:
        raise ValueError(f"length_cost needs k > 0 and q >= 0, got k {k} and q {q}")
    growth = torch.log1p(k * amount)
    # expm1: near q = 1 the plain difference of powers loses all its digits
    return growth / k if q == 1 else torch.expm1((1 - q) * growth) / (k * (1 - q))
