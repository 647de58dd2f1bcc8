"""Divergences from hidden states and output heads, a chunk of tokens at a time: no tensor of all tokens x vocabulary.

The gradients are formed in the forward, while a chunk's logits are there, which saves projecting again. The formulas
are in `tiles.py`, products with a head in `head.py`; `from_logits.py` is the twin where a trainer hands out logits,
`fused_logps.py` gives log-probs of sampled tokens.
Letters: K hint tokens, V vocabulary, H and H_t hidden widths of student and teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_core.divergences import Divergence
from composer_core.loss.checks import (
    check_chunk,
    check_projection,
    check_sampled_ids,
    check_single_backward,
    check_weight,
)
from composer_core.loss.head import Buffers, Head, HeadGrads, accumulation_dtype, chunk_size, split
from composer_core.loss.part import Asked
from composer_core.loss.tiles import clipped, tile_divergence


def fused_linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    spec: Divergence,
    *,
    weight: Tensor | None = None,
    sampled_ids: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    chunk: int | None = None,
    sampled_gap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum over tokens of `divergence.divergence`, a scalar, and its values per token, (K,).

    Logits are softcap x tanh(logit_scale (h W^T + b) / softcap), without a softcap logit_scale (h W^T + b). Gradients
    reach the student's hidden states, weight and bias, as far as they require one; the teacher's never. A token of
    weight 0 is never projected: its value is 0, whatever it holds. Half-precision inputs are accumulated in float32.

    Backpropagate the scalar, or the values multiplied by numbers proportional to `weight`: then the gradients formed
    in the forward serve. Any other gradient by the values is right too, at the price of projecting once more.

    Args:
        student_hidden: (K, H).
        student_weight: (V, H).
        teacher_hidden: (K, H_t).
        teacher_weight: (V, H_t); it may be the student's own.
        spec: kind, support, target, gate and clip.
        weight: (K,), taken as constants; None is 1 for all.
        sampled_ids: (K,) int64, for the sampled support or `sampled_gap`.
        student_bias: (V,).
        teacher_bias: (V,).
        logit_scale: multiplies the student's logits.
        softcap: bounds the student's logits.
        teacher_logit_scale: multiplies the teacher's; a self-teacher's must be given too.
        teacher_softcap: bounds the teacher's; likewise.
        chunk: tokens at a time, a quarter more where that saves a small last part; None lets two float32 (chunk, V)
            buffers have 128 MB, with 64 to 256 tokens.
        sampled_gap: (K,), overwritten with log q - log p of `sampled_ids` at this temperature, p the teacher itself
            also under TAID; 0 where the weight is. Both log-probs are there anyway, so it costs nothing.

    Raises:
        ValueError: shapes do not fit, or a number is out of range.
    """
    check_projection("student_", student_hidden, student_weight, student_bias, softcap=softcap)
    check_projection("teacher_", teacher_hidden, teacher_weight, teacher_bias, softcap=teacher_softcap)
    tokens, vocab = student_hidden.shape[0], student_weight.shape[0]
    if teacher_hidden.shape[0] != tokens or teacher_weight.shape[0] != vocab:
        raise ValueError(
            f"teacher_hidden {tuple(teacher_hidden.shape)} and teacher_weight {tuple(teacher_weight.shape)} must have "
            f"the student's {tokens} tokens and {vocab} vocabulary entries"
        )
    check_sampled_ids(sampled_ids, spec, tokens=tokens, vocab=vocab, gap=sampled_gap)
    check_chunk(chunk)
    problem = _Problem(
        teacher_hidden.detach(),
        Head(
            teacher_weight.detach(),
            None if teacher_bias is None else teacher_bias.detach(),
            teacher_logit_scale,
            teacher_softcap,
        ),
        spec,
        sampled_ids,
        chunk or chunk_size(vocab),
        accumulation_dtype(student_hidden, student_weight, teacher_hidden, teacher_weight),
        logit_scale,
        softcap,
        sampled_gap,
        grad=torch.is_grad_enabled(),
    )
    if weight is None:
        weight = torch.ones(tokens, dtype=problem.dtype, device=student_hidden.device)
    check_weight(weight, tokens=tokens)
    loss, values = _Fused.apply(  # type: ignore[no-untyped-call]
        student_hidden, student_weight, student_bias, weight.detach().to(problem.dtype), problem
    )
    return loss, values


