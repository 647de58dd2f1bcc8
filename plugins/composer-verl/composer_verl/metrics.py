"""verl's metrics under Composer's names; what has no such name stays under `upstream/`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
_EXTREME = re.compile(r"[/_](max|min)$")
"""Ends the names of extremes, whose mean would hide what they are there to show."""
_SUMS: Mapping[str, Any] = {"max": max, "min": min, "": statistics.fmean}
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


def summed_up(lines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Several steps' metrics as one line: means, and the extreme of what verl gives as an extreme."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in line.items():
            values[name].append(value)
    return {name: _SUMS[_kind(name)](own) for name, own in values.items()}


def _kind(name: str) -> str:
    found = _EXTREME.search(name)
    return found[1] if found else ""
