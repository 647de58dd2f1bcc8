"""Which objectives verl computes itself, and by which fields of its actor. No verl import.

One row per objective. A row stands here only where verl's loss is numerically the core's, in value and gradient, for
every setting that its function turns into fields; any other setting sends the objective to the core's code, which runs
under verl as the registered policy loss `composer_<name>`. Checked against verl 0.9.1:

- `vanilla` always clips dually. Both sides clamp log-ratios at 20, so a bound above e^20 is none.
- `cispo` clips from both sides around 1; a lower distance of 1 is no lower bound.
- `dppo_*` reads its cap of the ratio from `clip_ratio_c`, whose default of 3 is meant for `vanilla`.
- Left out: `gspo`, where verl clamps the log of a sequence's ratio at 10 and the core at 20 (also behind `gspo-token`
  and `luspo`), `gmpo`, which verl averages over a micro-batch alone, and `bnpo`, a local mean that verl does not have.

To add one: a function from its settings to fields, a row, and nothing else; the parity test takes it from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import CispoSettings, ClipSettings, DppoSettings, SapoSettings
from composer_core.plugins.settings import Settings
from composer_core.protocols import Aggregation
from composer_core.spec.model import Plugged

NO_DUAL_CLIP = 1e9
"""Above e^20, the largest ratio there is after the clamp."""

AGGREGATIONS: Mapping[Aggregation, str] = {
    Aggregation.TOKEN_MEAN: "token-mean",
    Aggregation.TOKEN_MEAN_LOCAL: "token-mean",
    Aggregation.SEQUENCE_MEAN: "seq-mean-token-mean",
    Aggregation.SEQUENCE_SUM: "seq-mean-token-sum",
    Aggregation.CONSTANT: "seq-mean-token-sum-norm",
}
"""verl's `loss_agg_mode`. Where the core computes the objective, verl still averages its entropy by it, and there the
local mean is logged as a global one."""


@dataclass(frozen=True)
class Native:
    """How verl is told to compute an objective."""

    fields: Callable[[Any], Mapping[str, Any]]
    """From the settings to fields of the actor, `policy_loss.loss_mode` among them."""
    served: frozenset[str]
    """Settings of the clip rule that these fields carry."""


def _vanilla(settings: ClipSettings) -> Mapping[str, Any]:
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return {
        "policy_loss.loss_mode": "vanilla",
        "clip_ratio": settings.epsilon,
        "clip_ratio_low": settings.epsilon,
        "clip_ratio_high": high,
        "clip_ratio_c": NO_DUAL_CLIP if settings.dual_clip is None else settings.dual_clip,
    }


def _cispo(settings: CispoSettings) -> Mapping[str, Any]:
    return {
        "policy_loss.loss_mode": "cispo",
        "clip_ratio_low": 1.0,
        "clip_ratio_high": settings.epsilon_high - 1,  # the spec's is the cap itself, verl's a distance from 1
    }


def _sapo(settings: SapoSettings) -> Mapping[str, Any]:
    return {
        "policy_loss.loss_mode": "sapo",
        "tau_pos": settings.temperature_positive,
        "tau_neg": settings.temperature_negative,
    }


def _dppo(settings: DppoSettings) -> Mapping[str, Any]:
    return {
        "policy_loss.loss_mode": f"dppo_{settings.measure}",
        "clip_ratio": settings.epsilon,
        "clip_ratio_low": settings.epsilon,
        "clip_ratio_high": settings.epsilon_high,
        "clip_ratio_c": settings.cap,
    }


VANILLA = Native(_vanilla, frozenset({"epsilon", "epsilon_high", "dual_clip"}))

NATIVE: Mapping[str, Native] = {
    "grpo": VANILLA,
    "dr-grpo": VANILLA,
    "dapo": VANILLA,
    "maxrl": VANILLA,
    "composer2": VANILLA,
    "cispo": Native(_cispo, frozenset({"epsilon_high"})),
    "sapo": Native(_sapo, frozenset({"temperature_positive", "temperature_negative"})),
    "dppo": Native(_dppo, frozenset({"measure", "epsilon", "epsilon_high", "cap"})),
}

OUTSIDE = frozenset({"scale_rewards", "drop_truncated", "overlong", "length_penalty"})
"""Settings that act on rewards or on the mask, before any policy loss is computed."""
IDLE = frozenset({"kl_estimator", "kl_corrected"})
"""Settings that say nothing while `kl_coef` is 0."""


def is_native(block: Plugged) -> bool:
    """Whether verl computes this objective of a spec itself, with these settings.

    A third party's objective of the same name is another one.
    """
    return block.owner.split()[0] == "composer-core" and serves(block.name, block.settings)


def serves(objective: str, settings: Settings) -> bool:
    """Whether verl's own loss of an objective of the core has all that these settings ask for."""
    if objective not in NATIVE:
        return False
    carried = NATIVE[objective].served | OUTSIDE | IDLE
    asked = {name: getattr(settings, name) for name in type(settings).model_fields if name not in carried}
    return all(value in (None, 0.0) for value in asked.values())  # what is left does nothing at 0 or none


def loss_fields(block: Plugged, *, max_completion_tokens: int) -> dict[str, Any]:
    """Fields of verl's actor under which it computes an objective, or asks the core for it, as dotted keys."""
    aggregation = aggregation_of(block)
    fields: dict[str, Any] = {
        "loss_agg_mode": AGGREGATIONS[aggregation],
        "loss_scale_factor": max_completion_tokens if aggregation is Aggregation.CONSTANT else None,
        "use_kl_loss": False,  # the core's KL stands in its own loss or in the rewards
    }
    if is_native(block):
        return {**fields, **NATIVE[block.name].fields(block.settings)}
    return {**fields, "policy_loss.loss_mode": policy_loss_name(block.name)}


def aggregation_of(block: Plugged) -> Aggregation:
    """How an objective of the core averages; of another, which no spec tells, the mean over tokens stands in."""
    preset = PRESETS.get(block.name) if block.owner.split()[0] == "composer-core" else None
    return Aggregation.TOKEN_MEAN if preset is None else preset.aggregation


def policy_loss_name(objective: str) -> str:
    """Under which the core's code of an objective is registered with verl."""
    return f"composer_{objective}"
