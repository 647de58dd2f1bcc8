"""Sums over masked and packed tokens that stay finite, and the rule that names what divides them.

Nothing here divides by a count of its own unless the caller passes it: a micro-batch does not know how many tokens
the other micro-batches and ranks hold. Letters as in `batch.py`: N tokens of all sequences, S sequences.

Every function upcasts half precision to float32 and returns a tensor that stays joined to the graph, with zero
gradient, when nothing is selected: each rank must run the same backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_core.batch import Seqs
from composer_core.errors import RunFailed
from composer_core.protocols import Aggregation


def check_shapes(rule: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all have one shape: broadcasting would turn a slip into a wrong number.

    Example: ``check_shapes("one entry per token", logps=logps, mask=mask)``
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{shapes}: the shapes must be equal ({rule})")


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is true and 0 elsewhere, (N,), in at least float32.

    Use it BEFORE a non-linear step: `select(gap, mask).exp()` is clean in value and gradient, whereas
    `select(gap.exp(), mask)` has a NaN gradient where a masked gap overflows (0 x inf in exp's backward).

    Raises:
        ValueError: the shapes differ, or the mask is not bool.
    """
    check_shapes("one entry each", values=values, mask=mask)
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask must be torch.bool, got {mask.dtype}")
    wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return torch.where(mask, wide, 0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the selected entries, a scalar; a NaN or infinity elsewhere reaches neither value nor gradient."""
    return select(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor, *, count: float | Tensor) -> Tensor:
    """`masked_sum` divided by a count of the caller's choice, at least 1, so that an empty mask gives 0."""
    divisor = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)
    return masked_sum(values, mask) / divisor


def segment_sum(values: Tensor, seqs: Seqs) -> Tensor:
    """Sum within each packed sequence, (N,) -> (S,); an empty sequence gives 0.

    Raises:
        ValueError: `values` does not have one entry per token.
    """
    if values.shape != seqs.ids.shape:
        raise ValueError(f"values have shape {tuple(values.shape)}, the sequences hold {seqs.ids.numel()} tokens")
    wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    # segment_reduce, not index_add: atomics would make a GPU's sums differ from run to run
    return torch.segment_reduce(wide, "sum", lengths=seqs.lengths, unsafe=True)


def segment_mean(values: Tensor, mask: Tensor, seqs: Seqs) -> Tensor:
    """Mean over the selected tokens of each sequence, (N,) -> (S,); a sequence without any gives 0."""
    return segment_mean_selected(select(values, mask), mask, seqs)


def segment_mean_selected(values: Tensor, mask: Tensor, seqs: Seqs) -> Tensor:
    """`segment_mean` for values that are 0 outside the mask already, at one pass less over the tokens."""
    return segment_sum(values, seqs) / segment_sum(mask.to(torch.float32), seqs).clamp(min=1)


def spread(values: Tensor, seqs: Seqs) -> Tensor:
    """Each token gets its sequence's value, (S,) -> (N,)."""
    # index_select: the backward of values[owner] takes several times as long on a CPU
    return values.index_select(0, seqs.owner)


COUNT_OF: Mapping[Aggregation, str] = {
    Aggregation.TOKEN_MEAN: "tokens",
    Aggregation.TOKEN_MEAN_LOCAL: "micro_batches",
    Aggregation.SEQUENCE_MEAN: "sequences",
    Aggregation.SEQUENCE_SUM: "sequences",
    Aggregation.CONSTANT: "max_tokens",
}
"""The key of `Batch.counts` that divides a sum made by `aggregate`."""


def aggregate(values: Tensor, mask: Tensor, seqs: Seqs, *, how: Aggregation) -> Tensor:
    """Token losses (N,) to the local sum that `COUNT_OF[how]` divides, a scalar.

    A sequence without a selected token adds 0 to a mean over sequences and is still counted, as in TRL.
    """
    return aggregate_selected(select(values, mask), mask, seqs, how=how)


def aggregate_selected(values: Tensor, mask: Tensor, seqs: Seqs, *, how: Aggregation) -> Tensor:
    """`aggregate` for token losses that are 0 outside the mask already, at one pass less over the tokens."""
    if how is Aggregation.TOKEN_MEAN_LOCAL:
        return values.sum() / mask.sum().clamp(min=1)
    if how is Aggregation.SEQUENCE_MEAN:
        return segment_mean_selected(values, mask, seqs).sum()
    return values.sum()


def global_count(counts: Mapping[str, float], *names: str) -> float:
    """The first of `names` that was counted, at least 1.

    Raises:
        RunFailed: none of them was. A local count must never stand in: the result would depend on the split.
    """
    for name in names:
        if name in counts:
            return max(float(counts[name]), 1.0)
    wanted = " nor ".join(repr(name) for name in names)
    known = ", ".join(sorted(counts)) or "none"
    raise RunFailed(
        f"a loss is to be divided by a count that nobody made: {'neither ' if len(names) > 1 else ''}{wanted} "
        f"is among the counts of this step ({known})",
        fix="return this name from the channel's `count`, or name a count that the backend makes",
    )
