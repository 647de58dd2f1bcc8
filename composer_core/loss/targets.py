"""What a student is drawn towards: the teacher, or something between teacher and student.

A target is a function from logits to detached logits in front of any divergence. How the teacher's entropy weighs two
divergences stands here too; the schedule of TAID's t in `taid_schedule.py`. To add a target, write the function, give
`protocols.Divergence` its number and let `divergence.py` and `tiles.py` apply it.
Letters: V vocabulary; all shapes (..., V).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from composer_core.divergences import SoftGate
from composer_core.loss.checks import check_mask
from composer_core.loss.distributions import entropy, floored, log_probs, wide


def taid_target(student_logits: Tensor, teacher_logits: Tensor, *, t: float) -> Tensor:
    """(1 - t) student + t teacher, detached, in at least float32. Shing et al. 2025 (2501.16937), eq. 3.

    At t = 1 it is the teacher and at t = 0 the student, to the last bit.

    Raises:
        ValueError: the shapes differ, or t is not in [0, 1].
    """
    _check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    if not 0 <= t <= 1:
        raise ValueError(f"t must be in [0, 1], got {t}")
    return _mix(student_logits.detach(), teacher_logits.detach(), t)


def trust_region_target(ref_logits: Tensor, student_logits: Tensor, *, mix: float = 0.05) -> Tensor:
    """(1 - mix) reference + mix student in LOGIT space, detached: a teacher that stays near the reference.

    SDPO's trust-region teacher (2601.20802).

    Raises:
        ValueError: the shapes differ, or mix is not in [0, 1].
    """
    _check_same_shape("student_logits", student_logits, "ref_logits", ref_logits)
    if not 0 <= mix <= 1:
        raise ValueError(f"mix must be in [0, 1], got {mix}")
    return _mix(ref_logits.detach(), student_logits.detach(), mix)


def taid_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, *, t: float | Tensor
) -> Tensor:
    """TAID's official loss, a scalar: mean over the mask of the CROSS-entropy -sum p_t log q. 2501.16937.

    Its value is KL(p_t || q) plus the entropy of the target, so it is not 0 at t = 0, where the gradient is.
    `Divergence(taid=t)` is the same target without that constant, in front of any divergence.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V); it gets no gradient.
        mask: (...), true or 1 where a token counts; None counts all. An empty mask gives 0.
        t: in [0, 1].

    Raises:
        ValueError: shapes differ, the mask is none, or t is not in [0, 1].
    """
    if mask is not None:
        _check_same_shape("mask", mask, "student_logits without the vocabulary", student_logits[..., 0])
        _check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
        check_mask("mask", mask)
        # only these are computed: what the others hold reaches neither value nor gradient
        student_logits, teacher_logits = student_logits[mask.bool()], teacher_logits[mask.bool()]
    target = taid_target(student_logits, teacher_logits, t=float(t))
    per_token = -(log_probs(target, 1.0).exp() * floored(log_probs(student_logits, 1.0))).sum(-1)
    return per_token.sum() / max(per_token.numel(), 1)


def teacher_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) per token in nats, (..., V) -> (...), without gradient."""
    with torch.no_grad():
        return entropy(log_probs(logits, 1.0))


def soft_weight(teacher_entropy: Tensor, gate: SoftGate, *, vocab: int) -> Tensor:
    """Share of KL(teacher || student) in the soft gate's mix, clamp(H_T / h_max, 0, 1); the shape is kept."""
    h_max = math.log(vocab) if gate.h_max is None else gate.h_max
    return (teacher_entropy / h_max).clamp(0, 1) if h_max > 0 else torch.zeros_like(teacher_entropy)


@torch.no_grad()
def ema_update(teacher_params: Iterable[Tensor], student_params: Iterable[Tensor], *, rate: float) -> None:
    """In place teacher <- (1 - rate) teacher + rate student. SDPO's default rate is 0.05 per optimiser step.

    Keep an EMA teacher in float32: in bf16 a step under 1/256 of a weight rounds to nothing.

    Raises:
        ValueError: rate is not in [0, 1], or the parameters are not the same in number and shape.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    teachers, students = list(teacher_params), list(student_params)
    if len(teachers) != len(students):
        raise ValueError(f"teacher_params holds {len(teachers)} tensors, student_params {len(students)}")
    for index, (teacher, student) in enumerate(zip(teachers, students, strict=True)):
        _check_same_shape(f"teacher_params[{index}]", teacher, f"student_params[{index}]", student)
        teacher.lerp_(student.to(teacher.device, teacher.dtype), rate)


def _mix(start: Tensor, end: Tensor, share: float) -> Tensor:
    # the ends by themselves: 0 x -inf is NaN, and lerp does not return its ends exactly
    if share == 0:
        return wide(start)
    return wide(end) if share == 1 else (1 - share) * wide(start) + share * wide(end)


def _check_same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.shape != other.shape:
        raise ValueError(f"{name} {tuple(value.shape)} must have the shape of {other_name}, {tuple(other.shape)}")