@dataclass(frozen=True)
class _Problem:
    """What is no input of the autograd function: the teacher's side and the settings."""

    teacher_hidden: Tensor
    teacher: Head
    spec: Divergence
    sampled_ids: Tensor | None
    chunk: int
    dtype: torch.dtype
    logit_scale: float
    softcap: float | None
    sampled_gap: Tensor | None
    grad: bool


class _Fused(torch.autograd.Function):
    """Loss and values; in the backward the gradients that the forward formed, or a second pass for other weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, bias: Tensor | None, weight: Tensor, problem: _Problem
    ) -> tuple[Tensor, Tensor]:
        head = Head(head_weight, bias, problem.logit_scale, problem.softcap)
        ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        grads = None
        if problem.grad and any(ctx.needs):
            grads = HeadGrads.zeros(hidden, head, needs=ctx.needs, dtype=problem.dtype)
        values = _all_chunks(hidden, head, weight, problem, grads, gap=problem.sampled_gap)
        ctx.save_for_backward(hidden, head_weight, bias, weight)
        ctx.problem, ctx.grads = problem, grads
        ctx.set_materialize_grads(False)
        return (weight * values).sum(), values

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_values: Tensor | None) -> tuple[Tensor | None, ...]:
        check_single_backward()
        hidden, head_weight, bias, weight = ctx.saved_tensors
        head = Head(head_weight, bias, ctx.problem.logit_scale, ctx.problem.softcap)
        if grad_loss is None and grad_values is None:
            return None, None, None, None, None
        wanted, scale = _row_gradient(weight, grad_loss, grad_values)
        # handed out once: autograd may keep these very tensors as .grad
        grads, ctx.grads = ctx.grads, None
        if scale is None or grads is None:
            grads, scale = HeadGrads.zeros(hidden, head, needs=ctx.needs, dtype=ctx.problem.dtype), None
            _all_chunks(hidden, head, wanted, ctx.problem, grads)
        return *grads.finish(head, scale), None, None


def _row_gradient(weight: Tensor, loss: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What multiplies each token's gradient, (K,), and the scalar that makes it of `weight`, or None if none does."""
    if values is None:
        assert loss is not None
        return weight * loss, loss
    # a token of weight 0 has a constant value
    wanted = torch.where(weight != 0, values if loss is None else weight * loss + values, 0)
    if not weight.numel():
        return wanted, weight.new_ones(())
    most = weight.abs().argmax()
    scale = wanted[most] / weight[most]
    return wanted, scale if torch.allclose(wanted, weight * scale, rtol=1e-6, atol=0) else None


def _all_chunks(
    hidden: Tensor,
    head: Head,
    weight: Tensor,
    problem: _Problem,
    grads: HeadGrads | None,
    *,
    gap: Tensor | None = None,
) -> Tensor:
    """Values per token, (K,), 0 where the weight is; adds weight x gradient of each to `grads`, and fills `gap`."""
    spec, temperature = problem.spec, problem.spec.temperature
    values = torch.zeros(hidden.shape[0], dtype=problem.dtype, device=hidden.device)
    if gap is not None:
        gap.zero_()
    if spec.taid == 0:
        return values
    buffers = Buffers(head.vocab, problem.dtype, hidden.device)
    finite = head.bias is None and problem.teacher.bias is None  # a bias of -inf takes entries out of the vocabulary
    # full precision inside autocast too: the products' dtypes are chosen in `head.py`
    with torch.autocast(hidden.device.type, enabled=False):
        for at in split(weight.nonzero().flatten(), problem.chunk):
            student, teacher = buffers.get("student", len(at)), buffers.get("teacher", len(at))
            rows = hidden[at]
            head.project(rows, student, temperature=temperature)
            problem.teacher.project(problem.teacher_hidden[at], teacher, temperature=temperature)
            slope = None
            if grads is not None and head.softcap is not None:
                slope = buffers.get("slope", len(at)).copy_(student)
            ids = None if problem.sampled_ids is None else problem.sampled_ids[at]
            asked = Asked(spec, ids, gap=gap is not None, grad=grads is not None, finite=finite)
            tile = tile_divergence(student, teacher, asked, buffers)
            if gap is not None and tile.gap is not None:
                gap[at] = tile.gap.to(gap.dtype)
            values[at], row = clipped(tile, weight[at], spec)
            if grads is not None:
                row = row * head.unscale(student, slope, temperature=temperature)
                grads.add(student, row, at=at, hidden=rows, weight=head.weight)
    return values
