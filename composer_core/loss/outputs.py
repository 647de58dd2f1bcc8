"""What a model's forward left behind for the losses: packed tokens' rows of hidden states or logits.

`ModelView` makes these and hands the numbers on. Hidden states with a head go through the fused forms, chunk by
chunk; logits through the plain ones. Letters: N tokens packed, S sequences, T longest, K hint tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_core.batch import Hints, Seqs
from composer_core.divergences import Divergence, Support
from composer_core.loss.divergence import divergence
from composer_core.loss.fused import fused_linear_divergence
from composer_core.loss.fused_logps import fused_logps
from composer_core.loss.head import Head, accumulation_dtype


@dataclass(frozen=True)
class Outputs:
    """What a network gave for some sequences: hidden states and the head behind them, or logits."""

    seqs: Seqs
    states: Tensor
    """(S, T, H), or (S, T, V) without a head; in the model's dtype."""
    head: Head | None
    start: Tensor | None = None
    """(S,) column in which each sequence begins; None: 0, as padded on the right."""

    def rows(self, at: Tensor) -> Tensor:
        """Those that predict the tokens at flat indices `at`, (len(at), H or V), joined to the graph.

        A filler that points at a first token, which nothing predicts, gets the row of that token itself.
        """
        if not at.numel():
            return self.states.reshape(-1, self.states.shape[-1])[:0]
        sequence = self.seqs.owner[at]
        column = (at - self.seqs.cu[sequence] - 1).clamp(min=0)
        return self.states[sequence, column if self.start is None else column + self.start[sequence]]

    def logits(self, at: Tensor, *, temperature: float) -> Tensor:
        """Logits over the temperature that predict the tokens at flat indices `at`, (len(at), V), likewise wide."""
        return scaled(_logits(self.rows(at), self.head), temperature)

    def logps(self, at: Tensor, *, temperature: float) -> Tensor:
        """Log-probs of the tokens at flat indices `at`, (len(at),), in at least float32."""
        rows, ids = self.rows(at), self.seqs.ids[at]
        if self.head is not None:
            return fused_logps(
                rows,
                self.head.weight,
                ids,
                temperature=temperature,
                bias=self.head.bias,
                logit_scale=self.head.logit_scale,
                softcap=self.head.softcap,
            )[0]
        return picked_logps(rows, ids, temperature=temperature)


def picked_logps(logits: Tensor, ids: Tensor, *, temperature: float) -> Tensor:
    """Log-probs of `ids`, (n,), under (n, V) logits, in at least float32."""
    logits = scaled(logits, temperature)
    # not log_softmax: its (n, V) result would be kept for one entry of each row
    return logits.gather(-1, ids[:, None]).squeeze(-1) - logits.logsumexp(-1)


def divergence_between(
    student: Outputs, teacher: Outputs, hints: Hints, spec: Divergence, *, rows: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Divergence per hint token, (K,), 0 where the weight is; from hidden states where both sides have a head.

    Beside it log q - log p of the tokens themselves, (K,), 0 likewise and without gradient, where that was to be had
    for nothing; else None. `rows` are the student's, `student.rows(hints.student)`, and `ids` the tokens, (K,).
    """
    taught, mine, theirs = teacher.rows(hints.teacher), student.head, teacher.head
    sampled = spec.support is Support.SAMPLED
    if mine is None or theirs is None:
        # filler is left out before anything is computed: a NaN there would reach the gradient through the softmax
        real = hints.weight.nonzero().flatten()
        logits = _logits(rows[real], mine), _logits(taught[real], theirs)
        values = divergence(*logits, spec, sampled_ids=ids[real] if sampled else None)
        return values.new_zeros(len(ids)).index_put((real,), values), None
    gap = None
    if not sampled and spec.taid != 0:
        gap = torch.empty(len(ids), dtype=accumulation_dtype(rows, mine.weight), device=rows.device)
    _, values = fused_linear_divergence(
        rows,
        mine.weight,
        taught,
        theirs.weight,
        spec,
        weight=hints.weight,
        sampled_ids=ids if sampled or gap is not None else None,
        student_bias=mine.bias,
        teacher_bias=theirs.bias,
        logit_scale=mine.logit_scale,
        softcap=mine.softcap,
        teacher_logit_scale=theirs.logit_scale,
        teacher_softcap=theirs.softcap,
        sampled_gap=gap,
    )
    return values, gap


def _logits(rows: Tensor, head: Head | None) -> Tensor:
    if head is None:
        return rows
    logits = nn.functional.linear(rows, head.weight, head.bias)
    logits = logits if head.logit_scale == 1 else logits * head.logit_scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, in at least float32."""
    # upcast before the division: in bf16 that alone rounds a loss by up to a percent
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return wide if temperature == 1 else wide / temperature
