"""GRPOConfig for a named objective, for scripts that use the trainer without a spec."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from trl import GRPOConfig

from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_trl.objectives import NATIVE, SEQUENCE_LEVEL_TYPES, config_fields

PO_OBJECTIVES: dict[str, dict[str, Any]] = {name: config_fields(name, OBJECTIVE_SETTINGS[name]()) for name in NATIVE}
"""Objective -> the GRPOConfig fields that make it, with its paper's defaults."""


def make_po_config(objective: str = "dr-grpo", **overrides: Any) -> GRPOConfig:
    """Build a GRPOConfig for a policy objective.

    Args:
        objective: a key of `PO_OBJECTIVES`; underscores are read as hyphens.
        overrides: any GRPOConfig field; they win over the objective's own.

    Raises:
        ValueError: unknown objective, or a combination that would silently compute something else.
        RuntimeError: a field did not keep the value it was given: this trl is not the one the table was made for.

    Example::

        args = make_po_config("dapo", output_dir="out", learning_rate=2e-6)
    """
    name = objective.replace("_", "-")
    if name not in PO_OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; one of {', '.join(sorted(PO_OBJECTIVES))}")
    wanted = PO_OBJECTIVES[name] | overrides
    refuse_traps(wanted)
    config = GRPOConfig(**wanted)
    own = {key: wanted[key] for key in PO_OBJECTIVES[name]}
    drifted = {key: getattr(config, key) for key, value in own.items() if getattr(config, key) != value}
    if drifted:
        raise RuntimeError(f"trl {version('trl')} changed {drifted} of {name}; asked for {own}")
    return config


def refuse_traps(fields: dict[str, Any]) -> None:
    """Raise ValueError for combinations that TRL accepts and that are not what their names say."""
    loss_type, level = fields.get("loss_type"), fields.get("importance_sampling_level")
    if level == "sequence" and loss_type not in SEQUENCE_LEVEL_TYPES:
        raise ValueError(
            f"importance_sampling_level='sequence' with loss_type={loss_type!r} weights each sequence by its length; "
            f"it goes with {', '.join(sorted(SEQUENCE_LEVEL_TYPES))} only"
        )
    if level == "token" and loss_type == "luspo":
        raise ValueError("loss_type='luspo' is defined for importance_sampling_level='sequence'")
    cap = fields.get("epsilon_high")
    if loss_type == "cispo" and (cap is None or cap < 1):
        raise ValueError(
            f"cispo: epsilon_high is the absolute cap of the ratio in TRL, so {cap} would scale every on-policy "
            "gradient down; use 5.0, or 1 + your relative epsilon"
        )
