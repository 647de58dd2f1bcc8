"""Policy losses that the package does not ship: verl's rarer ones and prime-rl's.

(B, T) or (T,) log-probs, advantages and masks; values are per token unless said.
"""

import torch
from torch import Tensor


def gpg(logps: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: plain REINFORCE."""
    return -advantages * logps


def dro(logps: Tensor, old_logps: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """-A log pi + beta / 2 (log r)^2."""
    return -advantages * logps + beta / 2 * (logps - old_logps).square()


def cispo_two_sided(logps: Tensor, old_logps: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """-sg(clamp(r, 1 - low, 1 + high)) A log pi."""
    ratio = (logps - old_logps).exp().detach()
    return -ratio.clamp(1 - low, 1 + high) * advantages * logps


def verl_shares(mask: Tensor) -> Tensor:
    """Weights that make a sequence's sum verl's mean, (B x T,): it divides by the length + 1e-8."""
    return (1 / (mask.double().sum(1, keepdim=True) + 1e-8)).expand(mask.shape).flatten()


def geometric_mean(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float
) -> Tensor:
    """GMPO as verl has it, a scalar: both means over a sequence divide by its length + 1e-8."""
    log_ratio, sign = logps - old_logps, advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    lengths = mask.sum(-1) + 1e-8
    ratio = ((clipped * mask).sum(-1) / lengths).exp()
    return (-ratio * (advantages * mask).sum(-1) / lengths).mean()


def dppo_sum(
    logps: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    low: float,
    high: float,
    tau: float,
    kl: float,
) -> Tensor:
    """prime-rl's default, a sum: -tau A r on tokens within the trust region, + kl (log r)^2 on all."""
    moved = (logps.exp() - sampler.exp()).detach()
    outside = torch.where(advantages > 0, moved > high, moved < -low)
    return _trusted(logps, sampler, tau * advantages * ~outside, mask * weights, kl=kl)


def ipo_sum(
    logps: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    threshold: float,
    tau: float,
    kl: float,
) -> Tensor:
    """The same with a trust region on both sides whatever the advantage."""
    inside = ((logps.exp() - sampler.exp()).abs() <= threshold).detach()
    return _trusted(logps, sampler, tau * advantages * inside, mask * weights, kl=kl)


def ref_kl_sum(logps: Tensor, sampler: Tensor, ref: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """prime-rl's on-policy distillation, a sum: -sg(log p - log q) r where q fell by at most 0.2, + 1e-3 (log r)^2."""
    kept = (logps.exp() - sampler.exp() >= -0.2).detach()
    return _trusted(logps, sampler, (ref - logps).detach() * kept, mask * weights, kl=1e-3)


def _trusted(logps: Tensor, sampler: Tensor, advantages: Tensor, weights: Tensor, *, kl: float) -> Tensor:
    log_ratio = logps - sampler
    return ((-advantages * log_ratio.exp() + kl * log_ratio.square()) * weights).sum()


def cross_entropy_sum(logps: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """-sum log pi."""
    return -(logps * mask * weights).sum()


def absolute_gap(logps: Tensor, ref: Tensor) -> Tensor:
    """|log pi - log ref|."""
    return (logps - ref).abs()


def k1_straight_through(logps: Tensor, ref: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    gap = logps - ref
    return gap.detach() + gap.square() / 2 - (gap.square() / 2).detach()


def leave_one_out(rewards: Tensor, group: list[str]) -> Tensor:
    """RLOO, (S,): the reward less the mean of the others of its group; a lone one keeps its reward."""
    advantages = []
    for i, name in enumerate(group):
        others = [float(rewards[j]) for j, other in enumerate(group) if other == name and j != i]
        advantages.append(float(rewards[i]) - (sum(others) / len(others) if others else 0.0))
    return torch.tensor(advantages, dtype=rewards.dtype)


def normalised_truncation(log_ratio: Tensor, mask: Tensor, *, high: float) -> Tensor:
    """TIS weights divided by their mean over the batch, (B, T)."""
    weights = log_ratio.clamp(-20, 20).exp().clamp(max=high) * mask
    return weights / (weights.sum() / mask.sum())
