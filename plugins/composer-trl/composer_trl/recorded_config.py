"""From a spec with `rollouts: none` to the numbers of `transformers.TrainingArguments`. Light, as `config.py`.

    recorded rows per step = prompts_per_step        per_device_train_batch_size = micro_batch
    gradient_accumulation_steps = rows of a process per step / micro_batch

Preference pairs come on top: those of a step are dealt out over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import Problem, SpecError
from composer_core.plugins.contributions import Derived
from composer_core.spec.model import RunSpec
from composer_trl import config
from composer_trl.config import TRAINING_ARGUMENTS, fields_in, option_problems, train_fields
from composer_trl.processes import process_problems, processes

BY_SEED = "nothing: rows come in an order of their own, by seed"
OWNED: Mapping[str, str] = {
    "train_sampling_strategy": BY_SEED,
    "dataloader_drop_last": BY_SEED,
    "ignore_data_skip": BY_SEED,
    "label_smoothing_factor": "loss.objective.label_smoothing",
}
"""Fields that only mean something here -> the key of the spec that decides them."""


def derive_recorded(spec: RunSpec) -> Derived:
    """The trainer's configuration for a spec without rollouts.

    Raises:
        SpecError: a micro-batch that does not divide the rows of a process, or an option that is unknown, owned or
            mistyped.
        MissingError: options are given and transformers is not installed.
    """
    options = spec.backend.settings.model_dump()["options"]
    problems = [
        *_batch_problems(spec),
        *process_problems(spec, options),
        *option_problems(options, "transformers.TrainingArguments", _fields, owned={**config.OWNED, **OWNED}),
    ]
    if problems:
        raise SpecError(problems)
    upstream = {**_batch_fields(spec), **train_fields(spec), "report_to": "none", **options}
    return Derived(numbers=_numbers(spec), upstream=upstream, notes=tuple(_notes(spec)))


def _fields() -> dict[str, str]:
    return fields_in(TRAINING_ARGUMENTS)


def rows_per_process(spec: RunSpec) -> int:
    """Recorded rows of one process in one optimiser step."""
    return spec.train.prompts_per_step // processes(spec)


def micro_batch(spec: RunSpec) -> int:
    """`train.micro_batch`, or the largest up to 8 that divides the rows of a process."""
    return spec.train.micro_batch or max(d for d in range(1, 9) if rows_per_process(spec) % d == 0)


def _batch_fields(spec: RunSpec) -> Mapping[str, Any]:
    return {
        "per_device_train_batch_size": micro_batch(spec),
        "gradient_accumulation_steps": rows_per_process(spec) // micro_batch(spec),
        "max_steps": spec.train.steps,
        "remove_unused_columns": False,
    }


def _batch_problems(spec: RunSpec) -> Iterator[Problem]:
    own, micro = rows_per_process(spec), micro_batch(spec)
    if spec.train.prompts_per_step % processes(spec) or own % micro == 0:
        return  # the plan itself refuses what cannot be shared
    yield Problem(
        key="train.micro_batch",
        problem=f"{micro} does not divide the {own} recorded rows that a process takes of a step",
        fix=f"one of {', '.join(str(d) for d in range(1, own + 1) if own % d == 0)}",
    )


def _numbers(spec: RunSpec) -> Mapping[str, int]:
    rows = {"recorded rows per step": spec.train.prompts_per_step} if spec.data.traces is not None else {}
    pairs = {
        f"rows of channel {block.name} per step": block.settings.pairs_per_step
        for block in spec.loss.channels
        if block.weight and hasattr(block.settings, "pairs_per_step")
    }
    return {
        **rows,
        **pairs,
        "micro-batch (recorded rows)": micro_batch(spec),
        "micro-batches per step and process": rows_per_process(spec) // micro_batch(spec),
    }


def _notes(spec: RunSpec) -> Iterator[str]:
    if spec.data.traces is None:
        yield (
            "without data.traces, train.prompts_per_step and train.micro_batch only say over how many micro-batches "
            "the pairs of a step are spread"
        )
