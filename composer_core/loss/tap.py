"""Divergences from logits that a trainer holds for its own loss, with next to no memory above what that loss needs.

`fused.py` never makes the logits, `from_logits.py` makes a gradient of their size: here ours goes into the very buffer
that the trainer's loss leaves its gradient in. The formulas are in `tiles.py`; whose tokens are compared with whose is
the caller's business. Letters: N rows of logits, K of them with a hint, n rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_core.divergences import Divergence
from composer_core.loss.checks import check_ids, check_single_backward
from composer_core.loss.head import Buffers, accumulation_dtype, chunk_size
from composer_core.loss.part import Asked
from composer_core.loss.tiles import Slopes, clipped, tile_divergence
from composer_core.loss.topk import is_full

_Add = Callable[[Tensor], None]
"""Adds a gradient into that by all logits, (N, V)."""


class Tap:
    """Stands between a model's logits and everything that reads them.

    Its backward runs after those of all readers, and adds to their gradient what the divergences leave there.
    """

    def __init__(self, logits: Tensor) -> None:
        """`logits` are (..., V), with gradient or without; row r below is row r of `logits.reshape(-1, V)`.

        Raises:
            ValueError: there are no rows of a vocabulary, or no floating-point numbers in them.
        """
        if logits.dim() < 2 or not logits.is_floating_point():
            raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} must be (..., V) and floating-point")
        self._left: list[_Add] = []
        self.logits: Tensor
        """The same numbers in the same memory, (..., V): hand these to the trainer, which must not change them in place
        (autograd refuses)."""
        self._mark: Tensor
        self.logits, self._mark = _Identity.apply(logits, self._left)  # type: ignore[no-untyped-call]

    def divergence(
        self, at: Tensor, teacher_logits: Tensor, spec: Divergence, *, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values as `divergence.divergence` gives them for the rows `at`, (K,), in at least float32, and beside them
        what they say about the tokens themselves, and a probe.

        With the full support the gradient is formed at once and kept where the teacher's logits were: the backward
        never looks at the logits, so that a trainer's cross-entropy may have overwritten them by then. With another
        support a few numbers per token are kept, the teacher's logits can be freed, and the backward reads the
        student's again, which stay alive until then: switch off a cross-entropy that works in place. Backpropagate
        once.

        Args:
            at: (K,) int64, each below N; a row may stand there twice.
            teacher_logits: (K, V), not yet divided by the temperature. They are overwritten.
            spec: kind, support, target, gate and clip.
            ids: (K,) int64, the tokens that these rows predict.

        Returns:
            The values, (K,); log q - log p of `ids` at the temperature, (K,), p the teacher itself also under TAID, and
            without gradient; and the probe, (K,), zeros whose gradient has the norm of what the values send into the
            rows, for `watch.Anchored`.

        Raises:
            ValueError: shapes do not fit, or ids are none of the vocabulary.
            RuntimeError: in the backward, when it is the second, or the logits it needs were overwritten.
        """
        vocab, tokens = self.logits.shape[-1], len(at)
        check_ids("at", at, tokens=tokens, vocab=self.logits.shape[:-1].numel())
        check_ids("ids", ids, tokens=tokens, vocab=vocab)
        if teacher_logits.shape != (tokens, vocab):
            raise ValueError(f"teacher_logits {tuple(teacher_logits.shape)} must be ({tokens}, {vocab}), as at and V")
        probe = self._mark.expand(tokens)
        wanted = torch.is_grad_enabled() and probe.requires_grad
        problem = _Problem(at, teacher_logits.detach(), ids, spec, grad=wanted)
        values, gap = _Divergence.apply(self.logits, probe, problem, self._left)  # type: ignore[no-untyped-call]
        return values, gap, probe


class _Identity(torch.autograd.Function):
    """The logits, and a number that joins probes to the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, left: list[_Add]) -> tuple[Tensor, Tensor]:
        ctx.left, ctx.like = left, (logits.shape, logits.dtype, logits.device)
        ctx.set_materialize_grads(False)
        return logits.view_as(logits), logits.new_zeros((), dtype=accumulation_dtype(logits))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        left = list(ctx.left)
        ctx.left.clear()
        if not left or grad is None:
            return grad, None
        shape, dtype, device = ctx.like
        if grad.is_sparse:  # only divergences: nobody else sent any
            grad = torch.zeros(shape, dtype=dtype, device=device)
        rows = grad.reshape(-1, shape[-1])  # a view wherever it can be one
        for add in left:
            add(rows)
        return rows.view(shape), None


class _Divergence(torch.autograd.Function):
    """Values and gap; in the backward the gradient is left for the tap."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probe: Tensor, problem: _Problem, left: list[_Add]) -> tuple[Tensor, Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            found = problem.solve(logits)
        ctx.left, ctx.found, ctx.like = left, found, (logits.shape, logits.dtype, logits.device)
        if isinstance(found.gradient, _Short):
            ctx.save_for_backward(logits)  # so that a change in place is noticed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.gap)
        return found.values, found.gap

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        check_single_backward()
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError("a tapped divergence can be backpropagated once: its gradient is used up")
        if grad_values is None:
            return None, None, None, None
        scale = torch.where(found.row != 0, grad_values * found.row, 0)
        if found.gradient is not None:
            ctx.left.append(partial(found.gradient.add, scale, *ctx.saved_tensors))
        shape, dtype, device = ctx.like
        # Autograd adds this nothing to what other readers sent: in place where nobody else holds that tensor, into a
        # new one where somebody does. So the sum is the tap's alone, and it may write there.
        nothing = torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
        return nothing, scale * found.norm, None, None


