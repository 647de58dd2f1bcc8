"""Which divergence between teacher and student a channel wants: the spec of it, free of torch.

`loss/divergence.py` has the formulas; a view computes them (`protocols.PolicyView.divergence`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class DivergenceKind(StrEnum):
    """Named by the formula, because "forward" and "reverse" mean opposite things in different papers."""

    KL_TEACHER_STUDENT = "kl_teacher_student"
    """KL(teacher || student): covers all the teacher's modes ("forward KL", GKD's beta 0)."""
    KL_STUDENT_TEACHER = "kl_student_teacher"
    """KL(student || teacher): seeks one mode ("reverse KL", GKD's beta 1)."""
    JSD = "jsd"
    """Generalised Jensen-Shannon; `beta` weights the teacher in the mixture."""


class Support(StrEnum):
    """Over which vocabulary entries a divergence is summed."""

    FULL = "full"
    TOPK_TEACHER = "topk_teacher"
    """The k entries the teacher finds likeliest."""
    TOPK_STUDENT = "topk_student"
    """The k entries the student finds likeliest."""
    TOPK_UNION = "topk_union"
    """Both of them, each entry once."""
    SAMPLED = "sampled"
    """The sampled token alone: an estimate of KL(student || teacher), with the gradient of one sample."""

    @property
    def is_topk(self) -> bool:
        """Whether it needs `Divergence.k`."""
        return self in (Support.TOPK_TEACHER, Support.TOPK_STUDENT, Support.TOPK_UNION)


@dataclass(frozen=True)
class SoftGate:
    """w KL(teacher || student) + (1 - w) KL(student || teacher) per token, w = clamp(H_T / h_max, 0, 1).

    Where the teacher is unsure (entropy H_T), the student is to cover its modes; where it is sure, to seek the mode.
    """

    h_max: float | None = None
    """Entropy in nats at which w reaches 1; None is log V, the largest there is."""

    def __post_init__(self) -> None:
        if self.h_max is not None and not self.h_max > 0:
            raise ValueError(f"h_max must be > 0 nats, got {self.h_max}")


@dataclass(frozen=True)
class PaperGate:
    """KL(student || teacher) + alpha [H_T > tau] KL of the teacher's k likeliest entries, arXiv 2603.07079.

    Those k terms p (log p - log q) are neither renormalised nor completed by a tail, as published: their gradient is
    not 0 where student and teacher agree.
    """

    tau: float = 0.8
    """Teacher entropy in nats above which the second term acts."""
    alpha: float = 1.0
    k: int = 16

    def __post_init__(self) -> None:
        if not (self.tau >= 0 and self.alpha >= 0):  # NaN too: the gate would never open
            raise ValueError(f"tau and alpha must be >= 0, got tau {self.tau}, alpha {self.alpha}")
        if self.k < 1:
            raise ValueError(f"k must be >= 1, got {self.k}")


@dataclass(frozen=True)
class Divergence:
    """Which divergence between teacher and student a channel wants per hint token."""

    kind: DivergenceKind = DivergenceKind.JSD
    beta: float = 0.5
    """Teacher's share of the mixture, 0 < beta < 1; only for `jsd`."""
    temperature: float = 1.0
    """Both logits are divided by it; there is no temperature-squared factor."""
    support: Support = Support.FULL
    k: int | None = None
    """Entries of a top-k support; from the vocabulary's size on it is the full form."""
    tail: bool = True
    """Top-k: True puts the mass of all other entries into one more entry, False renormalises over the support."""
    clip: float | None = None
    """Largest value per token, taken AFTER the vocabulary sum; a clipped token has no gradient."""
    taid: float | None = None
    """t of TAID: the target is softmax((1 - t) student + t teacher) instead of the teacher; 1 changes nothing, 0 makes
    value and gradient 0."""
    gate: SoftGate | PaperGate | None = None
    """Weighs by the teacher's entropy, which is that of the teacher itself also under TAID."""

    def __post_init__(self) -> None:
        if self.kind is DivergenceKind.JSD and not 0 < self.beta < 1:
            raise ValueError(
                f"jsd needs 0 < beta < 1, got {self.beta}: at the ends it is a plain KL, use "
                f"{DivergenceKind.KL_TEACHER_STUDENT} (0) or {DivergenceKind.KL_STUDENT_TEACHER} (1)"
            )
        if not 0 < self.temperature < math.inf:  # an infinite one makes all distributions equal
            raise ValueError(f"temperature must be > 0 and finite, got {self.temperature}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be > 0, got {self.clip}")
        if self.taid is not None and not 0 <= self.taid <= 1:
            raise ValueError(f"taid must be in [0, 1], got {self.taid}")
        self._check_support()
        self._check_gate()

    def _check_support(self) -> None:
        if self.support.is_topk != (self.k is not None):
            raise ValueError(f"k is for the top-k supports and they need it: support {self.support}, k {self.k}")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k must be >= 1, got {self.k}")
        if not self.tail and not self.support.is_topk:
            raise ValueError(f"tail is for the top-k supports, got tail False with support {self.support}")
        if self.support is not Support.SAMPLED:
            return
        if self.kind is not DivergenceKind.KL_STUDENT_TEACHER:
            raise ValueError(
                f"the sampled support estimates {DivergenceKind.KL_STUDENT_TEACHER} only, as the tokens are the "
                f"student's; got {self.kind}"
            )
        if self.clip is not None:
            raise ValueError("clip bounds a divergence; with support sampled the value is an estimate of either sign")

    def _check_gate(self) -> None:
        if self.gate is None:
            return
        if self.kind is not DivergenceKind.KL_STUDENT_TEACHER:
            raise ValueError(
                f"a gate adds KL(teacher || student) to {DivergenceKind.KL_STUDENT_TEACHER} and needs that kind, "
                f"got {self.kind}"
            )
        if isinstance(self.gate, SoftGate) and self.support is Support.SAMPLED:
            raise ValueError("the soft gate needs KL(teacher || student), which the student's samples do not give")
