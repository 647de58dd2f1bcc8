"""Preference losses: formulas of `preference_forms.py`, and the sequence log-probs they are made of.

A form maps `PairLogps` to one loss per pair; weights, counts and forwards are the channel's. Log-probs are packed and
entry i is about TOKEN i (`batch.py`), so ONE mask selects an answer and its length: nothing is shifted here, and a
length can never be counted on the unshifted mask while the sum uses the shifted one.

Letters: N tokens packed, S sequences, P pairs. W and L: policy minus reference log-prob of chosen and rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_core.batch import Seqs
from composer_core.loss.checks import check_mask
from composer_core.loss.reduce import check_shapes, segment_sum, select

LOGP_CEILING = -1e-7
"""ORPO clamps a mean log-prob below this: at probability 1 the log-odds are infinite."""


@dataclass(frozen=True)
class PairLogps:
    """What a preference loss reads of P pairs: log-probs summed over each answer, and its tokens."""

    chosen: Tensor
    """(P,) with gradient."""
    rejected: Tensor
    """(P,) with gradient."""
    chosen_tokens: Tensor
    """(P,); 0 counts as 1, such a pair should have been dropped."""
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None
    """(P,) under the reference model; detached when read."""
    ref_rejected: Tensor | None = None
    drift: Tensor | None = None
    """Scalar, for `kto` only: see `reference_drift`."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "drift"}
        check_shapes("one entry per pair", **{name: value for name, value in given.items() if value is not None})
        if self.drift is not None and self.drift.dim():
            raise ValueError(f"drift {tuple(self.drift.shape)} must be a scalar: it is that of all pairs")

    @property
    def chosen_ratio(self) -> Tensor:
        """W, (P,)."""
        return self.chosen - self._reference(self.ref_chosen, "ref_chosen")

    @property
    def rejected_ratio(self) -> Tensor:
        """L, (P,)."""
        return self.rejected - self._reference(self.ref_rejected, "ref_rejected")

    @property
    def margin(self) -> Tensor:
        """W - L, (P,)."""
        return self.chosen_ratio - self.rejected_ratio

    def per_chosen_token(self, values: Tensor) -> Tensor:
        """(P,) over the length of the chosen answers."""
        return values / self.chosen_tokens.clamp(min=1)

    def per_rejected_token(self, values: Tensor) -> Tensor:
        """(P,) over the length of the rejected answers."""
        return values / self.rejected_tokens.clamp(min=1)

    @staticmethod
    def _reference(logps: Tensor | None, name: str) -> Tensor:
        if logps is None:
            raise ValueError(f"{name} is None: this preference loss compares the policy with a reference model")
        return logps.detach()


# -- forms: one loss per pair, (P,) ------------------------------------------------------------------------------------


def logistic(margin: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d) per margin d, any shape.

    With e = 0 the loss of DPO (Rafailov et al. 2023, 2305.18290, eq. 7), else conservative DPO.

    Raises:
        ValueError: beta is not positive, or label_smoothing lies outside [0, 0.5).
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    # logsigmoid, not log(sigmoid): in fp32 that is -inf with a NaN gradient from about -89 down
    agreed = -F.logsigmoid(beta * margin)
    if label_smoothing == 0:
        return agreed
    return (1 - label_smoothing) * agreed - label_smoothing * F.logsigmoid(-beta * margin)


