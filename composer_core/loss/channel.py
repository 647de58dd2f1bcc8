"""Defaults for loss channels: inherit `ChannelDefaults`, write `loss`, and it is a whole channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from composer_core.batch import Hints, Pairs, Rollouts
from composer_core.protocols import Divergence, RolloutText, Row


class ChannelDefaults:
    """A channel that needs nothing beyond the rollouts themselves.

    Example::

        class Brevity(ChannelDefaults):
            def __init__(self, settings): ...

            def loss(self, view, batch):
                seqs, action = batch.rollouts.seqs, batch.rollouts.action
                logps = view.logps(seqs, grad=True, temperature=batch.temperature)
                return Term(sum=masked_sum(logps, action), count="tokens")
    """

    def prepare(self, rollout: RolloutText) -> Row | None:
        """An empty row: active on every rollout. None would report the channel as idle."""
        return {}

    def count(self, row: Row | None) -> Mapping[str, float]:
        """Nothing of its own: `loss` names a count of the backend, such as `tokens`."""
        return {}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints | Pairs | Mapping[str, Tensor]:
        """No tensors beside the rollouts."""
        return {}

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """None."""
        return ()
