"""Policy objectives: importance ratio x clip rule x aggregation, one class for every row of `presets.py`.

The clip rules stand in `clip.py`, the aggregations in `reduce.py`. A new published objective that these can express
is a row in `presets.py` and a line at the end of this file.

Letters: N tokens packed, S sequences.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Batch, Rollouts
from composer_core.errors import RunFailed
from composer_core.loss.clip import MAX_LOG_RATIO, RULES, Tokens, k3
from composer_core.loss.presets import PRESETS, Preset, Ratio, Scale
from composer_core.loss.reduce import COUNT_OF, aggregate, global_count, masked_sum, segment_mean, select
from composer_core.protocols import PolicyView, Term

STD_EPS = 1e-4
"""Added to the standard deviation of rewards, as in TRL 1.16."""


def group_advantages(rewards: Tensor, group: Tensor, *, scale: Scale) -> tuple[Tensor, int]:
    """Rewards less their group's mean, over a standard deviation (n - 1) plus `STD_EPS`: (S,), and lone rollouts.

    A NaN reward means "not rewarded": it enters neither mean nor deviation, and its advantage is 0. A rollout that
    is the only rewarded one of its group has nothing to be compared with: advantage 0, counted in the second result.
    Shao et al. 2024 (2402.03300); without the division, Liu et al. 2025 (2503.20783).
    """
    rewarded = ~rewards.isnan()
    # float64: the mean of equal rewards such as 0.1 must give 0, which a deviation of about 0 would else magnify
    values = select(rewards, rewarded).double()
    ids, index = torch.unique(group, return_inverse=True)
    total = values.new_zeros(len(ids))
    sizes = total.index_add(0, index, rewarded.double())
    means = total.index_add(0, index, values) / sizes.clamp(min=1)
    centred = select(values - means[index], rewarded)
    lone = int((sizes == 1).sum())
    if scale == "none":
        return centred.to(rewards.dtype), lone
    if scale == "group":
        squares = total.index_add(0, index, centred.square())
        deviation = (squares / (sizes - 1).clamp(min=1)).sqrt()[index]
    else:
        n = rewarded.sum().clamp(min=1)
        spread = select(values - values.sum() / n, rewarded)
        deviation = (spread.square().sum() / (n - 1).clamp(min=1)).sqrt()
    return (centred / (deviation + STD_EPS)).to(rewards.dtype), lone


class PolicyObjective:
    """A row of `presets.py` with the settings of a spec.

    `settings` is the preset's model in `plugins/builtin_settings.py`, or any object with its attributes: the loss
    maths does not import the plugin layer. `drop_truncated` is for the backend, which alone knows the completions
    that hit the limit: it marks their tokens as no actions.
    """

    def __init__(self, preset: Preset, settings: Any) -> None:
        self.preset = preset
        self.aggregation = preset.aggregation
        self._scale: Scale = settings.scale_rewards
        self._kl_coef: float = settings.kl_coef
        self._rule = RULES[preset.clip](settings)
        self._warned_of_lone = False

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        """Group advantages, (S,); see `group_advantages`. Lengths and the KL do not enter: it stands in the loss."""
        advantages, lone = group_advantages(rewards, group, scale=self._scale)
        if lone and not self._warned_of_lone:
            self._warned_of_lone = True
            warnings.warn(
                f"{self.preset.name}: {lone} group(s) with a single rewarded rollout: nothing to compare it with, "
                "its advantage is 0 (said once)",
                stacklevel=2,
            )
        return advantages

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over this micro-batch; needs `batch.rollouts` with advantages.

        Raises:
            RunFailed: there are no rollouts, advantages, or (with a KL) reference log-probs.
        """
        rollouts, advantages = self._rewarded(batch)
        mask = rollouts.action
        logps = select(view.logps(rollouts.seqs, grad=True, temperature=batch.temperature), mask)
        tokens = _tokens(rollouts, logps, advantages=select(advantages, mask).detach(), level=self.preset.ratio)
        per_token, indicators = self._rule(tokens)
        shares = {name: masked_sum(flags.float(), mask) for name, flags in indicators.items()}
        if self._kl_coef > 0:
            kl = self._kl(rollouts, tokens)
            per_token = per_token + self._kl_coef * kl
            shares["kl"] = masked_sum(kl.detach(), mask)
        count = COUNT_OF[self.aggregation]
        # divided by `count` like the loss, these become means over tokens whatever the aggregation is
        scale = global_count(batch.counts, count) / global_count(batch.counts, "tokens")
        total = aggregate(per_token, mask, rollouts.seqs, how=self.aggregation)
        return Term(total, count, {name: (value * scale).detach() for name, value in shares.items()})

    def _rewarded(self, batch: Batch) -> tuple[Rollouts, Tensor]:
        if batch.rollouts is None or batch.rollouts.advantages is None:
            what = (
                "no rollouts" if batch.rollouts is None else "rollouts without advantages (recorded traces have none)"
            )
            raise RunFailed(f"objective {self.preset.name!r} needs rewarded rollouts; this batch has {what}")
        return batch.rollouts, batch.rollouts.advantages

    def _kl(self, rollouts: Rollouts, tokens: Tokens) -> Tensor:
        if rollouts.ref_logps is None:
            raise RunFailed(
                f"objective {self.preset.name!r} has kl_coef {self._kl_coef:g}, but no reference log-probs came",
                fix="set kl_coef: 0, or use a backend with a reference model",
            )
        # times r, with its gradient: the unbiased estimate off policy, as TRL 1.16 does by default
        return k3(tokens.logps, select(rollouts.ref_logps, rollouts.action).detach()) * tokens.ratio


def _tokens(rollouts: Rollouts, logps: Tensor, *, advantages: Tensor, level: Ratio) -> Tokens:
    """Join current and old log-probs; `logps` and `advantages` are already selected by the action mask."""
    mask, seqs = rollouts.action, rollouts.seqs
    old = logps if rollouts.old_logps is None else select(rollouts.old_logps, mask)
    log_ratio = logps - old.detach()
    levelled = log_ratio if level == "token" else segment_mean(log_ratio, mask, seqs)[seqs.owner]
    ratio = levelled.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Tokens(seqs=seqs, logps=logps, log_ratio=log_ratio, ratio=ratio, advantages=advantages)


# What the contributions of `plugins/builtin.py` name: called with the settings, each gives its objective.
grpo = partial(PolicyObjective, PRESETS["grpo"])
dr_grpo = partial(PolicyObjective, PRESETS["dr-grpo"])
bnpo = partial(PolicyObjective, PRESETS["bnpo"])
dapo = partial(PolicyObjective, PRESETS["dapo"])
gspo = partial(PolicyObjective, PRESETS["gspo"])
cispo = partial(PolicyObjective, PRESETS["cispo"])
sapo = partial(PolicyObjective, PRESETS["sapo"])
vespo = partial(PolicyObjective, PRESETS["vespo"])
luspo = partial(PolicyObjective, PRESETS["luspo"])
