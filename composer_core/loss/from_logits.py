"""Divergences from logits that a trainer hands out, a chunk of tokens at a time.

The twin of `fused.py` for back ends whose hook sees logits but no hidden states. The formulas are in `tiles.py`.
Letters: K hint tokens, n tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_core.divergences import Divergence
from composer_core.loss.checks import check_chunk, check_logits, check_sampled_ids, check_single_backward, check_weight
from composer_core.loss.head import Buffers, accumulation_dtype, chunk_size, split
from composer_core.loss.part import Asked
from composer_core.loss.tiles import Tile, clipped, tile_divergence


def divergence_from_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    spec: Divergence,
    *,
    weight: Tensor | None = None,
    sampled_ids: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum over tokens of `divergence.divergence`, a scalar, and its values per token, (K,).

    Beside the two logits nothing of their size is kept for the backward, which works a chunk of tokens at a time and
    makes the gradient alone. It reaches the student; both outputs can be differentiated. A token of weight 0 is left
    out: its value and gradient are 0, whatever its logits hold.

    Args:
        student_logits: (K, V).
        teacher_logits: (K, V).
        spec: kind, support, target, gate and clip.
        weight: (K,), taken as constants; None is 1 for all.
        sampled_ids: (K,) int64, for the sampled support.
        chunk: tokens at a time, as in `fused_linear_divergence`.

    Raises:
        ValueError: shapes do not fit.
    """
    check_logits(student_logits, teacher_logits)
    tokens, vocab = student_logits.shape
    check_sampled_ids(sampled_ids, spec, tokens=tokens, vocab=vocab)
    check_chunk(chunk)
    dtype = accumulation_dtype(student_logits, teacher_logits)
    if weight is None:
        weight = torch.ones(tokens, dtype=dtype, device=student_logits.device)
    check_weight(weight, tokens=tokens)
    weight = weight.detach().to(dtype)
    sides = _Sides(student_logits.detach(), teacher_logits.detach(), sampled_ids, spec, chunk or chunk_size(vocab))
    values: Tensor = _FromLogits.apply(student_logits, weight, sides)  # type: ignore[no-untyped-call]
    # selected, not only multiplied: where the weight is 0 the backward must see 0, even from an infinite gradient
    return torch.where(weight != 0, values * weight, 0).sum(), values


@dataclass(frozen=True)
class _Sides:
    student: Tensor
    teacher: Tensor
    sampled_ids: Tensor | None
    spec: Divergence
    chunk: int

    def tiles(self, weight: Tensor, *, grad: bool) -> Iterator[tuple[Tensor, Tile, Tensor]]:
        """Token indices, (n,), tile and gradient, (n, V), of each chunk of tokens whose weight is not 0."""
        if self.spec.taid == 0:
            return
        buffers = Buffers(self.student.shape[1], weight.dtype, self.student.device)
        for at in split(weight.nonzero().flatten(), self.chunk):
            student, teacher = self._logits("student", at, buffers), self._logits("teacher", at, buffers)
            ids = None if self.sampled_ids is None else self.sampled_ids[at]
            asked = Asked(self.spec, ids, gap=False, grad=grad, finite=False)
            yield at, tile_divergence(student, teacher, asked, buffers), student

    def _logits(self, side: str, at: Tensor, buffers: Buffers) -> Tensor:
        logits = self.student if side == "student" else self.teacher
        copy = buffers.get(side, len(at)).copy_(logits[at])
        return copy if self.spec.temperature == 1 else copy.div_(self.spec.temperature)


class _FromLogits(torch.autograd.Function):
    """Values per token; the backward computes the tiles again, so that nothing but the inputs is kept."""

    @staticmethod
    def forward(ctx: Any, student_logits: Tensor, weight: Tensor, sides: _Sides) -> Tensor:
        ctx.save_for_backward(student_logits, sides.teacher)  # so that a change in place is noticed
        ctx.sides, ctx.weight = sides, weight
        values = torch.zeros_like(weight)
        for at, tile, _ in sides.tiles(weight, grad=False):
            values[at], _ = clipped(tile, weight[at], sides.spec)
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        check_single_backward()
        student_logits, _ = ctx.saved_tensors
        sides: _Sides = ctx.sides
        grad = torch.zeros_like(student_logits)
        wanted = torch.where(ctx.weight != 0, grad_values, 0)
        for at, tile, slope in sides.tiles(wanted, grad=True):
            _, row = clipped(tile, wanted[at] / sides.spec.temperature, sides.spec)
            grad[at] = slope.mul_(row[:, None]).to(grad.dtype)
        return grad, None, None
