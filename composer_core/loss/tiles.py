"""Divergence and gradient of one chunk of logits, in place, with as few sweeps over (n, V) as the formula allows.

The same numbers as `divergence.py`, which is the definition: here every gradient is written out, because autograd
would keep a tensor of this size for each step. Full sums are worked by hand; what needs a few entries per token only
(top-k, the sampled token, the paper's gate) goes through autograd on those. `part.py` makes logits ready. To add a
kind, write its function and name it in `_full`. Letters: n tokens of the chunk, V vocabulary; q student, p target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate
from composer_core.loss.divergence import on_entries
from composer_core.loss.head import Buffers
from composer_core.loss.part import Asked, Part, prepare, rows_at_once
from composer_core.loss.targets import soft_weight
from composer_core.loss.topk import is_full, restricted, truncated_kl


@dataclass(frozen=True)
class Tile:
    """What a chunk of logits gave."""

    value: Tensor
    """(n,)"""
    scale: float
    """The student's buffer now holds, (n, V), the gradient by logits / temperature without this factor."""
    gap: Tensor | None = None
    """(n,) log q - log p of the sampled tokens, where asked for."""
    slopes: Slopes | None = None
    """The gradient in short, where it was asked for and the support is not full."""


@dataclass(frozen=True)
class Slopes:
    """A gradient by logits / temperature over a chosen support: slope at ids, minus pull x q everywhere."""

    ids: Tensor
    """(n, k); an id may stand there twice."""
    slope: Tensor
    """(n, k)"""
    pull: Tensor
    """(n,)"""

    @classmethod
    def joined(cls, parts: Sequence[Slopes]) -> Slopes | None:
        """Those of all rows; None of none."""
        if not parts:
            return None
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "slope", "pull")))


def tile_divergence(student: Tensor, teacher: Tensor, asked: Asked, buffers: Buffers) -> Tile:
    """Divergence per token, before the clip, of (n, V) logits already divided by the temperature.

    Both are used up; with `asked.grad` the student's then holds the gradient.
    """
    values = torch.empty_like(student[:, 0])
    gap = torch.empty_like(values) if asked.gap else None
    slopes = []
    step = rows_at_once(student)
    for start in range(0, len(student), step):
        rows = slice(start, start + step)
        part = prepare(student[rows], teacher[rows], asked.rows(rows), buffers)
        values[rows], short = _divergence(part)
        if gap is not None and part.gap is not None:
            gap[rows] = part.gap
        if short is not None:
            slopes.append(short)
    scale = asked.spec.beta - 1 if _is_full_jsd(asked.spec, student.shape[1]) else 1.0
    return Tile(values, scale=scale, gap=gap, slopes=Slopes.joined(slopes))


def clipped(tile: Tile, weight: Tensor, spec: Divergence) -> tuple[Tensor, Tensor]:
    """Values under the clip, and what multiplies the rows of the tile's gradient for these weights, each (n,)."""
    row = weight * tile.scale
    if spec.clip is None:
        return tile.value, row
    return tile.value.clamp(max=spec.clip), torch.where(tile.value > spec.clip, 0, row)


def _divergence(part: Part) -> tuple[Tensor, Slopes | None]:
    """(n,); with a gradient it is left in `part.log_q`, and told in short where the support is not full."""
    few = list(_few_entries(part))
    pull = part.h_teacher.new_zeros(len(part.log_q))
    for some in few:
        if some.slope is not None:
            pull += some.slope.sum(-1)
    if part.chosen is None:
        value = _full(part.spec)(part, pull)
    else:
        value = torch.zeros_like(pull)
        if part.grad:
            part.log_q.exp_().mul_(-pull[:, None])
    for some in few:
        value = value + some.value
        if some.slope is not None:
            part.log_q.scatter_add_(1, some.ids, some.slope)
    if part.grad and part.excluded is not None:
        part.log_q.masked_fill_(part.excluded, 0)
    known = [some.slope for some in few if some.slope is not None]
    if part.chosen is None or not known:
        return value, None
    return value, Slopes(torch.cat([some.ids for some in few], -1), torch.cat(known, -1), pull)


# -- full sums ---------------------------------------------------------------------------------------------------------
# With g = dL/d log q, the gradient by the logits is g - q sum(g). Entries without mass have g = 0.


def _full(spec: Divergence) -> Callable[[Part, Tensor], Tensor]:
    """The form that gives the value, (n,), and turns log q into the gradient, less q x `pull`, (n,)."""
    if isinstance(spec.gate, SoftGate):
        return _soft_mix
    if spec.kind is DivergenceKind.KL_TEACHER_STUDENT:
        return _kl_teacher_student
    return _kl_student_teacher if spec.kind is DivergenceKind.KL_STUDENT_TEACHER else _jsd


def _is_full_jsd(spec: Divergence, vocab: int) -> bool:
    return spec.kind is DivergenceKind.JSD and is_full(spec, vocab)


