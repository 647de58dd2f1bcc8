"""Policy objectives: ratio level x clip rule x token weights x aggregation; one class for all rows of `presets.py`.

The clip rules stand in `clip.py`, aggregations in `reduce.py`, KL estimators in `kl.py`, token weights in
`corrections.py`, penalties on the reward in `shaping.py`, and the comparison of rewards in `advantages.py`. A new
published objective that these can express is a row in `presets.py` and a line at the end of this file.

Letters: N tokens packed, S sequences.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Batch, Rollouts
from composer_core.errors import RunFailed
from composer_core.loss.advantages import group_advantages
from composer_core.loss.clip import RULES, Rule, Tokens
from composer_core.loss.corrections import mask_outside, off_policy_mask, sampler_ratio, truncate
from composer_core.loss.distributions import wide
from composer_core.loss.kl import ESTIMATORS
from composer_core.loss.presets import PRESETS, Estimator, Preset, Ratio, Scale
from composer_core.loss.reduce import (
    COUNT_OF,
    aggregate_selected,
    check_shapes,
    global_count,
    segment_mean_selected,
    select,
    spread,
)
from composer_core.loss.shaping import length_cost, overlong_penalty
from composer_core.protocols import Aggregation, PolicyView, Term


@dataclass(frozen=True)
class KlTerm:
    """A KL to the reference in the loss."""

    coef: float
    estimator: Estimator = "k3"
    corrected: bool = True
    """Times the importance ratio with its gradient: the unbiased estimate off policy, as TRL 1.16 does by default.
    Older TRL, verl and most papers leave it out; on policy the value is the same."""

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"coef must be >= 0, got {self.coef}")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")


def policy_loss(
    logps: Tensor,
    rollouts: Rollouts,
    *,
    rule: Rule,
    aggregation: Aggregation,
    ratio: Ratio = "token",
    weights: Tensor | None = None,
    kl: KlTerm | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The local sum that `COUNT_OF[aggregation]` divides, a scalar, and detached sums over tokens for the log.

    Args:
        logps: (N,) current log-probs with gradient; what stands outside `rollouts.action` may be anything.
        rollouts: with advantages; `old_logps` None means on policy, `ref_logps` are read for a KL only.
        rule: a clip rule with its numbers bound, e.g. ``partial(clip.ppo, epsilon=0.2)``.
        aggregation: how token losses become one number.
        ratio: level of the importance ratio.
        weights: (N,) detached factors of the policy term, see `corrections.py`; the KL is not weighted.
        kl: adds a KL to the reference.

    Raises:
        ValueError: a tensor does not have one entry per token, or what was asked for is None.
    """
    _check(logps, rollouts, weights=weights, kl=kl)
    mask = rollouts.action
    tokens = _tokens(logps, rollouts, level=ratio)
    per_token, indicators = rule(tokens)
    if weights is not None:
        per_token = per_token * select(weights, mask).detach()
    sums = {name: flags.count_nonzero().to(per_token.dtype) for name, flags in indicators.items()}
    if kl is not None and rollouts.ref_logps is not None:
        # log pi - log ref by way of the ratio, which is selected already: one pass less, forward and backward
        old = (logps if rollouts.old_logps is None else rollouts.old_logps).detach()
        gap = tokens.log_ratio + select(wide(old) - rollouts.ref_logps.detach(), mask)
        drift = ESTIMATORS[kl.estimator](gap)
        drift = drift * tokens.ratio if kl.corrected else drift
        per_token = torch.add(per_token, drift, alpha=kl.coef)
        sums["kl"] = drift.detach().sum()
    # rules and estimators give 0 where everything they read was made 0: nothing is left to select
    return aggregate_selected(per_token, mask, rollouts.seqs, how=aggregation), sums


