"""DistiLLM's family, sampled-token distillation and discounted sums.

Letters: B sequences, T tokens, V vocabulary; q student, p teacher. Masks are (B, T), losses masked token means.
"""

import torch
from torch import Tensor


def _log_softmax(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def _mean(per_token: Tensor, mask: Tensor) -> Tensor:
    return (per_token * mask).sum() / mask.sum()


def forward_cross_entropy(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """-sum p log q: KL(p || q) without the teacher's entropy."""
    return _mean(-(_log_softmax(teacher).exp() * _log_softmax(student)).sum(-1), mask)


def reverse_kl(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """sum q (log q - log p)."""
    log_q, log_p = _log_softmax(student), _log_softmax(teacher)
    return _mean((log_q.exp() * (log_q - log_p)).sum(-1), mask)


def mixed_js(student: Tensor, teacher: Tensor, mask: Tensor, *, teacher_weight: float) -> Tensor:
    """w KL(p || m) + (1 - w) KL(q || m) with m = w p + (1 - w) q."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    log_m = (teacher_weight * p + (1 - teacher_weight) * q).log()
    to_teacher = (p * (p.log() - log_m)).sum(-1)
    to_student = (q * (q.log() - log_m)).sum(-1)
    return _mean(teacher_weight * to_teacher + (1 - teacher_weight) * to_student, mask)


def skew_forward(student: Tensor, teacher: Tensor, mask: Tensor, *, lam: float) -> Tensor:
    """-sum p log(lam p + (1 - lam) q): skewed KL without the teacher's entropy."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    return _mean(-(p * (lam * p + (1 - lam) * q).log()).sum(-1), mask)


def skew_reverse(student: Tensor, teacher: Tensor, mask: Tensor, *, lam: float) -> Tensor:
    """sum q (log q - log((1 - lam) p + lam q))."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    return _mean((q * (q.log() - ((1 - lam) * p + lam * q).log())).sum(-1), mask)


def total_variation(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Half the L1 distance."""
    return _mean((student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2, mask)


def adaptive_kl(student: Tensor, teacher: Tensor, mask: Tensor, *, mu: float) -> Tensor:
    """Forward cross-entropy and reverse KL mixed by where q and p differ: among likely entries or in the tail.

    2404.02657 as the official code computes it: whether entry v belongs to the head is read off the v-th SMALLEST
    teacher probability and not its own, and the mixing weights carry gradient.
    """
    q, p = student.softmax(-1), teacher.softmax(-1)
    gap = (p - q).abs()
    head = p.sort(dim=-1).values.cumsum(-1) >= mu
    share = (gap * head).sum(-1) / gap.sum(-1)
    forward = -(p * q.log()).sum(-1)
    reverse = (q * (q.log() - p.log())).sum(-1)
    return _mean(share * forward + (1 - share) * reverse, mask)


def importance_weighted_opd(
    student: Tensor,
    tokens: Tensor,
    counted: Tensor,
    teacher_logps: Tensor,
    rollout_logps: Tensor,
    *,
    temperature: float,
    gamma: float,
    epsilon: float,
) -> Tensor:
    """-w A log q with A = log p - log q_rollout and w = 1 + gamma (1 - prefix |A| / total |A|). 2606.22600."""
    log_q = _log_softmax(student / temperature).gather(-1, tokens[..., None]).squeeze(-1)
    advantage = torch.where(counted, teacher_logps - rollout_logps, 0.0).detach()
    size = advantage.abs()
    before = size.cumsum(1) - size
    weight = 1 + gamma * (1 - before / size.sum(1, keepdim=True).clamp(min=epsilon))
    return _mean(-weight * advantage * log_q, counted)


def discounted_future_sum(x: Tensor, *, gamma: float) -> Tensor:
    """y_t = x_t + gamma y_(t+1), (T,)."""
    sums, following = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
    for t in reversed(range(len(x))):
        following = x[t] + gamma * following
        sums[t] = following
    return sums
