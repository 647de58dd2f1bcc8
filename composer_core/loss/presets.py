"""Published policy objectives as rows of one table; `policy.py` computes any row, a backend maps the rows it knows.

No torch here: a spec is checked against this table. To add an objective that the existing rules can express, add a
row; a new clip rule is a function in `clip.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_core.protocols import Aggregation

Ratio = Literal["token", "sequence", "sequence-token"]
"""Of the token; the geometric mean over its sequence; that mean as a value with the gradient of the token."""
Clip = Literal["ppo", "cispo", "sapo", "vespo", "gmpo", "dppo"]
Scale = Literal["group", "batch", "none", "mean"]
Estimator = Literal["k1", "k2", "k3", "k3-straight-through"]
Measure = Literal["tv", "kl"]
CorrectionLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class Preset:
    """One published objective: importance ratio x clip rule x aggregation, with its paper's defaults."""

    name: str
    paper: str
    summary: str
    ratio: Ratio
    clip: Clip
    aggregation: Aggregation
    scale: Scale
    """What group-centred rewards are divided by: the group's standard deviation, the batch's, nothing, or the group's
    mean."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: the same as epsilon. For `cispo` it is the ABSOLUTE cap of the ratio, not a distance from 1."""
    drops_truncated: bool = False
    """Leave completions that hit the length limit out of the loss."""
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    """k1 stands in the reward, the others in the loss."""
    penalises_length: bool = False
    """Composer's length penalty in the reward."""


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "grpo", "2402.03300", "PPO clip, group-normalised advantages, mean of sequence means",
            "token", "ppo", Aggregation.SEQUENCE_MEAN, "group",
        ),
        Preset(
            "dr-grpo", "2503.20783", "GRPO without length and standard-deviation bias",
            "token", "ppo", Aggregation.CONSTANT, "none",
        ),
        Preset(
            "bnpo", "2506.02864", "PPO clip, token mean within each micro-batch",
            "token", "ppo", Aggregation.TOKEN_MEAN_LOCAL, "group",
        ),
        Preset(
            "dapo", "2503.14476", "PPO clip with a higher upper bound, token mean over the whole step",
            "token", "ppo", Aggregation.TOKEN_MEAN, "group", epsilon_high=0.28, drops_truncated=True,
        ),
        Preset(
            "gspo", "2507.18071", "PPO clip on the sequence's geometric-mean ratio",
            "sequence", "ppo", Aggregation.SEQUENCE_MEAN, "group", epsilon=3e-4, epsilon_high=4e-4,
        ),
        Preset(
            "gspo-token", "2507.18071", "GSPO's ratio with each token's own gradient, for advantages per token",
            "sequence-token", "ppo", Aggregation.SEQUENCE_MEAN, "group", epsilon=3e-4, epsilon_high=4e-4,
        ),
        Preset(
            "gmpo", "2507.20673", "Geometric mean of token ratios, each clipped in log space",
            "token", "gmpo", Aggregation.SEQUENCE_MEAN, "group", epsilon=0.4, epsilon_high=0.4,
        ),
        Preset(
            "cispo", "2506.13585", "REINFORCE weighted by the detached, capped ratio: no token is dropped",
            "token", "cispo", Aggregation.TOKEN_MEAN, "group", epsilon_high=5.0,
        ),
        Preset(
            "dppo", "2602.04879", "REINFORCE that leaves out tokens whose probability moved too far",
            "token", "dppo", Aggregation.TOKEN_MEAN, "group",
        ),
        Preset(
            "sapo", "2511.20347", "Sigmoid instead of a hard clip, softer for positive advantages",
            "token", "sapo", Aggregation.SEQUENCE_MEAN, "group",
        ),
        Preset(
            "vespo", "2602.10693", "REINFORCE weighted by a gamma density of the whole sequence's ratio",
            "token", "vespo", Aggregation.TOKEN_MEAN, "group",
        ),
        Preset(
            "luspo", "2602.05261", "GSPO with sequences weighted by their length",
            "sequence", "ppo", Aggregation.SEQUENCE_SUM, "group",
        ),
        Preset(
            "maxrl", "2602.02710", "Advantages over the group's success rate: hard prompts count more",
            "token", "ppo", Aggregation.TOKEN_MEAN, "mean",
        ),
        Preset(
            "composer2", "2603.24477", "Dr. GRPO with the KL (k1) and a length penalty in the reward",
            "token", "ppo", Aggregation.CONSTANT, "none",
            kl_coef=1e-3, kl_estimator="k1", penalises_length=True,
        ),
    )
}  # fmt: skip
