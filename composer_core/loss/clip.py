"""Clip rules of policy objectives: formulas from tensors and floats to a loss per token.

Masks, aggregation and advantages are not here (`policy.py`). To add a rule, write the formula, a line that reads its
numbers from the settings, and its name in `RULES` and in `presets.Clip`.

Letters: N tokens packed, S sequences. r = pi / pi_old, A the advantage of the token's sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_core.batch import Seqs
from composer_core.loss.checks import check_positive
from composer_core.loss.presets import Clip, Measure
from composer_core.loss.reduce import segment_mean_selected, segment_sum, select, spread

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 is far outside every trust region, and fp32 overflows at e^89."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log-ratios within +-`MAX_LOG_RATIO`, any shape, without gradient beyond."""
    # hardtanh, not clamp: the same numbers, and on a CPU a tenth of clamp's time in the backward
    return F.hardtanh(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Tokens:
    """What a clip rule sees of one micro-batch; per-token tensors are (N,), 0 where no action was taken."""

    seqs: Seqs
    mask: Tensor
    """(N,) bool: the actions."""
    raw_logps: Tensor
    """Current log-probs, with gradient; anything outside the mask."""
    log_ratio: Tensor
    """log r per token, with gradient, not clamped."""
    level: Tensor
    """log r at the preset's level (of the token, or of its whole sequence), with gradient, not clamped."""
    advantages: Tensor

    @cached_property
    def logps(self) -> Tensor:
        """Current log-probs, with gradient."""
        return select(self.raw_logps, self.mask)

    @cached_property
    def ratio(self) -> Tensor:
        """The ratio at the preset's level, with gradient."""
        return bounded(self.level).exp()

    @property
    def held(self) -> Tensor:
        """The ratio without gradient, for rules that only weigh with it."""
        return self.ratio.detach()

    @property
    def old_logps(self) -> Tensor:
        """Log-probs that the ratio refers to, detached."""
        return (self.logps - self.log_ratio).detach()


Rule = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""From tokens to the loss per token, (N,), and indicators, (N,) bool, whose share of all tokens is logged; both 0 where
no action was taken."""


def ppo(
    tokens: Tokens,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A). Schulman et al. 2017 (1707.06347), eq. 7.

    Two ways to bound the loss of a token with A < 0 whose ratio has exploded, where it loses its gradient: `delta`
    caps r in the first arm (Prime Intellect 2025, 2505.07291), and `dual_clip` the loss at -A dual_clip (Ye et al.
    2019, 1912.09729, eq. 5; verl uses 3). They are equal where both are at least 1 + epsilon_high; a smaller delta
    also caps tokens with A > 0.

    Raises:
        ValueError: a number is not positive.
    """
    check_positive(epsilon=epsilon, epsilon_high=epsilon_high, delta=delta, dual_clip=dual_clip)
    low = math.log1p(-epsilon) if epsilon < 1 else -MAX_LOG_RATIO  # from 1 on there is no lower bound
    high = math.log1p(epsilon if epsilon_high is None else epsilon_high)
    cap = MAX_LOG_RATIO if delta is None else math.log(delta)
    ceiling = min(max(cap, high), MAX_LOG_RATIO if dual_clip is None else math.log(dual_clip))
    falling = tokens.advantages < 0
    # that minimum is A times r bounded from above where A > 0, and from below where A < 0: one clamp, which guards
    # exp too. Its bounds are sums of products with 0 and 1, exact, because where() is slow on a CPU.
    bad = falling.to(tokens.level.dtype)
    good = 1 - bad
    clipped = tokens.level.clamp(low * bad - MAX_LOG_RATIO * good, ceiling * bad + min(cap, high) * good)
    clip_low = (tokens.level < low) & falling
    clip_high = (tokens.level > high) & (tokens.advantages > 0)
    return -tokens.advantages * clipped.exp(), {"clip_low": clip_low, "clip_high": clip_high}


def cispo(tokens: Tokens, *, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(min(r, cap)) A log pi: no token loses its gradient. MiniMax 2025 (2506.13585).

    Raises:
        ValueError: the cap is not positive.
    """
    check_positive(cap=cap)
    loss = -tokens.held.clamp(max=cap) * tokens.advantages * tokens.logps
    return loss, {"clip_high": (tokens.held > cap) & (tokens.advantages > 0)}


def sapo(
    tokens: Tokens, *, temperature_positive: float, temperature_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. arXiv 2511.20347.

    At r = 1 the value is 2 A / tau in size, and the gradient that of r A.

    Raises:
        ValueError: a temperature is not positive.
    """
    check_positive(temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    tau = _by_sign(tokens.advantages > 0, temperature_positive, temperature_negative, like=tokens.ratio)
    return -tokens.advantages * torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau, {}


def vespo(
    tokens: Tokens, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi(w)) A log pi with phi(w) = e^lambda w^k e^(-lambda w), w the product of a sequence's ratios; phi(1) = 1.

    arXiv 2602.10693. k and lambda by the sign of A.
    """
    positive = tokens.advantages >= 0
    k = _by_sign(positive, k_positive, k_negative, like=tokens.logps)
    rate = _by_sign(positive, lambda_positive, lambda_negative, like=tokens.logps)
    log_w = segment_sum(bounded(tokens.log_ratio.detach()), tokens.seqs)
    # the paper's code floors w itself at 1e-8
    log_w = spread(log_w.clamp(math.log(1e-8), MAX_LOG_RATIO), tokens.seqs)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return -phi * tokens.advantages * tokens.logps, {}


def gmpo(tokens: Tokens, *, epsilon: float, epsilon_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the sequence of clipped log r), the same at each of its tokens. Zhao et al. 2025 (2507.20673).

    log r is clipped to [-epsilon, epsilon_high] on the side that would go on, like the min of PPO.

    Raises:
        ValueError: a number is not positive.
    """
    check_positive(epsilon=epsilon, epsilon_high=epsilon_high)
    clamped = tokens.log_ratio.clamp(-epsilon, epsilon_high)
    clipped = torch.where(
        tokens.advantages > 0, torch.minimum(tokens.log_ratio, clamped), torch.maximum(tokens.log_ratio, clamped)
    )
    # one-sided clipping leaves the other side open
    mean = segment_mean_selected(clipped, tokens.mask, tokens.seqs)
    clip_low = (tokens.log_ratio < -epsilon) & (tokens.advantages < 0)
    clip_high = (tokens.log_ratio > epsilon_high) & (tokens.advantages > 0)
    loss = -spread(bounded(mean).exp(), tokens.seqs) * tokens.advantages
    return loss, {"clip_low": clip_low, "clip_high": clip_high}


def dppo(
    tokens: Tokens, *, measure: Measure, epsilon: float, epsilon_high: float, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(min(r, cap)) log pi, and 0 for tokens that left the trust region on the side that would go on.

    The region is one of the sampled token's probability, not of its ratio: a rare token may double. `tv`:
    |pi - pi_old| within epsilon (fallen, A < 0) or epsilon_high (risen, A > 0); `kl`: the KL of the two Bernoulli
    variables "this token or another". arXiv 2602.04879.

    Raises:
        ValueError: a number is not positive.
    """
    check_positive(epsilon=epsilon, epsilon_high=epsilon_high, cap=cap)
    old, new = tokens.old_logps, tokens.logps.detach()
    moved = new.exp() - old.exp()
    if measure == "kl":
        # a KL that is NaN, as where rounding lets a probability exceed 1, is outside
        moved = torch.copysign(_bernoulli_kl(old, new).nan_to_num(nan=math.inf), moved)
    clip_low = (moved < -epsilon) & (tokens.advantages < 0)
    clip_high = (moved > epsilon_high) & (tokens.advantages > 0)
    kept = ~(clip_low | clip_high)
    loss = -tokens.advantages * tokens.held.clamp(max=cap) * kept * tokens.logps
    return loss, {"clip_low": clip_low, "clip_high": clip_high}


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, *, like: Tensor) -> Tensor:
    """One of two numbers per token, (N,), in the dtype of `like`: where() of bare floats rounds them to float32."""
    return torch.full_like(like, otherwise).masked_fill(positive, if_positive)


def _bernoulli_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL between "this token or another" under the old and the new policy, (N,), from the token's log-probs."""
    # 1e-8, as in verl: the other tokens' share rounds to 0 where the policy is certain
    rest_old, rest_new = 1 - old.exp() + 1e-8, 1 - new.exp() + 1e-8
    return old.exp() * (old - new) + (1 - old.exp()) * (rest_old / rest_new).log()


def _ppo(settings: Any) -> Rule:
    return partial(
        ppo,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
        dual_clip=settings.dual_clip,
    )


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


def _gmpo(settings: Any) -> Rule:
    return partial(gmpo, epsilon=settings.epsilon, epsilon_high=settings.epsilon_high)


def _dppo(settings: Any) -> Rule:
    return partial(
        dppo,
        measure=settings.measure,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        cap=settings.cap,
    )


RULES: Mapping[Clip, Callable[[Any], Rule]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "gmpo": _gmpo,
    "dppo": _dppo,
}
"""From a preset's clip to the function that binds its numbers; settings are any object with the attributes read."""
