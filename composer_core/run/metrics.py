"""metrics.jsonl and rollouts.jsonl: one line per logged step, one per sampled completion.

Names, the same on every backend: `reward/mean`, `reward/std`, `reward/flat_groups` (share of groups whose rewards are
all equal), `loss/total`, `loss/policy`; for each channel
`loss/<name>`, `weight/<name>`, `active/<name>` (share of rows), `grad_norm/<name>`, `tokens/<name>`; `tokens_per_s`,
`step_time` (seconds); upstream's own under `upstream/`; `eval/reward/mean`, `eval/reward/std`, `eval/rewards/<name>` in
the lines of steps after which held-out prompts were tried. Every line has `step` and `time` (seconds since 1970).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_core.run.context import RolloutSample
from composer_core.run.files import JsonLines

REWARD = "reward/mean"
REWARD_STD = "reward/std"
LOSS = "loss/total"
POLICY_LOSS = "loss/policy"
FLAT_GROUPS = "reward/flat_groups"
TOKENS_PER_S = "tokens_per_s"
STEP_TIME = "step_time"


class MetricsLog:
    """Writes metrics.jsonl. A line costs one system call and no flush to the disk: some microseconds a step."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; NaN and infinite values become null and their names are listed under `nonfinite`."""
        line: dict[str, Any] = {"step": step, "time": time.time()}
        nonfinite = []
        for name, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            line[name] = number if math.isfinite(number) else None
            if line[name] is None:
                nonfinite.append(name)
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._lines.write(line)

    def close(self) -> None:
        """Release the file."""
        self._lines.close()


class RolloutLog:
    """Writes rollouts.jsonl: `{step, time, prompt, completion, rewards, advantage}` per sampled completion."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Append one line per sample."""
        for sample in samples:
            facts = asdict(sample)
            facts["rewards"] = {name: _finite(score) for name, score in sample.rewards.items()}
            facts["advantage"] = _finite(sample.advantage)
            self._lines.write({"step": step, "time": time.time(), **facts})

    def close(self) -> None:
        """Release the file."""
        self._lines.close()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def reward_metrics(totals: Sequence[float], groups: Sequence[int]) -> dict[str, float]:
    """Metrics under `reward/` of a generation: each completion's weighted sum, NaN where no reward applied to it, and
    which group it belongs to.
    """
    own: dict[int, list[float]] = {group: [] for group in groups}
    for total, group in zip(totals, groups, strict=True):
        own[group] += [] if math.isnan(total) else [total]
    present = [total for members in own.values() for total in members]
    return {
        REWARD: statistics.fmean(present) if present else math.nan,
        REWARD_STD: _std(present),
        FLAT_GROUPS: sum(_std(members) == 0 for members in own.values()) / len(own),
    }


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def eval_metrics(scores: Mapping[str, Sequence[float | None]], totals: Sequence[float]) -> dict[str, float]:
    """Metrics under `eval/` from each reward's scores and their weighted sums, one per completion.

    A score that does not apply (None, NaN) is left out of its mean; a mean of nothing is NaN.
    """
    present = [total for total in totals if not math.isnan(total)]
    metrics = {
        "eval/reward/mean": statistics.fmean(present) if present else math.nan,
        "eval/reward/std": _std(present),
    }
    for name, values in scores.items():
        applied = [value for value in values if value is not None and not math.isnan(value)]
        metrics[f"eval/rewards/{name}"] = statistics.fmean(applied) if applied else math.nan
    return metrics


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, from the lines that have it; a non-finite value is NaN."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [math.nan if value is None else value for _, value in found]


def ends(lines: Sequence[Mapping[str, Any]], name: str, *, n: int = 5) -> tuple[float | None, float | None]:
    """Mean of the first n and of the last n finite values; None where there is none."""
    values = [value for value in series(lines, name)[1] if math.isfinite(value)]
    if not values:
        return None, None
    return sum(values[:n]) / len(values[:n]), sum(values[-n:]) / len(values[-n:])
