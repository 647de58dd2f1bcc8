"""Which objectives GRPOTrainer computes itself, and by which GRPOConfig fields. No trl import.

One row per objective; how a settings model turns into fields depends on its clip rule only. Checked against trl 1.16.0:
`epsilon_high` of CISPO is TRL's absolute cap, `beta` is the weight of a k3 KL that TRL multiplies with the importance
ratio (`use_bias_correction_kl`), and the divisor of `dr_grpo` is sequences x `max_completion_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_core.errors import Problem, SpecError
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import (
    CispoSettings,
    ClipSettings,
    ObjectiveSettings,
    SapoSettings,
    VespoSettings,
)
from composer_core.plugins.settings import Settings
from composer_core.spec.model import Plugged


@dataclass(frozen=True)
class Native:
    """TRL's name for an objective."""

    loss_type: str
    level: str = "token"
    """`importance_sampling_level`."""


NATIVE: dict[str, Native] = {
    "grpo": Native("grpo"),
    "dr-grpo": Native("dr_grpo"),
    "bnpo": Native("bnpo"),
    "dapo": Native("dapo"),
    "gspo": Native("grpo", level="sequence"),
    "cispo": Native("cispo"),
    "sapo": Native("sapo"),
    "vespo": Native("vespo"),
    "luspo": Native("luspo", level="sequence"),
}


def is_native(block: Plugged) -> bool:
    """Whether GRPOTrainer computes this objective of a spec itself; a third party's of the same name is another one."""
    return block.name in NATIVE and block.owner.split()[0] in ("composer-core", "composer-trl")


SEQUENCE_LEVEL_TYPES = frozenset(native.loss_type for native in NATIVE.values() if native.level == "sequence")
"""With any other type TRL would weight each sequence by its length: neither paper's objective."""


def _ppo(settings: ClipSettings) -> dict[str, Any]:
    return {"epsilon": settings.epsilon, "epsilon_high": settings.epsilon_high, "delta": settings.delta}


def _cispo(settings: CispoSettings) -> dict[str, Any]:
    return {"epsilon_high": settings.epsilon_high}


def _sapo(settings: SapoSettings) -> dict[str, Any]:
    return {
        "sapo_temperature_pos": settings.temperature_positive,
        "sapo_temperature_neg": settings.temperature_negative,
    }


def _vespo(settings: VespoSettings) -> dict[str, Any]:
    return {
        "vespo_k_pos": settings.k_positive,
        "vespo_lambda_pos": settings.lambda_positive,
        "vespo_k_neg": settings.k_negative,
        "vespo_lambda_neg": settings.lambda_negative,
    }


_CLIP_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}


_SERVED: dict[str, frozenset[str]] = {
    "ppo": frozenset({"epsilon", "epsilon_high", "delta"}),
    "cispo": frozenset({"epsilon_high"}),
    "sapo": frozenset({"temperature_positive", "temperature_negative"}),
    "vespo": frozenset({"k_positive", "lambda_positive", "k_negative", "lambda_negative"}),
}
"""Settings that the functions above turn into fields, beside those that `config_fields` does itself."""


def config_fields(objective: str, settings: ObjectiveSettings) -> dict[str, Any]:
    """GRPOConfig fields of one of the `NATIVE` objectives.

    Raises:
        SpecError: a setting that the trainer's own code does not have.
    """
    problems = _unserved(objective, settings)
    if problems:
        raise SpecError(problems)
    native = NATIVE[objective]
    return {
        "loss_type": native.loss_type,
        "importance_sampling_level": native.level,
        "scale_rewards": settings.scale_rewards,
        "beta": settings.kl_coef,
        "mask_truncated_completions": settings.drop_truncated,
        **_CLIP_FIELDS[PRESETS[objective].clip](settings),
    }


OWN_LOSS_ONLY: dict[str, tuple[Any, ...]] = {
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (None,),
    "use_bias_correction_kl": (True,),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "router_aux_loss_coef": (None, 0.0),
}
"""GRPOConfig fields that nothing but TRL's own loss and advantages reads -> the values that ask for nothing."""


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """Which of these GRPOConfig fields would do nothing, because the core computes the objective."""
    return [name for name, idle in OWN_LOSS_ONLY.items() if name in fields and fields[name] not in idle]


def core_fields(objective: str, settings: Settings) -> dict[str, Any]:
    """GRPOConfig fields under which the trainer feeds an objective of the core's: its loss and advantages are not used.

    Raises:
        SpecError: a setting that needs what the trainer does not have.
    """
    problems = [
        Problem(
            key=f"loss.objective.{name}",
            problem=f"{objective} needs the sampler's log-probs for it, and trl's own generation gives none",
            fix="leave it out",
        )
        for name in ("rollout_correction", "off_policy_threshold")
        if getattr(settings, name, None) is not None
    ]
    if problems:
        raise SpecError(problems)
    return {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "beta": float(getattr(settings, "kl_coef", 0.0)),  # for the reference's log-probs
        "mask_truncated_completions": bool(getattr(settings, "drop_truncated", False)),
    }


def _unserved(objective: str, settings: ObjectiveSettings) -> list[Problem]:
    """Settings away from their default that would otherwise be ignored, or that TRL would read differently."""
    served = _SERVED[PRESETS[objective].clip] | {"scale_rewards", "kl_coef", "drop_truncated"}
    left_out = [
        name
        for name, field in type(settings).model_fields.items()
        if name not in served and getattr(settings, name) != field.default
    ]
    if settings.scale_rewards == "mean":
        left_out.append("scale_rewards")
    return [
        Problem(
            key=f"loss.objective.{name}",
            problem=f"TRL computes {objective} with its own code, which does not have this",
            fix="leave it out, or use a backend that runs the core's objectives",
        )
        for name in left_out
    ]
