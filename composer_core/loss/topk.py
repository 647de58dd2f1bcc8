"""Divergences over a few vocabulary entries: which ones, and how the rest of the mass is treated.

Probabilities are always those of the full softmax, gathered. To add a support, name it in `protocols.Support` and
choose its entries in `entries_of`. Letters: K hint tokens, V vocabulary, k entries per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_core.divergences import Divergence, Support
from composer_core.loss.distributions import LOGP_FLOOR, floored, kl_entries


@dataclass(frozen=True)
class Entries:
    """A few vocabulary entries of each token."""

    ids: Tensor
    """(K, k)"""
    valid: Tensor | None = None
    """(K, k) bool, False where an id stands a second time; None when all are valid."""


def is_full(spec: Divergence, vocab: int) -> bool:
    """Whether a spec sums over the whole vocabulary of that size."""
    return spec.support is Support.FULL or (spec.k is not None and spec.k >= vocab)


def entries_of(log_q: Tensor, log_p: Tensor, spec: Divergence, *, sampled_ids: Tensor | None) -> Entries:
    """The entries that a support other than full sums over, from log-probabilities (or logits), (K, V)."""
    if spec.support is Support.SAMPLED:
        assert sampled_ids is not None  # the caller's shapes were checked
        return Entries(sampled_ids[:, None])
    assert spec.k is not None  # as Divergence checks
    if spec.support is Support.TOPK_TEACHER:
        return Entries(log_p.topk(spec.k, dim=-1).indices)
    student = log_q.topk(spec.k, dim=-1).indices
    if spec.support is Support.TOPK_STUDENT:
        return Entries(student)
    teacher = log_p.topk(spec.k, dim=-1).indices
    repeated = (teacher[:, :, None] == student[:, None, :]).any(-1)
    return Entries(torch.cat([student, teacher], -1), torch.cat([torch.ones_like(repeated), ~repeated], -1))


def restricted(log_p_at: Tensor, valid: Tensor | None, spec: Divergence) -> Tensor:
    """Floored log-probabilities on a support from those gathered there, (K, k) -> (K, k) or, with the tail, (K, k+1).

    The tail entry holds the mass of all others, so that the result is a distribution whose gradient is the full one's
    summed; without it the support is renormalised. Sampled entries stay as they are.
    """
    log_p_at = floored(log_p_at)
    if spec.support is Support.SAMPLED:
        return log_p_at
    if valid is not None:
        log_p_at = log_p_at.masked_fill(~valid, LOGP_FLOOR)
    covered = log_p_at.logsumexp(-1, keepdim=True)
    if not spec.tail:
        return log_p_at - covered
    # not less than one rounding: a support that holds all the mass would give log 0, with an infinite gradient
    tail = torch.log(-torch.expm1(covered.clamp(max=-torch.finfo(covered.dtype).eps)))
    return torch.cat([log_p_at, tail], -1)


def truncated_kl(log_q_at: Tensor, log_p_at: Tensor) -> Tensor:
    """The sum of p (log p - log q) over gathered entries, (K, k) -> (K,), neither renormalised nor with a tail.

    As published in arXiv 2603.07079 and by verl. It may be negative, and its gradient is not 0 at p = q.
    """
    return kl_entries(floored(log_p_at), floored(log_q_at)).sum(-1)
