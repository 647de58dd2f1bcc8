"""The `lm-ce` objective: next-token cross-entropy on the rollouts' action tokens, whatever their rewards.

The policy term of a run without rewards, or of recorded traces. Preferences and distillation are channels.
Letters: N tokens packed, S sequences, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Batch
from composer_core.errors import RunFailed
from composer_core.loss.checks import check_ids
from composer_core.loss.reduce import COUNT_OF, masked_sum
from composer_core.protocols import Aggregation, PolicyView, Term


def smoothed_cross_entropy(logits: Tensor, ids: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log q(y) - e mean over the vocabulary of log q, per row, (N, V) and (N,) -> (N,), at least float32.

    Szegedy et al. 2015 (1512.00567). A vocabulary entry at -inf (a banned token) makes the mean infinite, as it must.

    Raises:
        ValueError: the shapes do not fit, an id is outside of the vocabulary, or label_smoothing lies outside [0, 1).
    """
    if logits.dim() != 2 or ids.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and ids {tuple(ids.shape)} must be (N, V) and (N,)")
    check_ids("ids", ids, tokens=len(logits), vocab=logits.shape[1])
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    # logsumexp less a gather or a mean: log_softmax would keep another (N, V) for the backward
    total = wide.logsumexp(-1)
    target = total - wide.gather(-1, ids[:, None]).squeeze(-1)
    if label_smoothing == 0:
        return target
    return (1 - label_smoothing) * target + label_smoothing * (total - wide.mean(-1))


class LmCe:
    """Cross-entropy as an objective; `settings` has `label_smoothing` (`plugins/builtin_settings.py`)."""

    aggregation = Aggregation.TOKEN_MEAN

    def __init__(self, settings: Any) -> None:
        self._label_smoothing: float = settings.label_smoothing

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        """Ones, (S,): cross-entropy has the gradient of REINFORCE with the same advantage for everybody."""
        return torch.ones_like(rewards)

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over action tokens; recorded traces are as good as rollouts.

        Raises:
            RunFailed: there are no rollouts.
        """
        if batch.rollouts is None:
            raise RunFailed("objective 'lm-ce' needs rollouts or recorded traces; this batch has none")
        seqs, action = batch.rollouts.seqs, batch.rollouts.action
        if self._label_smoothing == 0:
            logps = view.logps(seqs, grad=True, temperature=batch.temperature)
            total = -masked_sum(logps, action)
        else:
            at = action.nonzero().squeeze(-1)
            logits = view.logits(seqs, at, grad=True, temperature=batch.temperature)
            total = smoothed_cross_entropy(logits, seqs.ids[at], label_smoothing=self._label_smoothing).sum()
        return Term(total, COUNT_OF[self.aggregation])
