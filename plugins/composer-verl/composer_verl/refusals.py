"""What verl cannot do for a spec, found when it is planned; what is wrong with options is in `options.py`. Light.

To add a refusal, yield a `Problem` from the function it belongs to: the key, what was asked with its value, the way
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.channels.settings import ReplaySettings, SdpoSettings
from composer_core.errors import Problem
from composer_core.plugins.builtin_settings import ObjectiveSettings
from composer_core.protocols import Aggregation
from composer_core.spec.model import RunSpec
from composer_verl.objectives import aggregation_of
from composer_verl.options import ACTOR
from composer_verl.settings import AHEAD
from composer_verl.shares import micro_batch, needs_reference, objective_of, ranks, settings_of, share


def batch_problems(spec: RunSpec) -> Iterator[Problem]:
    """Steps that fill no whole generations, and sequences that ranks or micro-batches cannot share."""
    train, count, sequences = spec.train, ranks(spec), spec.train.sequences_per_step
    if train.steps % train.iterations:
        yield Problem(
            key="train.steps",
            problem=f"{train.steps} steps are no whole number of generations: each serves {train.iterations} of them "
            "(train.iterations), and verl saves and stops between generations",
            fix=f"a multiple of {train.iterations}, such as {-(-train.steps // train.iterations) * train.iterations}",
        )
    if train.warmup_steps % train.iterations:
        yield Problem(
            key="train.warmup_steps",
            problem=f"verl moves the learning rate once per generation, which is {train.iterations} steps "
            f"(train.iterations), and {train.warmup_steps} is no multiple of it",
            fix=f"a multiple of {train.iterations}",
        )
    if sequences % count:
        yield Problem(
            key="backend.processes",
            problem=f"the {sequences} sequences of a step (prompts_per_step x group_size) cannot be shared equally by "
            f"{count} ranks",
            fix=f"one of {_divisors(sequences)} ranks, or more prompts per step",
        )
        return
    own, micro = share(spec), micro_batch(spec)
    if own % micro:
        whose = "of a step" if count == 1 else f"that each of {count} ranks takes of a step"
        yield Problem(
            key="train.micro_batch",
            problem=f"{micro} does not divide the {own} sequences {whose} (prompts_per_step x group_size)",
            fix=f"one of {_divisors(own)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def train_problems(spec: RunSpec) -> Iterator[Problem]:
    """What its optimiser and its adapters do not have."""
    if spec.train.schedule == "linear":
        yield Problem(
            key="train.schedule",
            problem="verl's learning rate stays constant or falls along a cosine; it has no linear schedule",
            fix="cosine, or constant",
        )
    if spec.model.lora is not None and spec.model.lora.dropout:
        yield Problem(
            key="model.lora.dropout",
            problem=f"verl trains adapters without dropout, got {spec.model.lora.dropout}",
            fix="leave it out",
        )


def advantage_problems(spec: RunSpec) -> Iterator[Problem]:
    """Settings of the objective's own advantages, which an estimator of verl's replaces."""
    advantages, settings = settings_of(spec).advantages, objective_of(spec).settings
    if advantages == "core" or not isinstance(settings, ObjectiveSettings):
        return
    usual = type(settings).model_fields["scale_rewards"].default
    asked = {
        "scale_rewards": settings.scale_rewards != usual,
        "overlong": settings.overlong is not None,
        "length_penalty": settings.length_penalty is not None,
        "kl_estimator": settings.kl_estimator == "k1" and needs_reference(spec),
    }
    for name in (name for name, unread in asked.items() if unread):
        yield Problem(
            key=f"loss.objective.{name}",
            problem="it is part of the core's advantages, and backend.advantages is verl's "
            f"{advantages}, which sees the plain rewards",
            fix="backend.advantages: core",
        )


def topk_problems(spec: RunSpec) -> Iterator[Problem]:
    """Divergences that need more than the teacher's top k, where that is read before the update."""
    if settings_of(spec).topk != AHEAD:
        return
    active = [(i, channel.settings) for i, channel in enumerate(spec.loss.channels) if channel.weight]
    over = [(i, own) for i, own in active if isinstance(own, SdpoSettings) and own.support == "topk"]
    if not over and all(isinstance(own, SdpoSettings | ReplaySettings) for _, own in active):
        yield Problem(
            key="backend.topk",
            problem="batch: no channel learns over a top k",
            fix="leave it out, or give channel sdpo support: topk and side: teacher",
        )
    for i, settings in over:
        asked = {
            "side": (settings.side, settings.side != "teacher"),
            "target": ("taid", settings.target is not None),
            "gate": ("set", settings.gate is not None),
        }
        for name in (name for name, (_, needed) in asked.items() if needed):
            yield Problem(
                key=f"loss.channels[{i}].{name}",
                problem=f"{asked[name][0]}: it needs the student's and the teacher's logits at once, and with "
                "backend.topk: batch the teacher has read the hints before",
                fix="side: teacher, or backend.topk: step" if name == "side" else "leave it out, or backend.topk: step",
            )


def cluster_problems(spec: RunSpec) -> Iterator[Problem]:
    """More machines than a Ray of this run's own has."""
    settings = settings_of(spec)
    if settings.nodes > 1 and settings.ray == "local":
        yield Problem(
            key="backend.nodes",
            problem=f"{settings.nodes} nodes need a Ray cluster that spans them, and backend.ray is local",
            fix="backend.ray: auto on its head node, or its address",
        )


def dynamic_problems(spec: RunSpec, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Micro-batches packed by length have no fixed number of sequences."""
    key = f"{ACTOR}.use_dynamic_bsz"
    if not options.get(key):
        return
    if aggregation_of(objective_of(spec)) is Aggregation.TOKEN_MEAN_LOCAL:
        yield Problem(
            key=f"backend.options.{key}",
            problem=f"{objective_of(spec).name} is a mean within micro-batches, which would then hold any number of "
            "sequences",
            fix="leave it out, or objective dapo, whose mean is over the whole step",
        )
    if spec.train.micro_batch is not None:
        yield Problem(
            key="train.micro_batch",
            problem=f"with {key} verl fills micro-batches by tokens and would not read it",
            fix=f"leave it out; {ACTOR}.ppo_max_token_len_per_gpu says how many tokens",
        )
