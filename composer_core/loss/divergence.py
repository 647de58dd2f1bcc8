"""Divergences between a teacher's and a student's next-token distributions, from full logits.

The plain exact form, (K, V) tensors and all: the reference that faster forms are compared with. Masks, weights and
denominators are the caller's. Letters: K hint tokens, V vocabulary; q student, p teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer_core.protocols import Divergence, DivergenceKind

LOGP_FLOOR = -100.0
"""Least log-probability of a vocabulary entry. It makes KL finite where one side gives an entry no mass at all (the
true value is infinite), and an entry without mass on both sides contribute exactly 0."""


def divergence(student_logits: Tensor, teacher_logits: Tensor, spec: Divergence) -> Tensor:
    """Divergence per token, (K,), from logits (K, V) of both sides, in nats and at least float32.

    With M = (1 - beta) q + beta p:
    `kl_teacher_student`: KL(p || q); `kl_student_teacher`: KL(q || p);
    `jsd`: beta KL(p || M) + (1 - beta) KL(q || M), Agarwal et al. 2023 (2306.13649).
    Both logits are divided by the temperature; there is no temperature-squared factor. The gradient reaches the
    student only, whatever the teacher requires; where a log-probability lies under `LOGP_FLOOR` it is 0.

    Raises:
        ValueError: the shapes differ, as with two vocabularies.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.dim() != 2:
        raise ValueError(
            f"student logits {tuple(student_logits.shape)} and teacher logits {tuple(teacher_logits.shape)} "
            "must both be (K, V) of one vocabulary"
        )
    log_q = _log_probs(student_logits, spec.temperature)
    log_p = _log_probs(teacher_logits.detach(), spec.temperature)
    if spec.kind is DivergenceKind.KL_TEACHER_STUDENT:
        return _kl(log_p, log_q)
    if spec.kind is DivergenceKind.KL_STUDENT_TEACHER:
        return _kl(log_q, log_p)
    # logaddexp, not log((1 - beta) q + beta p): the mixture of two tiny probabilities underflows in fp32
    log_m = torch.logaddexp(log_q + math.log1p(-spec.beta), log_p + math.log(spec.beta))
    return spec.beta * _kl(log_p, log_m) + (1 - spec.beta) * _kl(log_q, log_m)


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    # upcast before the division: in bf16 the temperature alone rounds the loss by up to a percent
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return (wide / temperature).log_softmax(-1).clamp(min=LOGP_FLOOR)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)