def dpo(pairs: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """`logistic` of W - L, (P,). Rafailov et al. 2023 (2305.18290); TRL ignores label_smoothing here."""
    return logistic(pairs.margin, beta=beta, label_smoothing=label_smoothing)


def robust(pairs: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """(-(1 - e) ls(beta d) + e ls(-beta d)) / (1 - 2 e), (P,): unbiased when a share e of the labels is flipped.

    Chowdhury et al. 2024 (2403.00409). Negative for a large margin: that is the correction, not a fault.
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    kept = (1 - label_smoothing) * F.logsigmoid(beta * pairs.margin)
    flipped = label_smoothing * F.logsigmoid(-beta * pairs.margin)
    return (flipped - kept) / (1 - 2 * label_smoothing)


def ipo(pairs: PairLogps, *, beta: float = 0.1) -> Tensor:
    """(W / n_w - L / n_l - 1 / (2 beta))^2, (P,). Azar et al. 2023 (2310.12036), eq. 17, on log-ratios per token."""
    _check_beta(beta)
    return (_margin_per_token(pairs) - 1 / (2 * beta)).square()


def simpo(pairs: PairLogps, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0) -> Tensor:
    """`logistic` of the difference of mean log-probs less gamma / beta, (P,). Meng et al. 2024 (2405.14734), eq. 6.

    gamma here is the margin itself; the official code names gamma / beta (its default 0.25 is gamma 0.5).
    """
    chosen, rejected = pairs.per_chosen_token(pairs.chosen), pairs.per_rejected_token(pairs.rejected)
    return simpo_per_pair(chosen, rejected, beta=beta, gamma=gamma, label_smoothing=label_smoothing)


def sigmoid_norm(pairs: PairLogps, *, beta: float = 5.0) -> Tensor:
    """-log sigmoid(beta (W / n_w - L / n_l)), (P,): length-normalised DPO. Lambert et al. 2024 (2411.15124), eq. 6.

    beta multiplies a mean over tokens: it must be tens of times that of DPO.
    """
    return logistic(_margin_per_token(pairs), beta=beta)


def apo_zero(pairs: PairLogps, *, beta: float = 0.1) -> Tensor:
    """1 - sigmoid(beta W) + sigmoid(beta L), (P,). D'Oosterlinck et al. 2024 (2408.06266), eq. 7."""
    _check_beta(beta)
    # sigmoid(-x), not 1 - sigmoid(x): that loses all digits of a loss near 0
    return torch.sigmoid(-beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: PairLogps, *, beta: float = 0.1) -> Tensor:
    """sigmoid(beta W) + 1 - sigmoid(beta (W - L)), (P,). D'Oosterlinck et al. 2024 (2408.06266), eq. 8."""
    _check_beta(beta)
    return torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(-beta * pairs.margin)


def kto(
    pairs: PairLogps, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """`kto_desirable` of W plus `kto_undesirable` of L, weighted, (P,); with a drift of 0 it is `apo_zero`.

    Raises:
        ValueError: `pairs.drift` is None.
    """
    if pairs.drift is None:
        raise ValueError("drift is None: kto compares each answer with the policy's drift, see reference_drift")
    desirable = kto_desirable(pairs.chosen_ratio, pairs.drift, beta=beta)
    undesirable = kto_undesirable(pairs.rejected_ratio, pairs.drift, beta=beta)
    return desirable_weight * desirable + undesirable_weight * undesirable


def orpo(pairs: PairLogps, *, beta: float = 0.1) -> Tensor:
    """NLL per token of the chosen + beta x `odds_ratio`, (P,). Hong et al. 2024 (2403.07691), eq. 6."""
    _check_beta(beta)
    chosen, rejected = pairs.per_chosen_token(pairs.chosen), pairs.per_rejected_token(pairs.rejected)
    return -chosen + beta * odds_ratio(chosen, rejected)


def imitate(pairs: PairLogps) -> Tensor:
    """-log pi per token of the chosen answer, (P,): behaviour cloning. The rejected answer gets a zero gradient."""
    return -pairs.per_chosen_token(pairs.chosen) + 0 * select(pairs.rejected, pairs.rejected.isfinite())


FORMS: Mapping[str, Callable[..., Tensor]] = {
    "dpo": dpo,
    "robust": robust,
    "ipo": ipo,
    "simpo": simpo,
    "sigmoid-norm": sigmoid_norm,
    "apo-zero": apo_zero,
    "apo-down": apo_down,
    "kto": kto,
    "orpo": orpo,
    "imitate": imitate,
}
"""The function of each row of `PREFERENCE_FORMS`: (pairs, **the row's numbers) -> (P,)."""


# -- parts that stand on their own -------------------------------------------------------------------------------------


def simpo_per_pair(
    chosen_avg: Tensor, rejected_avg: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """`simpo` from mean log-probs, (P,) and (P,) -> (P,)."""
    check_shapes("one entry per pair", chosen_avg=chosen_avg, rejected_avg=rejected_avg)
    _check_beta(beta)
    return logistic(chosen_avg - rejected_avg - gamma / beta, beta=beta, label_smoothing=label_smoothing)


def odds_ratio(chosen_avg: Tensor, rejected_avg: Tensor) -> Tensor:
    """-log sigmoid(log-odds of chosen - log-odds of rejected), (P,), from mean log-probs. ORPO's second part."""
    check_shapes("one entry per pair", chosen_avg=chosen_avg, rejected_avg=rejected_avg)
    return -F.logsigmoid(log_odds(chosen_avg) - log_odds(rejected_avg))


def log_odds(avg_logp: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p = a mean log-prob, shape kept; finite, clamped at `LOGP_CEILING`."""
    wide = avg_logp.float() if avg_logp.dtype in (torch.bfloat16, torch.float16) else avg_logp
    clamped = wide.clamp(max=LOGP_CEILING)
    # log(1 - e^x) the accurate way on each side of -ln 2; both arms are finite everywhere below the ceiling
    log1mexp = torch.where(clamped > -0.6931, torch.log(-torch.expm1(clamped)), torch.log1p(-torch.exp(clamped)))
    return clamped - log1mexp


def kto_desirable(ratio: Tensor, drift: Tensor | float, *, beta: float) -> Tensor:
    """1 - sigmoid(beta (W - z)) for desirable answers, (P,). Ethayarajh et al. 2024 (2402.01306), eq. 8."""
    _check_beta(beta)
    return torch.sigmoid(beta * (drift - ratio))


def kto_undesirable(ratio: Tensor, drift: Tensor | float, *, beta: float) -> Tensor:
    """1 - sigmoid(beta (z - L)) for undesirable answers, (P,). Ethayarajh et al. 2024 (2402.01306), eq. 8."""
    _check_beta(beta)
    return torch.sigmoid(beta * (ratio - drift))


def reference_drift(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """KTO's z, a detached scalar >= 0: mean log-ratio of answers paired with OTHER prompts than their own, (P,)."""
    check_shapes("one entry per answer", logps=logps, ref_logps=ref_logps)
    gap = (logps - ref_logps).detach()
    return (gap.sum() / max(gap.numel(), 1)).clamp(min=0)


def simpo_loss(
    chosen_avg_logprobs: Tensor, rejected_avg_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """Mean over pairs of -log sigmoid(beta (chosen - rejected) - gamma), a scalar; 0 for no pair.

    Args:
        chosen_avg_logprobs: (P,) mean log-prob per token of the chosen answers.
        rejected_avg_logprobs: (P,) of the rejected answers.
        beta: scale of the difference.
        gamma: margin that the chosen answer must win by, in units of the scaled difference.

    Raises:
        ValueError: the shapes differ, or beta is not positive.
    """
    per_pair = simpo_per_pair(chosen_avg_logprobs, rejected_avg_logprobs, beta=beta, gamma=gamma)
    return per_pair.sum() / max(per_pair.numel(), 1)


def dpo_loss(
    chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Mean over pairs of `logistic`, a scalar, from policy-minus-reference log-probs (P,) and (P,); 0 for no pair."""
    check_shapes("one entry per pair", chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    per_pair = logistic(chosen_logratios - rejected_logratios, beta=beta, label_smoothing=label_smoothing)
    return per_pair.sum() / max(per_pair.numel(), 1)


# -- sequence log-probs ------------------------------------------------------------------------------------------------


def answer_logps(logps: Tensor, action: Tensor, seqs: Seqs) -> tuple[Tensor, Tensor]:
    """Summed log-prob of each sequence's answer, (S,), and its number of tokens, (S,), from packed (N,) and mask (N,).

    Raises:
        ValueError: `logps` or `action` does not have one entry per token.
    """
    return segment_sum(select(logps, action), seqs), segment_sum(action.float(), seqs)


def complete_pairs(chosen_tokens: Tensor, rejected_tokens: Tensor) -> Tensor:
    """(P,) bool: pairs with an answer on both sides. The others say nothing: give them weight 0, and count them."""
    check_shapes("one entry per pair", chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    return (chosen_tokens > 0) & (rejected_tokens > 0)


def avg_sequence_logprob(model_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean log-prob per answer token, (B, T) and (B, T) -> (B,).

    Entry t of both is about token t; a NaN or infinity outside the mask reaches neither value nor gradient. A row
    without an answer gives 0, joined to the graph: drop its pair.

    Raises:
        ValueError: the shapes differ, or are not (B, T), or the mask is none.
    """
    check_shapes("(B, T), one entry per token", model_logprobs=model_logprobs, response_mask=response_mask)
    if model_logprobs.dim() != 2:
        raise ValueError(f"model_logprobs must be (B, T), got {tuple(model_logprobs.shape)}")
    check_mask("response_mask", response_mask)
    mask = response_mask.bool()
    return select(model_logprobs, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def _margin_per_token(pairs: PairLogps) -> Tensor:
    return pairs.per_chosen_token(pairs.chosen_ratio) - pairs.per_rejected_token(pairs.rejected_ratio)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta}")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be in [0, 0.5), got {label_smoothing}: at 0.5 neither answer is preferred"
        )
