"""A channel with both halves: a row made where rollouts end, a loss beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from acme_composer.plugin import BrevitySettings
from composer_core.batch import Batch, Rollouts
from composer_core.errors import RunFailed
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum
from composer_core.protocols import PolicyView, RolloutText, Row, Term


class Brevity(ChannelDefaults):
    """The log-probs of an answer's tokens, times how far it is too long; per too long answer."""

    def __init__(self, settings: BrevitySettings) -> None:
        self._free = settings.free

    def prepare(self, rollout: RolloutText) -> Row | None:
        """How many tokens too many; None for an answer that is short enough."""
        excess = len(rollout.completion_ids) - self._free
        return {"excess": float(excess)} if excess > 0 else None

    def count(self, row: Row | None) -> Mapping[str, float]:
        """`answers`: those that are too long."""
        return {"answers": float(row is not None)}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Mapping[str, Tensor]:
        """(S,) excess tokens; 0 is filler."""
        return {"brevity.excess": torch.tensor([0.0 if row is None else row["excess"] for row in rows])}

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over this micro-batch."""
        if batch.rollouts is None:
            raise RunFailed("channel 'brevity' needs rollouts")
        seqs, action = batch.rollouts.seqs, batch.rollouts.action
        logps = view.logps(seqs, grad=True, temperature=batch.temperature)
        excess = batch.extra["brevity.excess"].to(logps.device)[seqs.owner]
        return Term(masked_sum(excess * logps, action), "answers", {"excess": masked_sum(excess, action)})
