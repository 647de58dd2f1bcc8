"""TRL's log entries under Composer's names; what has no such name stays under `upstream/`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

OWN = "composer:"
"""In front of what we put into trl's log: the rest of the name is ours already."""

_NAMES = {
    "loss": "loss/total",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/flat_groups",
    "step_time": "step_time",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "policy/kl",
    "clip_ratio/low_mean": "policy/clip_low",
    "clip_ratio/high_mean": "policy/clip_high",
    "cispo_clip_ratio": "policy/clip_high",
}


@dataclass
class MetricNames:
    """Translates consecutive log entries of one training run."""

    tokens: float = 0.0
    """Seen so far; a run that goes on begins with those of its checkpoint."""
    _time: float = field(default_factory=time.perf_counter)

    def translate(self, logs: Mapping[str, float | None]) -> dict[str, float]:
        """One log entry; `tokens_per_s` counts trained tokens (prompts included) since the last one."""
        now = time.perf_counter()
        metrics = {_name(name): value for name, value in logs.items() if value is not None}
        tokens = logs.get("num_tokens")
        if tokens is not None:
            metrics["tokens_per_s"] = (tokens - self.tokens) / (now - self._time)
            self.tokens = tokens
        self._time = now
        if "loss/total" in metrics and not any(name.startswith(OWN) for name in logs):
            metrics["loss/policy"] = metrics["loss/total"]  # without channels the policy loss is all there is
        return metrics


def _name(logged: str) -> str:
    return logged.removeprefix(OWN) if logged.startswith(OWN) else _NAMES.get(logged, f"upstream/{logged}")
