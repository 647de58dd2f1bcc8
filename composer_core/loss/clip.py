"""Clip rules of policy objectives: formulas from tensors and floats to a loss per token.

Masks, aggregation and advantages are not here (`policy.py`). To add a rule, write the formula, a line that reads its
numbers from the settings, and its name in `RULES` and in `presets.Clip`.

Letters: N tokens packed, S sequences. r = pi / pi_old, A the advantage of the token's sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Seqs
from composer_core.loss.presets import Clip
from composer_core.loss.reduce import segment_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 is far outside every trust region, and fp32 overflows at e^89."""


@dataclass(frozen=True)
class Tokens:
    """What a clip rule sees of one micro-batch; per-token tensors are (N,), 0 where no action was taken."""

    seqs: Seqs
    logps: Tensor
    """Current log-probs, with gradient."""
    log_ratio: Tensor
    """log r per token, with gradient, not clamped."""
    ratio: Tensor
    """r at the preset's level (of the token, or of its whole sequence), with gradient."""
    advantages: Tensor


Rule = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""From tokens to the loss per token, (N,), and indicators, (N,) bool, whose share of all tokens is logged."""


def ppo(
    tokens: Tokens, *, epsilon: float, epsilon_high: float | None, delta: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A). Schulman et al. 2017 (1707.06347), eq. 7.

    `delta` caps r in the first arm, which bounds the loss for A < 0 too. Prime Intellect 2025 (2505.07291).
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = tokens.ratio if delta is None else tokens.ratio.clamp(max=delta)
    loss = -torch.minimum(ratio * tokens.advantages, tokens.ratio.clamp(low, high) * tokens.advantages)
    clip_low = (tokens.ratio < low) & (tokens.advantages < 0)
    clip_high = (tokens.ratio > high) & (tokens.advantages > 0)
    return loss, {"clip_low": clip_low, "clip_high": clip_high}


def cispo(tokens: Tokens, *, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(min(r, cap)) A log pi: no token loses its gradient. MiniMax 2025 (2506.13585)."""
    loss = -tokens.ratio.detach().clamp(max=cap) * tokens.advantages * tokens.logps
    return loss, {"clip_high": (tokens.ratio > cap) & (tokens.advantages > 0)}


def sapo(
    tokens: Tokens, *, temperature_positive: float, temperature_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. arXiv 2511.20347.

    At r = 1 the value is 2 A / tau in size, and the gradient that of r A.
    """
    tau = torch.where(tokens.advantages > 0, temperature_positive, temperature_negative).to(tokens.ratio.dtype)
    return -tokens.advantages * torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau, {}


def vespo(
    tokens: Tokens, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi(w)) A log pi with phi(w) = e^lambda w^k e^(-lambda w), w the product of a sequence's ratios; phi(1) = 1.

    arXiv 2602.10693. k and lambda by the sign of A.
    """
    positive = tokens.advantages >= 0
    k = torch.where(positive, k_positive, k_negative)
    rate = torch.where(positive, lambda_positive, lambda_negative)
    clamped = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # the paper's code floors w itself at 1e-8
    log_w = segment_sum(clamped, tokens.seqs).clamp(math.log(1e-8), MAX_LOG_RATIO)[tokens.seqs.owner]
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return -phi * tokens.advantages * tokens.logps, {}


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """KL to the reference per token, (N,): e^d - d - 1 with d = log ref - log pi. Schulman 2020, estimator k3."""
    gap = (ref_logps - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap.exp() - gap - 1


def _ppo(settings: Any) -> Rule:
    return partial(ppo, epsilon=settings.epsilon, epsilon_high=settings.epsilon_high, delta=settings.delta)


def _cispo(settings: Any) -> Rule:
    return partial(cispo, cap=settings.epsilon_high)


def _sapo(settings: Any) -> Rule:
    return partial(
        sapo,
        temperature_positive=settings.temperature_positive,
        temperature_negative=settings.temperature_negative,
    )


def _vespo(settings: Any) -> Rule:
    return partial(
        vespo,
        k_positive=settings.k_positive,
        lambda_positive=settings.lambda_positive,
        k_negative=settings.k_negative,
        lambda_negative=settings.lambda_negative,
    )


RULES: Mapping[Clip, Callable[[Any], Rule]] = {"ppo": _ppo, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}
"""From a preset's clip to the function that binds its numbers; settings are any object with the attributes read."""