class PolicyObjective:
    """A row of `presets.py` with the settings of a spec.

    `settings` is the preset's model in `plugins/builtin_settings.py`, or any object with its attributes: the loss
    maths does not import the plugin layer. `drop_truncated` is for the backend, which alone knows the completions
    that hit the limit: it marks their tokens as no actions.
    """

    def __init__(self, preset: Preset, settings: Any) -> None:
        self.preset = preset
        self.aggregation = preset.aggregation
        self._settings = settings
        self._rule = RULES[preset.clip](settings)
        self._warned_of_lone = False

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        """Group advantages, (S,), of the rewards less the penalties and the KL that the settings put into them.

        Raises:
            RunFailed: the KL (k1) stands in the reward, and no KL came; or `group_advantages` refuses the rewards.
        """
        scale: Scale = self._settings.scale_rewards
        advantages, lone = group_advantages(self._shaped(rewards, lengths, ref_kl), group, scale=scale)
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
            RunFailed: there are no rollouts or advantages, or no reference or sampler log-probs where settings ask
                for them.
        """
        rollouts = self._rewarded(batch)
        logps = view.logps(rollouts.seqs, grad=True, temperature=batch.temperature)
        in_loss = self._settings.kl_coef > 0 and self._settings.kl_estimator != "k1"
        total, sums = policy_loss(
            logps,
            rollouts,
            rule=self._rule,
            aggregation=self.aggregation,
            ratio=self.preset.ratio,
            weights=self._weights(logps, rollouts),
            kl=self._kl_term(rollouts) if in_loss else None,
        )
        if self._settings.kl_coef > 0 and not in_loss and rollouts.ref_logps is not None:
            sums["kl"] = _k1_sum(logps, rollouts.ref_logps, rollouts.action)
        count = COUNT_OF[self.aggregation]
        # divided by `count` like the loss, these become means over tokens whatever the aggregation is
        scale = global_count(batch.counts, count) / global_count(batch.counts, "tokens")
        return Term(total, count, {name: (value * scale).detach() for name, value in sums.items()})

    def _shaped(self, rewards: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        settings = self._settings
        if settings.kl_coef > 0 and settings.kl_estimator == "k1":
            if ref_kl is None:
                raise self._no_reference()
            rewards = rewards - settings.kl_coef * ref_kl
        if settings.overlong is not None:
            penalty = overlong_penalty(lengths, limit=settings.overlong.limit, cache=settings.overlong.cache)
            rewards = rewards + settings.overlong.weight * penalty
        if settings.length_penalty is not None:
            length = settings.length_penalty
            rewards = rewards - length.weight * length_cost(lengths / length.per, k=length.k, q=length.q)
        return rewards

    def _weights(self, logps: Tensor, rollouts: Rollouts) -> Tensor | None:
        """Token weights from the sampler's log-probs; None where the settings ask for none."""
        correction, threshold = self._settings.rollout_correction, self._settings.off_policy_threshold
        if correction is None and threshold is None:
            return None
        if rollouts.sampler_logps is None or rollouts.advantages is None:
            raise RunFailed(
                f"objective {self.preset.name!r} corrects for the sampler, but no sampler log-probs came",
                fix="leave out rollout_correction and off_policy_threshold, or use a backend that keeps the log-probs "
                "of its inference engine",
            )
        mask, seqs = rollouts.action, rollouts.seqs
        old = logps.detach() if rollouts.old_logps is None else rollouts.old_logps
        weights = mask.to(logps.dtype)
        if correction is not None:
            weights = sampler_ratio(old, rollouts.sampler_logps, mask, seqs, level=correction.level)
            if correction.rule == "truncate":
                weights = truncate(weights, high=correction.high)
            else:
                weights = mask_outside(weights, low=correction.low, high=correction.high)
        if threshold is not None:
            weights = weights * off_policy_mask(
                rollouts.advantages, logps, rollouts.sampler_logps, mask, seqs, threshold=threshold
            )
        return weights

    def _rewarded(self, batch: Batch) -> Rollouts:
        if batch.rollouts is None or batch.rollouts.advantages is None:
            what = (
                "no rollouts" if batch.rollouts is None else "rollouts without advantages (recorded traces have none)"
            )
            raise RunFailed(f"objective {self.preset.name!r} needs rewarded rollouts; this batch has {what}")
        return batch.rollouts

    def _kl_term(self, rollouts: Rollouts) -> KlTerm:
        if rollouts.ref_logps is None:
            raise self._no_reference()
        settings = self._settings
        return KlTerm(settings.kl_coef, estimator=settings.kl_estimator, corrected=settings.kl_corrected)

    def _no_reference(self) -> RunFailed:
        return RunFailed(
            f"objective {self.preset.name!r} has kl_coef {self._settings.kl_coef:g}, but no reference log-probs came",
            fix="set kl_coef: 0, or use a backend with a reference model",
        )


def _check(logps: Tensor, rollouts: Rollouts, *, weights: Tensor | None, kl: KlTerm | None) -> None:
    if rollouts.advantages is None:
        raise ValueError("rollouts.advantages is None: a policy loss needs them, (N,)")
    if kl is not None and rollouts.ref_logps is None:
        raise ValueError("rollouts.ref_logps is None: a KL to the reference needs them, (N,)")
    given = {
        "ids": rollouts.seqs.ids,
        "logps": logps,
        "action": rollouts.action,
        "advantages": rollouts.advantages,
        "old_logps": rollouts.old_logps,
        "ref_logps": rollouts.ref_logps,
        "weights": weights,
    }
    check_shapes("one entry per token", **{name: value for name, value in given.items() if value is not None})


def _k1_sum(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """The KL that entered through the reward, for the log."""
    return ESTIMATORS["k1"](select(logps - ref_logps, mask)).detach().sum()


def _tokens(logps: Tensor, rollouts: Rollouts, *, level: Ratio) -> Tokens:
    """Join current and old log-probs; outside the actions they may hold anything."""
    mask, seqs = rollouts.action, rollouts.seqs
    old = logps if rollouts.old_logps is None else rollouts.old_logps
    log_ratio = levelled = select(wide(logps) - old.detach(), mask)
    if level != "token":
        levelled = spread(segment_mean_selected(log_ratio, mask, seqs), seqs)
    if level == "sequence-token":
        # the sequence's value, the token's gradient: r_seq x pi / sg(pi)
        levelled = levelled.detach() + (log_ratio - log_ratio.detach())
    assert rollouts.advantages is not None
    advantages = select(rollouts.advantages, mask).detach()
    return Tokens(seqs=seqs, mask=mask, raw_logps=logps, log_ratio=log_ratio, level=levelled, advantages=advantages)


# What the contributions of `plugins/builtin.py` name: called with the settings, each gives its objective.
grpo = partial(PolicyObjective, PRESETS["grpo"])
dr_grpo = partial(PolicyObjective, PRESETS["dr-grpo"])
bnpo = partial(PolicyObjective, PRESETS["bnpo"])
dapo = partial(PolicyObjective, PRESETS["dapo"])
gspo = partial(PolicyObjective, PRESETS["gspo"])
gspo_token = partial(PolicyObjective, PRESETS["gspo-token"])
gmpo = partial(PolicyObjective, PRESETS["gmpo"])
cispo = partial(PolicyObjective, PRESETS["cispo"])
dppo = partial(PolicyObjective, PRESETS["dppo"])
sapo = partial(PolicyObjective, PRESETS["sapo"])
vespo = partial(PolicyObjective, PRESETS["vespo"])
luspo = partial(PolicyObjective, PRESETS["luspo"])
maxrl = partial(PolicyObjective, PRESETS["maxrl"])
composer2 = partial(PolicyObjective, PRESETS["composer2"])