def _kl_teacher_student(part: Part, _: Tensor) -> Tensor:
    """Sum p (log p - log q); gradient q - p."""
    p = torch.exp(part.log_p, out=part.spare("p"))
    value = part.log_p.sub_(part.log_q).mul_(p).sum(-1)
    if part.grad:
        _toward(part.log_q.exp_(), p, part.excluded)
    return value


def _kl_student_teacher(part: Part, pull: Tensor) -> Tensor:
    """Sum q (log q - log p); gradient q (log q - log p - value)."""
    terms = torch.sub(part.log_q, part.log_p, out=part.log_p)
    q = part.log_q.exp_()
    value = terms.mul_(q).sum(-1)
    if part.grad:
        torch.addcmul(terms, q, (value + pull)[:, None], value=-1, out=q)
    return value


def _jsd(part: Part, _: Tensor) -> Tensor:
    """With s = log m - log q - log beta = log(p / q + (1 - beta) / beta), taken in log space:

    log p - log m = log p - log q - s - log beta and log q - log m = -s - log beta, so the value is
    beta p.(log p - log q - s) - (1 - beta) q.s - log beta and the gradient -(1 - beta) q (s - q.s), here without its
    constant factor.
    """
    beta = part.spec.beta
    p = torch.exp(part.log_p, out=part.spare("p"))
    gap = part.log_p.sub_(part.log_q)
    odds = torch.full((), math.log1p(-beta) - math.log(beta), dtype=gap.dtype, device=gap.device)
    s = torch.logaddexp(gap, odds, out=part.spare("s"))
    toward_p = gap.sub_(s).mul_(p).sum(-1)
    q = part.log_q.exp_()
    terms = s.mul_(q)
    mean_s = terms.sum(-1)
    if part.grad:
        torch.addcmul(terms, q, mean_s[:, None], value=-1, out=q)
    return beta * toward_p - (1 - beta) * mean_s - math.log(beta)


def _soft_mix(part: Part, _: Tensor) -> Tensor:
    """The soft gate: w KL(p || q) + (1 - w) KL(q || p), and the two gradients above."""
    assert isinstance(part.spec.gate, SoftGate)  # chosen for it
    share = soft_weight(part.h_teacher, part.spec.gate, vocab=part.log_q.shape[1])
    p = torch.exp(part.log_p, out=part.spare("p"))
    gap = torch.sub(part.log_q, part.log_p, out=part.log_p)
    forward = -torch.mul(p, gap, out=part.spare("s")).sum(-1)
    q = part.log_q.exp_()
    terms = gap.mul_(q)
    reverse = terms.sum(-1)
    if part.grad:
        slope = terms.addcmul_(q, reverse[:, None], value=-1).mul_((1 - share)[:, None])
        torch.addcmul(slope, _toward(q, p, part.excluded), share[:, None], out=q)
    return share * forward + (1 - share) * reverse


def _toward(q: Tensor, p: Tensor, excluded: Tensor | None) -> Tensor:
    """Puts q - p in the place of q; an excluded entry's share of p pulls nothing."""
    if excluded is not None:
        q.mul_(p.masked_fill_(excluded, 0).sum(-1, keepdim=True))
    return q.sub_(p)


# -- sums over a few entries -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Few:
    value: Tensor
    """(n,)"""
    ids: Tensor
    """(n, k)"""
    slope: Tensor | None
    """(n, k): d value / d log q at the ids; None without gradient."""


def _few_entries(part: Part) -> Iterator[_Few]:
    spec, gate, chosen = part.spec, part.spec.gate, part.chosen
    if chosen is not None:
        valid = chosen.valid

        def base(at_q: Tensor, at_p: Tensor) -> Tensor:
            at_q, at_p = restricted(at_q, valid, spec), restricted(at_p, valid, spec)
            return on_entries(at_q, at_p, spec, h_teacher=part.h_teacher, vocab=part.log_q.shape[1])

        yield _differentiate(base, part, chosen.ids)
    if isinstance(gate, PaperGate) and part.likeliest is not None:
        weight = gate.alpha * (part.h_teacher > gate.tau).to(part.log_q.dtype)
        yield _differentiate(lambda at_q, at_p: weight * truncated_kl(at_q, at_p), part, part.likeliest)


def _differentiate(form: Callable[[Tensor, Tensor], Tensor], part: Part, ids: Tensor) -> _Few:
    at_q, at_p = part.log_q.gather(-1, ids), part.log_p.gather(-1, ids)
    if not part.grad:
        return _Few(form(at_q, at_p), ids, None)
    with torch.enable_grad():
        at_q.requires_grad_()
        value = form(at_q, at_p)
        (slope,) = torch.autograd.grad(value.sum(), at_q)
    if part.excluded is not None:
        slope = slope.masked_fill(part.excluded.gather(-1, ids), 0)
    return _Few(value.detach(), ids, slope)
