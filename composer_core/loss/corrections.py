"""Token weights that repair off-policy data: between sampler and trainer, and between an old policy and this one.

An inference engine's log-probs differ from the trainer's own for the same weights (kernels, precision), and rollouts
age. Each function gives detached weights or a mask per token, (N,), that `policy.policy_loss` multiplies the policy
term with; the token count that divides the loss stays as it is. Clipping of the ratio in the loss is `clip.py`.

Letters: N tokens packed, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_core.batch import Seqs
from composer_core.loss.clip import bounded
from composer_core.loss.presets import CorrectionLevel
from composer_core.loss.reduce import check_shapes, segment_mean, segment_sum, select, spread


def sampler_ratio(
    old_logps: Tensor, sampler_logps: Tensor, mask: Tensor, seqs: Seqs, *, level: CorrectionLevel
) -> Tensor:
    """pi_trainer / pi_sampler at the time of sampling, (N,), detached; 0 outside the mask.

    `token`: of each token; `sequence`: the product over the sequence's tokens, at all of them. The logarithm is
    clamped to +-`MAX_LOG_RATIO`. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL".
    """
    check_shapes("one entry per token", old_logps=old_logps, sampler_logps=sampler_logps, mask=mask)
    log_ratio = (select(old_logps, mask) - select(sampler_logps, mask)).detach()
    if level == "sequence":
        log_ratio = spread(segment_sum(log_ratio, seqs), seqs)
    return select(bounded(log_ratio).exp(), mask)


def truncate(ratio: Tensor, *, high: float) -> Tensor:
    """min(ratio, high): truncated importance sampling (TIS). Biased for the tokens cut, bounded in variance."""
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}: no token would count")
    return ratio.clamp(max=high)


def mask_outside(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """The ratio inside [low, high] and 0 outside: IcePop (Ling team 2025, 2510.18855) per token.

    On ratios of level `sequence` with low 0 it is TRL's `sequence_mask`: sequences that drifted too far are left out.
    """
    if not low < high:
        raise ValueError(f"low must be below high, got {low} and {high}: no token would count")
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def off_policy_mask(
    advantages: Tensor, logps: Tensor, sampler_logps: Tensor, mask: Tensor, seqs: Seqs, *, threshold: float
) -> Tensor:
    """(N,) bool: False where A < 0 and the sequence's mean of log pi_sampler - log pi exceeds the threshold.

    What the policy would hardly say any more need not be unlearnt. DeepSeek-V3.2 (2512.02556), section 3.1. `logps`
    are the current ones, so that the drift since sampling counts too.
    """
    check_shapes("one entry per token", advantages=advantages, logps=logps, sampler_logps=sampler_logps, mask=mask)
    gap = (select(sampler_logps, mask) - select(logps, mask)).detach()
    near = spread(segment_mean(gap, mask, seqs) <= threshold, seqs)
    return (select(advantages, mask) >= 0) | near


def top_entropy_mask(entropies: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """(N,) bool: the `share` of masked tokens whose entropy is highest. Wang et al. 2025 (2506.01939) keep 0.2.

    The quantile is that of the tokens given: hand in those of the whole step, or accept that it depends on the split.
    """
    check_shapes("one entry per token", entropies=entropies, mask=mask)
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if not mask.any():
        return torch.zeros_like(mask)
    wide = select(entropies, mask).detach()
    # a float32 threshold whatever the entropies are, as in TRL: in float64 that decides about the token at the quantile
    return mask & (wide >= torch.quantile(wide[mask].float(), 1 - share))
