"""What came of the runs: one outcome per arm and seed, what it cost up to the goal, medians, and the targets.

A run's reward is measured exactly every few steps (`conduct.py`); `steps_to` is the first such step, and a run that
never gets there counts as infinitely many, so a median stays what it says. Costs come from the run's own metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from task import Measured

GOAL, HALF_WAY = 0.8, 0.5
GRPO = ("grpo-2e-4", "grpo-4e-4")
"""The arms without channels; others are compared with the better of them."""


@dataclass(frozen=True)
class Costs:
    """What a run took up to the goal, or up to its last step."""

    generated_tokens: int
    forward_tokens: int
    """Read by policy, reference and teacher in the loss; generation is apart."""
    teacher_answers: int
    """Asked of the scripted teacher before the run."""
    seconds: float
    """Of optimiser steps, rollouts included; start-up, checkpoints and measuring are left out."""


@dataclass(frozen=True)
class Outcome:
    """One arm on one seed."""

    arm: str
    seed: int
    fingerprint: str
    """Of the spec that ran."""
    curve: Sequence[tuple[int, float]]
    """(step, expected reward of the secret keys), from step 0 on."""
    before: Measured
    after: Measured
    """At the goal, or at the last step."""
    costs: Costs

    def steps_to(self, reward: float) -> float:
        """The first measured step with this reward; infinite where there is none."""
        return next((step for step, reached in self.curve if reached >= reward), math.inf)

    @property
    def best(self) -> float:
        """The highest reward."""
        return max(reward for _, reward in self.curve)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """What `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data |= {name: Measured(**data[name]) for name in ("before", "after")}
        curve = [(step, reward) for step, reward in data["curve"]]
        return cls(**{**data, "curve": curve, "costs": Costs(**data["costs"])})


@dataclass(frozen=True)
class Sizes:
    """Lengths, in tokens, that a run's metrics do not say."""

    prompt: int
    hint: float
    """Mean over the hints of the run's column, with what surrounds it in the prompt."""
    sequences: int
    """Rollouts in a step."""
    pairs: int
    """In a step."""
    sides: int
    """Of a pair that are read: 2, or 1 for imitation."""
    kl: bool
    """Whether the reference reads the rollouts."""


def costs_of(metrics: Sequence[Mapping[str, Any]], sizes: Sizes, *, teacher_answers: int) -> Costs:
    """Costs of the steps in `metrics`, lines of metrics.jsonl, one per step.

    The policy reads prompts and completions, and so does the reference for the KL; the teacher reads each hinted
    rollout with its hint; pairs are read by the policy alone, as their reference log-probs are stored.
    """
    generated = forward = 0.0
    for line in metrics:
        completions = line["upstream/completions/mean_length"] * sizes.sequences
        generated += completions
        forward += (2 if sizes.kl else 1) * (sizes.sequences * sizes.prompt + completions)
        hinted = line.get("active/sdpo", 0.0) * sizes.sequences
        forward += hinted * (sizes.prompt + sizes.hint) + (line["tokens/sdpo"] if hinted else 0.0)
        pairs = line.get("active/replay", 0.0) * sizes.pairs
        forward += sizes.sides * (pairs * sizes.prompt + (line["tokens/replay"] / 2 if pairs else 0.0))
    seconds = sum(line["step_time"] for line in metrics)
    return Costs(round(generated), round(forward), teacher_answers, round(seconds, 1))


# -- medians and targets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One arm's line of the table; each figure a median over seeds."""

    arm: str
    seeds: int
    half_way: float
    goal: float
    goals: Sequence[float]
    """Steps to the goal of each seed, sorted."""
    ratio: float
    """`goal` against the better arm of GRPO; NaN where there is none."""
    best: float
    generated_tokens: float
    forward_tokens: float
    teacher_answers: float
    seconds: float
    known: float
    follows_before: float
    follows: float


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One per arm, in order of first appearance."""
    arms = dict.fromkeys(outcome.arm for outcome in outcomes)
    return [_row(arm, [o for o in outcomes if o.arm == arm], baseline(outcomes)) for arm in arms]


def baseline(outcomes: Sequence[Outcome]) -> float:
    """Median steps to the goal of GRPO's better learning rate; NaN where it was not run."""
    return min((_median_goal(outcomes, arm) for arm in GRPO if any(o.arm == arm for o in outcomes)), default=math.nan)


def _row(arm: str, mine: Sequence[Outcome], against: float) -> Row:
    goal = _median_goal(mine, arm)

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    return Row(
        arm=arm,
        seeds=len(mine),
        half_way=middle([o.steps_to(HALF_WAY) for o in mine]),
        goal=goal,
        goals=sorted(o.steps_to(GOAL) for o in mine),
        ratio=goal / against,
        best=middle([o.best for o in mine]),
        generated_tokens=middle([o.costs.generated_tokens for o in mine]),
        forward_tokens=middle([o.costs.forward_tokens for o in mine]),
        teacher_answers=middle([o.costs.teacher_answers for o in mine]),
        seconds=middle([o.costs.seconds for o in mine]),
        known=middle([o.after.known for o in mine]),
        follows_before=middle([o.before.follows for o in mine]),
        follows=middle([o.after.follows for o in mine]),
    )


def _median_goal(outcomes: Sequence[Outcome], arm: str) -> float:
    return statistics.median(o.steps_to(GOAL) for o in outcomes if o.arm == arm)


@dataclass(frozen=True)
class Check:
    """A target and what was found."""

    says: str
    found: str
    met: bool


def checks(outcomes: Sequence[Outcome]) -> list[Check]:
    """The targets whose arms were run, all against GRPO's better learning rate."""
    against, arms = baseline(outcomes), {outcome.arm for outcome in outcomes}
    made: list[Check] = []
    if math.isnan(against):
        return made
    for arm, most in (("sdpo", 0.5), ("replay", 0.5), ("half-all", 0.6)):
        if arm in arms:
            ratio = _median_goal(outcomes, arm) / against
            made.append(Check(f"{arm}: median steps <= {most:g}x", times(ratio), ratio <= most))
    for arm in ("sdpo", "replay"):
        if arm in arms:
            made.append(_per_seed(outcomes, arm, most=0.65))
    for arm in ("wrong-hint", "void-hint"):
        if arm in arms:
            ratio = _median_goal(outcomes, arm) / against
            made.append(Check(f"{arm}: median steps not below 0.9x", times(ratio), ratio >= 0.9))
    return made


def times(ratio: float) -> str:
    """Steps against GRPO's, for reading; where one side never got to the goal there is no figure."""
    if math.isnan(ratio):
        return "neither got there"
    return "never" if math.isinf(ratio) else f"{ratio:.2f}x" if ratio else "GRPO never"


def _per_seed(outcomes: Sequence[Outcome], arm: str, *, most: float) -> Check:
    """Each seed against GRPO's better rate on that very seed."""
    ratios = []
    for mine in (o for o in outcomes if o.arm == arm):
        theirs = [o.steps_to(GOAL) for o in outcomes if o.arm in GRPO and o.seed == mine.seed]
        ratios.append(mine.steps_to(GOAL) / min(theirs) if theirs else math.inf)
    below = sum(ratio < most for ratio in ratios)
    found = f"{below} of {len(ratios)}: " + ", ".join(map(times, sorted(ratios)))
    says = f"{arm}: at least 4 seeds in 5 below {most:g}x of GRPO on the same seed"
    return Check(says, found, 5 * below >= 4 * len(ratios))