@dataclass(frozen=True)
class _Problem:
    """What is asked of a tap."""

    at: Tensor
    teacher: Tensor
    ids: Tensor
    spec: Divergence
    grad: bool

    def solve(self, logits: Tensor) -> _Found:
        """All rows, a chunk at a time."""
        if self.spec.taid == 0:
            # the target is the student: there is nothing to learn, but the gap is the teacher's all the same
            found = replace(self, spec=replace(self.spec, taid=None), grad=False).solve(logits)
            return replace(found, values=torch.zeros_like(found.values))
        dtype = accumulation_dtype(logits, self.teacher)
        values, gap, row, norm = (torch.zeros(len(self.at), dtype=dtype, device=logits.device) for _ in range(4))
        buffers, slopes, kept = Buffers(logits.shape[-1], dtype, logits.device), [], self._room(logits)
        for rows in _chunks(*self.teacher.shape):
            student = self._student(logits, rows, buffers)
            asked = Asked(self.spec, self.ids[rows], gap=True, grad=self.grad, finite=False)
            tile = tile_divergence(student, self._taught(rows, buffers), asked, buffers)
            values[rows], row[rows] = clipped(tile, torch.ones_like(tile.value), self.spec)
            if tile.gap is not None:
                gap[rows] = tile.gap
            if kept is not None:
                kept[rows] = student
            if tile.slopes is not None:
                slopes.append(tile.slopes)
            if self.grad:
                norm[rows] = torch.linalg.vector_norm(student, dim=-1)
        gradient = self._short(logits, slopes, dtype) if kept is None else _Formed(self.at, kept)
        return _Found(values, gap, row / self.spec.temperature, norm, gradient)

    def _short(self, logits: Tensor, slopes: Sequence[Slopes], dtype: torch.dtype) -> _Short | None:
        if (joined := Slopes.joined(slopes)) is None:
            return None
        seen = logits[(*_place(self.at, logits), self.ids)]
        return _Short(self.at, joined, self.ids, seen, self.spec.temperature, dtype)

    def _room(self, logits: Tensor) -> Tensor | None:
        """(K, V), where each chunk's gradient is kept: the teacher's logits, of which the chunk was the last reader."""
        if not self.grad or not is_full(self.spec, logits.shape[-1]):
            return None
        same = self.teacher.dtype == logits.dtype
        return self.teacher if same else torch.empty_like(self.teacher, dtype=logits.dtype)

    def _student(self, logits: Tensor, rows: slice, buffers: Buffers) -> Tensor:
        at = self.at[rows]
        return self._tempered(buffers.get("student", len(at)).copy_(logits[_place(at, logits)]))

    def _taught(self, rows: slice, buffers: Buffers) -> Tensor:
        logits = self.teacher[rows]
        if logits.dtype != buffers.dtype:
            logits = buffers.get("teacher", len(logits)).copy_(logits)
        return self._tempered(logits)

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits if self.spec.temperature == 1 else logits.div_(self.spec.temperature)


@dataclass(frozen=True)
class _Found:
    values: Tensor
    """(K,)"""
    gap: Tensor
    """(K,)"""
    row: Tensor
    """(K,): times the gradient by a value, what multiplies the gradient's row; 0 where clipped."""
    norm: Tensor
    """(K,), of those rows."""
    gradient: _Formed | _Short | None


@dataclass(frozen=True)
class _Formed:
    """A gradient by rows of logits."""

    at: Tensor
    """(K,)"""
    rows: Tensor
    """(K, V), used up."""

    def add(self, scale: Tensor, total: Tensor) -> None:
        """`scale`, (K,), times these, into (N, V)."""
        total.index_add_(0, self.at, self.rows.mul_(scale[:, None]))


@dataclass(frozen=True)
class _Short:
    """One over a chosen support, which with the student's probabilities makes the same."""

    at: Tensor
    """(K,)"""
    slopes: Slopes
    ids: Tensor
    """(K,)"""
    seen: Tensor
    """(K,), the logits of those ids at the time."""
    temperature: float
    dtype: torch.dtype

    def add(self, scale: Tensor, logits: Tensor, total: Tensor) -> None:
        """Likewise, from the logits once more, (..., V).

        Raises:
            RuntimeError: they are not those of the forward.
        """
        if not torch.equal(logits[(*_place(self.at, logits), self.ids)], self.seen):
            raise RuntimeError(
                "logits were overwritten before a divergence over a chosen support had read them again: the trainer's "
                "cross-entropy works in place; switch that off, or use the full support"
            )
        ids, slope, pull = self.slopes.ids, self.slopes.slope * scale[:, None], self.slopes.pull * -scale
        for rows in _chunks(len(self.at), logits.shape[-1]):
            q = logits[_place(self.at[rows], logits)].to(self.dtype)
            q = torch.softmax(q.div_(self.temperature), -1, out=q).mul_(pull[rows, None])
            total.index_add_(0, self.at[rows], q.scatter_add_(1, ids[rows], slope[rows]).to(total.dtype))


def _place(at: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Index into (..., V) of rows given by their flat number: logits that are not contiguous are not to be copied."""
    return tuple(torch.unravel_index(at, logits.shape[:-1]))


def _chunks(tokens: int, vocab: int) -> Iterator[slice]:
    step = chunk_size(vocab)
    return (slice(start, start + step) for start in range(0, tokens, step))
