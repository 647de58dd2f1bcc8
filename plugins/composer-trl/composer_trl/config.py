"""From a run spec to GRPOConfig's numbers, and the check of `backend.options`. Light: trl is never imported here.

TRL has four entangled batch numbers; the spec has three that mean one thing each:

    sequences per step = prompts_per_step x group_size
    per_device_train_batch_size = micro_batch          steps_per_generation = gradient_accumulation_steps
    num_generations = group_size                           = sequences / (micro_batch x processes)

So one generation serves exactly `iterations` optimiser steps, and the result does not depend on `micro_batch`
(except `bnpo`, whose mean is local by definition).
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import MissingError, Problem, SpecError
from composer_core.plugins.contributions import Derived
from composer_core.spec.model import RunSpec
from composer_core.spec.rollout_problems import rollout_problems
from composer_core.spec.rollouts import NONE
from composer_trl.objectives import config_fields, core_fields, ignored_fields, is_native
from composer_trl.processes import batch_problems, micro_batch, process_problems, share
from composer_trl.rollout import rollout_fields, rollout_notes, rollout_numbers

OWNED: dict[str, str] = {
    "output_dir": "nothing: the run directory",
    "run_name": "name",
    "seed": "seed",
    "data_seed": "seed",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "generation_batch_size": "train.prompts_per_step",
    "steps_per_generation": "train.prompts_per_step",
    "num_generations": "train.group_size",
    "num_iterations": "train.iterations",
    "max_completion_length": "train.max_completion_tokens",
    "max_tool_calling_iterations": "rollout.max_turns",
    "temperature": "train.temperature",
    "top_p": "train.top_p",
    "top_k": "train.top_k",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "logging_steps": "train.log_every",
    "logging_strategy": "train.log_every",
    "disable_tqdm": "nothing: the run has its own progress display",
    "save_strategy": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_strategy": "data.eval",
    "eval_steps": "data.eval.every",
    "per_device_eval_batch_size": "nothing: it follows from data.eval.group_size",
    "num_generations_eval": "data.eval.group_size",
    "resume_from_checkpoint": "nothing: a run starts from its own checkpoints",
    "remove_unused_columns": "nothing: all columns reach the rewards",
    "reward_weights": "data.rewards[].weight",
    "trust_remote_code": "model.trust_remote_code",
    "model_init_kwargs": "model",
    "loss_type": "loss.objective",
    "importance_sampling_level": "loss.objective",
    "scale_rewards": "loss.objective.scale_rewards",
    "beta": "loss.objective.kl_coef",
    "epsilon": "loss.objective.epsilon",
    "epsilon_high": "loss.objective.epsilon_high",
    "delta": "loss.objective.delta",
    "mask_truncated_completions": "loss.objective.drop_truncated",
    "sapo_temperature_pos": "loss.objective.temperature_positive",
    "sapo_temperature_neg": "loss.objective.temperature_negative",
    "vespo_k_pos": "loss.objective.k_positive",
    "vespo_lambda_pos": "loss.objective.lambda_positive",
    "vespo_k_neg": "loss.objective.k_negative",
    "vespo_lambda_neg": "loss.objective.lambda_negative",
}
"""GRPOConfig field -> the key of the spec that decides it."""


def derive(spec: RunSpec) -> Derived:
    """TRL's configuration for a spec.

    Raises:
        SpecError: a micro-batch that does not divide the share of a process, a rollout that TRL cannot carry out, or an
            option that is unknown, owned, mistyped, or at odds with DDP.
        MissingError: options are given and trl is not installed.
    """
    if spec.rollouts == NONE:
        from composer_trl.recorded_config import derive_recorded  # which needs this module

        return derive_recorded(spec)
    options = spec.backend.settings.model_dump()["options"]
    problems = [
        *batch_problems(spec),
        *rollout_problems(spec, backend="trl"),
        *process_problems(spec, options),
        *option_problems(options, "trl.GRPOConfig", grpo_config_fields, owned=OWNED),
        *_ignored_problems(spec, options),
    ]
    if problems:
        raise SpecError(problems)
    upstream = {
        **_batch_fields(spec),
        **train_fields(spec),
        "reward_weights": [reward.weight for reward in spec.data.rewards],
        "trust_remote_code": spec.model.trust_remote_code,
        **_objective_fields(spec),
        **_eval_fields(spec),
        **rollout_fields(spec),
        "report_to": "none",
        **options,
    }
    train = spec.train
    numbers = {
        "sequences per step": train.sequences_per_step,
        "micro-batch (sequences)": micro_batch(spec),
        "accumulated micro-batches": upstream["gradient_accumulation_steps"],
        "optimiser steps per generation": train.iterations,
        "prompts seen in the run": train.prompts_per_step * -(-train.steps // train.iterations),
        "longest completion (tokens)": train.max_completion_tokens,
        **rollout_numbers(spec),
    }
    return Derived(numbers=numbers, upstream=upstream, notes=(*_notes(spec), *rollout_notes(spec)))


def _batch_fields(spec: RunSpec) -> Mapping[str, Any]:
    train = spec.train
    accumulation = share(spec) // micro_batch(spec)
    return {
        "per_device_train_batch_size": micro_batch(spec),
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "num_generations": train.group_size,
        "num_iterations": train.iterations,
        "max_steps": train.steps,
        "max_completion_length": train.max_completion_tokens,
        "temperature": train.temperature,
        "top_p": train.top_p,
        "top_k": train.top_k,
    }


def train_fields(spec: RunSpec) -> Mapping[str, Any]:
    """Fields of `transformers.TrainingArguments` that say how an optimiser goes on, and when it is logged and saved."""
    train = spec.train
    return {
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.schedule,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "gradient_checkpointing": train.gradient_checkpointing,
        # a reentrant one fails under DDP when a step has more than one forward, as channels have
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if train.gradient_checkpointing else None,
        "bf16": spec.model.dtype == "bfloat16",
        "seed": spec.seed,
        "logging_steps": train.log_every,
        "save_strategy": "no" if spec.checkpoint.every is None else "steps",
        "save_steps": spec.checkpoint.every or train.steps,
    }


def _objective_fields(spec: RunSpec) -> Mapping[str, Any]:
    objective = spec.loss.objective
    assert objective is not None  # only `rollouts: none` may leave it out
    fields = config_fields if is_native(objective) else core_fields
    return fields(objective.name, objective.settings)  # type: ignore[arg-type]


def _eval_fields(spec: RunSpec) -> Mapping[str, Any]:
    held_out = spec.data.eval
    if held_out is None:
        return {}
    groups = max(1, micro_batch(spec) // held_out.group_size)  # trl wants whole groups in a batch
    return {
        "eval_strategy": "steps",
        "eval_steps": held_out.every,
        "num_generations_eval": held_out.group_size,
        "per_device_eval_batch_size": groups * held_out.group_size,
    }


def option_problems(
    options: Mapping[str, Any], config: str, fields_of: Callable[[], Mapping[str, str]], *, owned: Mapping[str, str]
) -> Iterator[Problem]:
    """Options that are no fields of the upstream class `config`, that something else decides, or of another type."""
    if not options:
        return
    fields = fields_of()
    for name, value in options.items():
        key = f"backend.options.{name}"
        if name in owned and name in fields:
            yield Problem(key=key, problem="another part of the spec decides this", fix=f"set {owned[name]}")
        elif name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.6)
            fix = f"did you mean {near[0]!r}?" if near else ""
            yield Problem(key=key, problem=f"{config} has no such field", fix=fix)
        elif not _fits(value, fields[name]):
            yield Problem(key=key, problem=f"{config} wants {fields[name]}, got {value!r}")


def _ignored_problems(spec: RunSpec, options: Mapping[str, Any]) -> Iterator[Problem]:
    objective = spec.loss.objective
    for name in [] if is_native(objective) else ignored_fields(options):
        yield Problem(
            key=f"backend.options.{name}",
            problem=f"only trl's own loss reads it, and the core computes {objective.name}: it would do nothing",
            fix="leave it out",
        )


def _notes(spec: RunSpec) -> Iterator[str]:
    if spec.train.iterations == 1:
        yield (
            "iterations: 1 keeps every step on policy: the importance ratio is exactly 1, clipping never engages, and "
            "objectives differ only in how they weight and average tokens"
        )
    if spec.loss.objective is not None and spec.loss.objective.name == "bnpo":
        yield "bnpo averages within each micro-batch, so its result depends on train.micro_batch"
    if spec.model.dtype == "bfloat16" and spec.model.lora is None and spec.train.learning_rate < 1e-5:
        yield "bfloat16 weights lose updates at this learning rate in full fine-tuning: use lora, or dtype: float32"


def grpo_config_fields() -> dict[str, str]:
    """Field name -> annotation of the installed GRPOConfig, read from its source: importing trl takes seconds.

    Raises:
        MissingError: trl or transformers is not installed.
    """
    return fields_in(
        TRAINING_ARGUMENTS,
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    )


TRAINING_ARGUMENTS = ("transformers", "training_args.py", "TrainingArguments")


def fields_in(*sources: tuple[str, str, str]) -> dict[str, str]:
    """Field name -> annotation, of classes given as package, file and name.

    Raises:
        MissingError: a package is not installed.
    """
    fields: dict[str, str] = {}
    for package, file, class_name in sources:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingError(f"{package} is not installed", fix="pip install composer-trl")
        source = Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8")
        fields |= _annotated_fields(source, class_name)
    return fields


def _annotated_fields(source: str, class_name: str) -> dict[str, str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            assignments = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            return {a.target.id: ast.unparse(a.annotation) for a in assignments if isinstance(a.target, ast.Name)}
    raise MissingError(f"the installed upstream has no class {class_name}", fix="pip install composer-trl")


_PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
    "dict": (dict,),
    "list": (list,),
}


def _fits(value: Any, annotation: str) -> bool:
    """Whether a YAML value can be a field of this annotation; anything but plain types is left to upstream."""
    parts = [part.strip().strip("'\"").partition("[")[0] for part in annotation.split("|")]
    if any(part not in _PLAIN for part in parts):
        return True
    if isinstance(value, bool):  # bool is an int to Python, but not to a user
        return "bool" in parts
    return isinstance(value, tuple(t for part in parts for t in _PLAIN[part]))
