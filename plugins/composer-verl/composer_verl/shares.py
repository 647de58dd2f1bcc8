"""What a spec means in verl's numbers: ranks, shares, generations. Light; the fields they go into are `config.py`'s."""

from __future__ import annotations

from composer_core.spec.model import Plugged, RunSpec
from composer_verl.settings import VerlSettings


def settings_of(spec: RunSpec) -> VerlSettings:
    """The backend's own settings."""
    settings = spec.backend.settings
    assert isinstance(settings, VerlSettings)
    return settings


def ranks(spec: RunSpec) -> int:
    """Processes that train together, on all nodes."""
    return settings_of(spec).processes * settings_of(spec).nodes


def share(spec: RunSpec) -> int:
    """Sequences of one rank in one optimiser step."""
    return spec.train.sequences_per_step // ranks(spec)


def micro_batch(spec: RunSpec) -> int:
    """`train.micro_batch`, or the largest up to 8 that divides the share of a rank."""
    return spec.train.micro_batch or max(d for d in range(1, 9) if share(spec) % d == 0)


def generations(spec: RunSpec) -> int:
    """Of the run: verl's global steps."""
    return spec.train.steps // spec.train.iterations


def needs_reference(spec: RunSpec) -> bool:
    """Whether the objective reads log-probs of the starting model."""
    return float(getattr(objective_of(spec).settings, "kl_coef", 0.0)) > 0


def objective_of(spec: RunSpec) -> Plugged:
    """The objective; only `rollouts: none`, which this backend does not have, may leave it out."""
    objective = spec.loss.objective
    assert objective is not None
    return objective
