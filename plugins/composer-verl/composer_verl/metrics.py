"""verl's metrics under Composer's names; what has no such name stays under `upstream/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "actor/loss": "loss/total",
    "actor/pg_loss": "loss/policy",
    "actor/lr": "learning_rate",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "policy/clip_high",
    "actor/pg_clipfrac_lower": "policy/clip_low",
}
_DROPPED = (
    "perf/mfu",
    "perf/max_memory",
    "global_seqlen/",
    "timing_per_token",
    "training/global_step",
    "training/epoch",
)
"""Beginnings of names that say nothing here: counts of our own, and numbers that need a known GPU."""
_TOKENS = "perf/total_num_tokens"


def translate(upstream: Mapping[str, Any], *, seconds: float, steps: int) -> dict[str, float]:
    """One generation's metrics, for each of its optimiser steps.

    Args:
        upstream: verl's, averages over the steps.
        seconds: the generation took.
        steps: optimiser steps in it.
    """
    metrics = {"step_time": seconds / max(steps, 1)}
    for name, value in upstream.items():
        if name.startswith(_DROPPED) or isinstance(value, dict):
            continue
        metrics[_NAMES.get(name, f"upstream/{name}")] = float(value)
    if _TOKENS in upstream:
        metrics["tokens_per_s"] = float(upstream[_TOKENS]) * steps / seconds
    return metrics
