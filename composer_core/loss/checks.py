"""Shapes, types and ranges that the divergences and fused losses refuse, each naming the argument and the rule.

Nothing is ever broadcast by accident. Letters: K tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_core.divergences import Divergence, Support


def check_logits(student_logits: Tensor, teacher_logits: Tensor) -> None:
    """Refuse logits that are not (K, V) of one vocabulary.

    Raises:
        ValueError: naming both shapes.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.dim() != 2:
        raise ValueError(
            f"student logits {tuple(student_logits.shape)} and teacher logits {tuple(teacher_logits.shape)} "
            "must both be (K, V) of one vocabulary"
        )


def check_sampled_ids(
    sampled_ids: Tensor | None, spec: Divergence, *, tokens: int, vocab: int, gap: Tensor | None = None
) -> None:
    """Refuse sampled ids that are missing, not wanted, or not one id of the vocabulary per token; and a `gap` for them
    that does not fit.

    Raises:
        ValueError: naming the argument and the rule.
    """
    if (spec.support is Support.SAMPLED or gap is not None) != (sampled_ids is not None):
        given = "missing" if sampled_ids is None else "given"
        with_gap = "" if gap is None else " and a sampled_gap"
        raise ValueError(
            f"sampled_ids are for the sampled support and needed there: {given} with {spec.support}{with_gap}"
        )
    if sampled_ids is not None:
        check_ids("sampled_ids", sampled_ids, tokens=tokens, vocab=vocab)
    if gap is None:
        return
    if gap.shape != (tokens,) or gap.dtype not in (torch.float32, torch.float64) or gap.requires_grad:
        raise ValueError(f"sampled_gap {tuple(gap.shape)} {gap.dtype} must be ({tokens},) float32 without gradient")
    if spec.taid == 0:
        raise ValueError("sampled_gap is a by-product, and with taid 0 nothing is computed")


def check_ids(name: str, ids: Tensor, *, tokens: int, vocab: int) -> None:
    """Refuse anything but (`tokens`,) int64 ids of a vocabulary of that size.

    Raises:
        ValueError: naming the argument, its shape and type, and the rule.
    """
    if ids.shape != (tokens,) or ids.dtype != torch.int64:
        raise ValueError(f"{name} {tuple(ids.shape)} {ids.dtype} must be ({tokens},) torch.int64, one id per token")
    if tokens and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"{name} must be in [0, {vocab}), got {int(ids.min())} to {int(ids.max())}")


def check_positive(**numbers: float | None) -> None:
    """Refuse numbers that are not > 0, NaN too; None passes.

    Raises:
        ValueError: naming the number.
    """
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")


def check_mask(name: str, mask: Tensor) -> None:
    """Refuse a mask with anything but true and false, or 1 and 0: of Hugging Face labels every entry would count.

    Raises:
        ValueError: naming the argument and the way to a mask.
    """
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} must be a mask of 0 and 1; from Hugging Face labels it is `labels != -100`")


def check_projection(side: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, softcap: float | None) -> None:
    """Refuse hidden states, weight and bias of one head that do not fit; `side` is the arguments' prefix.

    Raises:
        ValueError: naming the arguments, their shapes or types, and the rule.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{side}hidden {tuple(hidden.shape)} must be (K, H) and {side}weight {tuple(weight.shape)} (V, H)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{side}bias {tuple(bias.shape)} must be (V,) of {side}weight, {tuple(weight.shape[:1])}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"{side}hidden {hidden.dtype} and {side}weight {weight.dtype} must be floating-point")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0 or None, got {softcap}")


def check_weight(weight: Tensor, *, tokens: int) -> None:
    """Refuse anything but (`tokens`,) floating-point weights.

    Raises:
        ValueError: naming the shape and the rule.
    """
    if weight.shape != (tokens,) or not weight.is_floating_point():
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} must be ({tokens},) floating-point, one per token"
        )


def check_chunk(chunk: int | None) -> None:
    """Refuse a chunk of no tokens.

    Raises:
        ValueError: naming the number.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 tokens or None, got {chunk}")


def check_single_backward() -> None:
    """Refuse a backward that is to be differentiated again; autograd would take its result for a constant.

    Raises:
        RuntimeError: the backward runs with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("a fused loss can be differentiated once only; with create_graph=True use loss.divergence")
