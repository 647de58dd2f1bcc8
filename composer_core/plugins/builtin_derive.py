"""What the core's own backend makes of a spec, and what it refuses, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer_core.errors import Problem, SpecError
from composer_core.plugins.contributions import Derived

if TYPE_CHECKING:
    from composer_core.spec.model import RunSpec


def derive_toy(spec: RunSpec) -> Derived:
    """The toy trainer's numbers.

    Raises:
        SpecError: the spec asks for something that this trainer leaves out.
    """
    train = spec.train
    left_out = {
        "model.lora": spec.model.lora is not None,
        "train.top_p": train.top_p != 1,
        "train.top_k": train.top_k != 0,
        "train.schedule": train.schedule != "constant",
        "train.warmup_steps": train.warmup_steps != 0,
        "train.gradient_checkpointing": train.gradient_checkpointing,
    }
    problems = [
        Problem(key=key, problem="the toy trainer does not have this", fix="leave it out, or use another backend")
        for key, asked in left_out.items()
        if asked
    ]
    problems += _share_problems(spec)
    if problems:
        raise SpecError(problems)
    numbers = {
        "sequences per step": train.sequences_per_step,
        "micro-batch (sequences)": train.micro_batch_size,
        "optimiser steps per generation": train.iterations,
    }
    return Derived(numbers=numbers)


def _share_problems(spec: RunSpec) -> Iterator[Problem]:
    """Its ranks share whole prompts."""
    processes = spec.backend.settings.model_dump()["processes"]
    prompts, sequences = spec.train.prompts_per_step, spec.train.sequences_per_step
    if prompts % processes and sequences % processes == 0:  # the plan has refused what no trainer can share
        yield Problem(
            key="train.prompts_per_step",
            problem=f"{prompts} prompts cannot be shared equally by {processes} processes",
            fix=f"a multiple of {processes}",
        )
