"""A chunk of logits made ready for a divergence: log-probs in place of logits, and what the formulas need beside them.

`tiles.py` has the formulas. In here everything is done in the chunk's own buffers, as further ones of this size cost
more than the arithmetic. Letters: n tokens of the chunk, V vocabulary; q student, p target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer_core.divergences import Divergence, PaperGate
from composer_core.loss.distributions import LOGP_FLOOR, floored, tell_infinite
from composer_core.loss.head import Buffers
from composer_core.loss.topk import Entries, entries_of, is_full

_CACHE_BYTES = 2**21
"""Size of one buffer's rows that are worked on together, of up to four. Smaller ones stay in the cache more surely, but
wake the threads so often that a machine with other work to do spends its time there."""


@dataclass(frozen=True)
class Asked:
    """What is wanted of the rows of a chunk."""

    spec: Divergence
    """`taid` is not 0, where there would be nothing to compute."""
    sampled_ids: Tensor | None
    """(n,), for the sampled support and the gap."""
    gap: bool
    """Whether log q - log p of the sampled tokens is wanted too."""
    grad: bool
    finite: bool
    """A promise that no logit is -inf, which saves looking."""

    def rows(self, rows: slice) -> Asked:
        """The same of some of the rows."""
        return self if self.sampled_ids is None else replace(self, sampled_ids=self.sampled_ids[rows])


@dataclass(frozen=True)
class Part:
    """Some rows of a chunk."""

    log_q: Tensor
    """(n, V), the student's buffer, which ends as the gradient."""
    log_p: Tensor
    """(n, V), the teacher's buffer; free to use up."""
    excluded: Tensor | None
    """(n, V) bool: entries the student gives no mass at all; None where there are none, as nearly always."""
    spec: Divergence
    h_teacher: Tensor
    """(n,), 0 without a gate."""
    chosen: Entries | None
    """The support; None when it is full."""
    likeliest: Tensor | None
    """(n, k) ids of the paper's gate."""
    gap: Tensor | None
    """(n,) log q - log p of the sampled tokens, p the teacher itself; None where nobody asked."""
    buffers: Buffers
    grad: bool

    def spare(self, name: str) -> Tensor:
        """An (n, V) buffer."""
        return self.buffers.get(name, len(self.log_q))


def prepare(student: Tensor, teacher: Tensor, asked: Asked, buffers: Buffers) -> Part:
    """The part of (n, V) logits, already divided by the temperature, which become its log-probs."""
    spec, finite = asked.spec, asked.finite
    h_teacher = student.new_zeros(len(student))
    taught: Tensor | None = None
    mixed = spec.taid is not None and spec.taid < 1
    if spec.taid is not None and mixed:
        if spec.gate is not None:
            alone = _log_softmax(buffers.get("s", len(teacher)).copy_(teacher))
            h_teacher = _entropy(alone, buffers, finite=finite)
        if asked.gap:
            taught = _at(teacher, asked.sampled_ids) - teacher.logsumexp(-1)
        # logits, not log-probs: those have lost what is small beside the largest
        teacher.mul_(spec.taid).add_(student, alpha=1 - spec.taid)
    log_q, log_p = _log_softmax(student), _log_softmax(teacher)
    if spec.gate is not None and not mixed:
        h_teacher = _entropy(log_p, buffers, finite=finite)
    gap = None
    if asked.gap:
        taught = _at(log_p, asked.sampled_ids) if taught is None else taught
        gap = floored(_at(log_q, asked.sampled_ids)) - floored(taught)
    # ranked before the floor, which lifts what is excluded above what is merely unlikely
    full = is_full(spec, log_q.shape[1])
    chosen = None if full else entries_of(log_q, log_p, spec, sampled_ids=asked.sampled_ids)
    likeliest = None
    if isinstance(spec.gate, PaperGate):
        likeliest = log_p.topk(min(spec.gate.k, log_p.shape[1]), dim=-1).indices
    excluded = None if finite else _floor_both(log_q, log_p, spec)
    return Part(log_q, log_p, excluded, spec, h_teacher, chosen, likeliest, gap, buffers, asked.grad)


def rows_at_once(logits: Tensor) -> int:
    """Rows whose buffers stay in a core's cache through all sweeps; a GPU wants the whole chunk in each kernel."""
    if logits.is_cuda or not logits.numel():
        return max(len(logits), 1)
    return max(_CACHE_BYTES // (logits.shape[1] * logits.element_size()), 1)


def _at(values: Tensor, ids: Tensor | None) -> Tensor:
    assert ids is not None  # whoever asks for the gap gives them
    return values.gather(-1, ids[:, None]).squeeze(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, out=logits)


def _floor_both(log_q: Tensor, log_p: Tensor, spec: Divergence) -> Tensor | None:
    """`_floor` of both; where the student's was needed."""
    excluded_p, excluded_q = _floor(log_p), _floor(log_q)
    if excluded_p is not None or excluded_q is not None:
        tell_infinite(log_q, log_p, spec)
    return excluded_q


def _floor(log_p: Tensor) -> Tensor | None:
    """Put `LOGP_FLOOR` in the place of -inf; returns where, or None: one read instead of a mask for nothing."""
    if log_p.amin() > -torch.inf:
        return None
    excluded = log_p == -torch.inf
    log_p.masked_fill_(excluded, LOGP_FLOOR)
    return excluded


def _entropy(log_p: Tensor, buffers: Buffers, *, finite: bool) -> Tensor:
    """(n,) in nats; `log_p` stays as it is."""
    terms = torch.exp(log_p, out=buffers.get("p", len(log_p))).mul_(log_p)
    if not finite:
        terms.masked_fill_(log_p == -torch.inf, 0)  # 0 x -inf
    return -terms.sum(-1)
