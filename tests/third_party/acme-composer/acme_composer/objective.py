"""An objective in twenty lines: the core brings baseline, masks and aggregation."""

from __future__ import annotations

from torch import Tensor

from composer_core.batch import Batch
from composer_core.errors import RunFailed
from composer_core.loss.policy import group_advantages
from composer_core.loss.reduce import COUNT_OF, aggregate, select
from composer_core.plugins.settings import NoSettings
from composer_core.protocols import Aggregation, PolicyView, Term


class Reinforce:
    """-A log pi per token, A the reward less its group's mean. Williams 1992."""

    aggregation = Aggregation.TOKEN_MEAN

    def __init__(self, settings: NoSettings) -> None:
        pass

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        """Centred by the group's mean."""
        return group_advantages(rewards, group, scale="none")[0]

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over this micro-batch."""
        rollouts = batch.rollouts
        if rollouts is None or rollouts.advantages is None:
            raise RunFailed("objective 'reinforce' needs rewarded rollouts")
        logps = select(view.logps(rollouts.seqs, grad=True, temperature=batch.temperature), rollouts.action)
        losses = -select(rollouts.advantages, rollouts.action) * logps
        total = aggregate(losses, rollouts.action, rollouts.seqs, how=self.aggregation)
        return Term(total, COUNT_OF[self.aggregation])
