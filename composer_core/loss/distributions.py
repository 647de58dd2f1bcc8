"""Next-token distributions as log-probabilities, and the sums between two of them.

The numerical rules of every divergence live here: upcast before anything else, never log of a softmax, no mixture
outside log space, nothing infinite. Supports, targets and gates are built on top (`topk.py`, `targets.py`,
`divergence.py`). Letters: V vocabulary; q student, p teacher. The last dimension is the vocabulary's.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from composer_core.divergences import Divergence, DivergenceKind, Support

LOGP_FLOOR = -100.0
"""Log-probability of an entry without any mass (a logit of -inf). It makes KL finite where one side excludes what the
other does not (the true value is infinite), and an entry excluded on both sides contribute exactly 0."""


def wide(values: Tensor) -> Tensor:
    """`values` in at least float32."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of logits / temperature, (..., V), in at least float32; entries may be -inf."""
    # upcast before the division: in bf16 the temperature alone rounds the loss by up to a percent
    scaled = wide(logits) if temperature == 1 else wide(logits) / temperature
    return scaled.log_softmax(-1)


def floored(log_p: Tensor) -> Tensor:
    """Log-probabilities with `LOGP_FLOOR` in the place of -inf, where the gradient is 0. Finite ones are exact."""
    return log_p.masked_fill(log_p == -torch.inf, LOGP_FLOOR)


def tell_infinite(log_q: Tensor, log_p: Tensor, spec: Divergence) -> None:
    """Warn where a KL of `spec` is infinite and `LOGP_FLOOR` makes it finite, from floored (..., V); JSD never is.

    Python shows the warning once, as its text is always the same: what matters is that it happens at all.
    """
    excluded_q, excluded_p = log_q == LOGP_FLOOR, log_p == LOGP_FLOOR
    to_student = spec.kind is DivergenceKind.KL_TEACHER_STUDENT or spec.gate is not None
    to_teacher = spec.kind is DivergenceKind.KL_STUDENT_TEACHER
    if (to_student and (excluded_q & ~excluded_p).any()) or (to_teacher and (excluded_p & ~excluded_q).any()):
        warnings.warn(
            f"the {spec.kind} of some token is infinite: one side gives no mass at all (a logit of -inf) to an entry "
            f"that the other allows; it is counted with a log-probability of {LOGP_FLOOR:g}",
            stacklevel=2,
        )


def entropy(log_p: Tensor) -> Tensor:
    """-sum p log p in nats, (..., V) -> (...)."""
    log_p = floored(log_p)
    return -(log_p.exp() * log_p).sum(-1)


def kl_entries(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Terms a (log a - log b) of KL(a || b) from floored log-probabilities, (..., V); single terms may be negative."""
    return log_a.exp() * (log_a - log_b)


def divergence_entries(log_q: Tensor, log_p: Tensor, kind: DivergenceKind, *, beta: float) -> Tensor:
    """Terms of a divergence before the vocabulary sum, (..., V), from floored log-probabilities.

    With M = (1 - beta) q + beta p:
    `kl_teacher_student`: KL(p || q); `kl_student_teacher`: KL(q || p);
    `jsd`: beta KL(p || M) + (1 - beta) KL(q || M), Agarwal et al. 2023 (2306.13649).
    """
    if kind is DivergenceKind.KL_TEACHER_STUDENT:
        return kl_entries(log_p, log_q)
    if kind is DivergenceKind.KL_STUDENT_TEACHER:
        return kl_entries(log_q, log_p)
    # logaddexp, not log((1 - beta) q + beta p): the mixture of two tiny probabilities underflows in fp32
    log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return beta * kl_entries(log_p, log_m) + (1 - beta) * kl_entries(log_q, log_m)


def sampled_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) estimated from the log-probabilities of one token that the student sampled; shapes are kept.

    The value is log q - log p: unbiased, of either sign. The gradient is (log q - log p) grad log q, which is unbiased
    for the KL too; differentiating the value itself would give 0 on average. Schulman 2020; Lu 2025, "On-policy
    distillation".
    """
    gap = (log_q - log_p).detach()
    return gap + gap * (log_q - log_q.detach())


def sampled_surrogate(log_q: Tensor, log_p: Tensor) -> Tensor:
    """sg(log q - log p) log q, as published code returns it: the gradient of `sampled_kl`, but the VALUE is no KL.

    SDPO (2601.20802) and TRL. Compare with their numbers; log `sampled_kl`.
    """
    return (log_q - log_p).detach() * log_q


def between(log_q: Tensor, log_p: Tensor, spec: Divergence) -> Tensor:
    """The base divergence of `spec` over the entries given, (..., k) -> (...), from floored log-probabilities."""
    if spec.support is Support.SAMPLED:
        return sampled_kl(log_q, log_p).sum(-1)
    return divergence_entries(log_q, log_p, spec.kind, beta=spec.beta).sum(-1)
