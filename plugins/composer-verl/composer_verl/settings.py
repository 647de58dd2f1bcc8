"""What the `backend` block of a spec may hold for `use: verl`. Light: verl is never imported here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from composer_core.plugins.settings import Settings

CORE = "core"
"""The objective's own advantages."""
AHEAD = "batch"
"""Teachers read before the optimiser steps on a batch."""
Estimator = Literal[
    "core",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "grpo_vectorized",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]


class VerlSettings(Settings):
    """verl takes its numbers from `train:`; what is left goes through untouched."""

    processes: int = Field(1, ge=1)
    """Ranks on each node that share the model and each step: one for each GPU; on a machine without GPUs they talk
    through gloo."""
    nodes: int = Field(1, ge=1)
    """Machines of the Ray cluster that train together, each with `processes` ranks."""
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    """Who samples: `hf` is composer-verl's own server on transformers, which runs on any machine; the others are fast,
    need GPUs, and must be installed beside verl."""
    ray: str = Field("local", min_length=1)
    """`local`: a Ray cluster of this run's own on this machine, started and stopped with it. Or the address of one that
    runs already: `auto`, `host:6379`, `ray://host:10001`."""
    advantages: Estimator = "core"
    """Who compares rewards: `core` is `loss.objective` with its `scale_rewards` and penalties. Any other is verl's
    estimator of that name in place of those; it sees the plain rewards. verl's own `grpo` is not among them: it gives
    all of a rollout's tokens what it finds at the first, and `core` does what is meant by it."""
    topk: Literal["step", "batch"] = "step"
    """When the teacher of a divergence over its top k (`support: topk, side: teacher`) reads the hints. `step`: beside
    each training forward, with the newest weights. `batch`: once, before the optimiser steps on a batch of rollouts; no
    teacher's logits stand beside the student's then, and a live or ema teacher stays one batch old for all its steps.
    Other sides, `target` and `gate` need the logits of both at once, so `step`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keys of verl's configuration, dotted or nested, checked against the installed version:
    `actor_rollout_ref.rollout.gpu_memory_utilization: 0.6`. A key that another part of the spec decides is refused with
    the key to use instead."""
