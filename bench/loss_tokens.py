"""Losses on packed log-probs, in the fewest lines of torch and as the package computes them: for `bench/loss.py`.

The plain forms multiply by masks, so one NaN under a mask spoils them; they give the same value, sums for the log and
gradient on clean input, which is checked when a case is made. To add an objective or a preference form of the package,
write its plain form and name it in `CLIPS` or `FORMS`.
Letters: N tokens packed, S sequences, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_core.batch import Rollouts, Seqs
from composer_core.loss.clip import RULES
from composer_core.loss.policy import KlTerm, policy_loss
from composer_core.loss.preference import FORMS as OUR_FORMS
from composer_core.loss.preference import PairLogps, answer_logps
from composer_core.loss.presets import PRESETS, Preset
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Aggregation

SEQUENCES, LONGEST = 32, 512
KL = 0.04
BETA, SIMPO_GAMMA, SMOOTHING = 0.1, 1.0, 0.1


@dataclass(frozen=True)
class TokenCase:
    """Contenders that compute one value with its gradient."""

    name: str
    runs: Mapping[str, Callable[[], object]]


# -- policy objectives -------------------------------------------------------------------------------------------------


def _per_sequence(values: Tensor, owner: Tensor) -> Tensor:
    return values.new_zeros(SEQUENCES).index_add(0, owner, values)


@dataclass(frozen=True)
class _Tokens:
    """What a plain clip rule reads."""

    preset: Preset
    logps: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    owner: Tensor
    level: Tensor
    """log r of the token or of its sequence."""


Clipped = tuple[Tensor, dict[str, Tensor]]
"""Loss per token, and the flags whose sums are logged."""


def _clip_ppo(of: _Tokens) -> Clipped:
    low, high = of.preset.epsilon, of.preset.epsilon_high or of.preset.epsilon
    ratio = of.level.exp()
    loss = -torch.min(ratio * of.advantages, ratio.clamp(1 - low, 1 + high) * of.advantages)
    clip_low, clip_high = (ratio < 1 - low) & (of.advantages < 0), (ratio > 1 + high) & (of.advantages > 0)
    return loss, {"clip_low": clip_low, "clip_high": clip_high}


def _clip_cispo(of: _Tokens) -> Clipped:
    ratio = of.level.exp().detach()
    cap = of.preset.epsilon_high
    return -ratio.clamp(max=cap) * of.advantages * of.logps, {"clip_high": (ratio > cap) & (of.advantages > 0)}


def _clip_sapo(of: _Tokens) -> Clipped:
    tau = torch.where(of.advantages > 0, 1.0, 1.05)
    return -of.advantages * torch.sigmoid(tau * (of.level.exp() - 1)) * 4 / tau, {}


def _clip_vespo(of: _Tokens) -> Clipped:
    k, rate = (torch.where(of.advantages >= 0, *numbers) for numbers in ((2.0, 3.0), (3.0, 2.0)))
    log_w = _per_sequence(of.level.detach() * of.mask, of.owner).clamp(math.log(1e-8), 20)[of.owner]
    return -torch.exp(rate + k * log_w - rate * log_w.exp()) * of.advantages * of.logps, {}


def _clip_gmpo(of: _Tokens) -> Clipped:
    clamped = of.level.clamp(-0.4, 0.4)
    clipped = torch.where(of.advantages > 0, torch.min(of.level, clamped), torch.max(of.level, clamped))
    mean = _per_sequence(clipped * of.mask, of.owner) / _per_sequence(of.mask.float(), of.owner)
    clip_low, clip_high = (of.level < -0.4) & (of.advantages < 0), (of.level > 0.4) & (of.advantages > 0)
    return -mean.exp()[of.owner] * of.advantages, {"clip_low": clip_low, "clip_high": clip_high}


def _clip_dppo(of: _Tokens) -> Clipped:
    risen = (of.logps.exp() - of.old.exp()).detach()
    clip_low, clip_high = (risen < -0.2) & (of.advantages < 0), (risen > 0.2) & (of.advantages > 0)
    weight = of.level.exp().clamp(max=20).detach()
    loss = -of.advantages * weight * of.logps * ~(clip_low | clip_high)
    return loss, {"clip_low": clip_low, "clip_high": clip_high}


CLIPS = {
    "ppo": _clip_ppo,
    "cispo": _clip_cispo,
    "sapo": _clip_sapo,
    "vespo": _clip_vespo,
    "gmpo": _clip_gmpo,
    "dppo": _clip_dppo,
}
PRESET_NAMES = tuple(name for name in PRESETS if name not in ("maxrl", "composer2"))
"""Those two have the loss of dapo and of dr-grpo; they differ in the advantages."""


def _plain_policy(
    logps: Tensor, rollouts: Rollouts, preset: Preset, *, kl: bool, logged: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    mask, owner = rollouts.action, rollouts.seqs.owner
    level = log_ratio = logps - rollouts.old_logps
    if preset.ratio != "token":
        mean = _per_sequence(log_ratio * mask, owner) / _per_sequence(mask.float(), owner)
        level = mean[owner]
    if preset.ratio == "sequence-token":
        level = level.detach() + logps - logps.detach()
    of = _Tokens(preset, logps, rollouts.old_logps, rollouts.advantages, mask, owner, level)
    per_token, flags = CLIPS[preset.clip](of)
    sums = {name: (flag & mask).sum() for name, flag in flags.items()} if logged else {}
    if kl:
        gap = rollouts.ref_logps - logps
        drift = (gap.exp() - gap - 1) * level.exp()
        per_token = per_token + KL * drift
        if logged:
            sums["kl"] = (drift.detach() * mask).sum()
    if preset.aggregation is Aggregation.TOKEN_MEAN_LOCAL:
        return (per_token * mask).sum() / mask.sum(), sums
    if preset.aggregation is Aggregation.SEQUENCE_MEAN:
        return (_per_sequence(per_token * mask, owner) / _per_sequence(mask.float(), owner)).sum(), sums
    return (per_token * mask).sum(), sums


def _packed(generator: torch.Generator) -> tuple[Seqs, Tensor]:
    """Sequences of half to full length, and which of their tokens are the answer's: the later three quarters."""
    lengths = torch.randint(LONGEST // 2, LONGEST + 1, (SEQUENCES,), generator=generator)
    seqs = Seqs(
        torch.zeros(int(lengths.sum()), dtype=torch.int64), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    )
    place = torch.arange(len(seqs.ids)) - seqs.cu[seqs.owner]
    return seqs, place * 4 >= lengths[seqs.owner]


def policy_case(name: str, *, kl: bool) -> TokenCase:
    """A preset with its own numbers, off policy, with or without a k3 KL to a reference."""
    generator = torch.Generator().manual_seed(0)
    seqs, action = _packed(generator)

    def noise(spread: float) -> Tensor:
        return spread * torch.randn(len(seqs.ids), generator=generator)

    logps = (noise(0.5) - 2).clamp(max=-0.01).requires_grad_()
    old, reference = logps.detach() + noise(0.2), logps.detach() + noise(0.2)
    advantages = torch.randn(SEQUENCES, generator=generator)[seqs.owner]
    rollouts = Rollouts(seqs, action, advantages=advantages, old_logps=old, ref_logps=reference)
    preset = PRESETS[name]
    rule = RULES[preset.clip](OBJECTIVE_SETTINGS[name]())
    term = KlTerm(KL) if kl else None

    def ours() -> Tensor:
        return policy_loss(logps, rollouts, rule=rule, aggregation=preset.aggregation, ratio=preset.ratio, kl=term)[0]

    losses = {
        "plain": lambda: _plain_policy(logps, rollouts, preset, kl=kl)[0],
        "ours": ours,
        "plain, nothing logged": lambda: _plain_policy(logps, rollouts, preset, kl=kl, logged=False)[0],
    }
    return _case(f"policy_loss {name}{', k3' if kl else ''}", losses, leaves=[logps])


# -- preference forms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """Sums and lengths as plain code gets them."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    @property
    def w(self) -> Tensor:
        return self.chosen - self.ref_chosen

    @property
    def l(self) -> Tensor:  # noqa: E743 - the letter of the formulas
        return self.rejected - self.ref_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens

    @property
    def margin_of_means(self) -> Tensor:
        return self.w / self.chosen_tokens - self.l / self.rejected_tokens


def _dpo(of: _Sides) -> Tensor:
    return -F.logsigmoid(BETA * (of.w - of.l))


def _robust(of: _Sides) -> Tensor:
    margin = BETA * (of.w - of.l)
    flipped = SMOOTHING * F.logsigmoid(-margin)
    return (flipped - (1 - SMOOTHING) * F.logsigmoid(margin)) / (1 - 2 * SMOOTHING)


def _simpo(of: _Sides) -> Tensor:
    chosen, rejected = of.means
    return -F.logsigmoid(2.0 * (chosen - rejected) - SIMPO_GAMMA)


def _orpo(of: _Sides) -> Tensor:
    chosen, rejected = of.means
    odds = (chosen - torch.log1p(-chosen.exp())) - (rejected - torch.log1p(-rejected.exp()))
    return -chosen - BETA * F.logsigmoid(odds)


FORMS: dict[str, Callable[[_Sides], Tensor]] = {
    "dpo": _dpo,
    "robust": _robust,
    "ipo": lambda of: (of.margin_of_means - 1 / (2 * BETA)) ** 2,
    "simpo": _simpo,
    "sigmoid-norm": lambda of: -F.logsigmoid(5.0 * of.margin_of_means),
    "apo-zero": lambda of: 1 - torch.sigmoid(BETA * of.w) + torch.sigmoid(BETA * of.l),
    "apo-down": lambda of: torch.sigmoid(BETA * of.w) + 1 - torch.sigmoid(BETA * (of.w - of.l)),
    "orpo": _orpo,
    "imitate": lambda of: -of.means[0],
}
FORM_NAMES = tuple(FORMS)


def form_case(name: str) -> TokenCase:
    """A preference form with its own numbers, from the packed log-probs of both answers."""
    generator = torch.Generator().manual_seed(0)
    sides = {side: _packed(generator) for side in ("chosen", "rejected")}
    logps = {
        side: (0.5 * torch.randn(len(seqs.ids), generator=generator) - 2).requires_grad_()
        for side, (seqs, _) in sides.items()
    }
    references = [-2.0 * LONGEST / 2 + 5 * torch.randn(SEQUENCES, generator=generator) for _ in sides]

    def plain() -> Tensor:
        sums = [_per_sequence(logps[side] * action, seqs.owner) for side, (seqs, action) in sides.items()]
        lengths = [_per_sequence(action.float(), seqs.owner) for seqs, action in sides.values()]
        return FORMS[name](_Sides(*sums, *lengths, *references)).mean()

    def ours() -> Tensor:
        answers = [answer_logps(logps[side], action, seqs) for side, (seqs, action) in sides.items()]
        (chosen, chosen_tokens), (rejected, rejected_tokens) = answers
        return OUR_FORMS[name](PairLogps(chosen, rejected, chosen_tokens, rejected_tokens, *references)).mean()

    return _case(f"preference {name}", {"plain": plain, "ours": ours}, leaves=list(logps.values()))


def _case(name: str, losses: dict[str, Callable[[], Tensor]], *, leaves: list[Tensor]) -> TokenCase:
    """Each loss with its backward, once both have been found to agree.

    Raises:
        AssertionError: value or gradient differ.
    """

    def gradients(loss: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(loss(), leaves, allow_unused=True, materialize_grads=True))

    plain, ours = losses["plain"], losses["ours"]
    torch.testing.assert_close(ours(), plain(), rtol=1e-4, atol=1e-5, msg=lambda said: f"{name}: {said}")
    for found, wanted in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, msg=lambda said: f"{name}: {said}")
    return TokenCase(name, {who: partial(gradients, loss) for who, loss in losses.items()})
