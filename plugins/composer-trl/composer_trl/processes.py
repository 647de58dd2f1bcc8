"""What several processes mean for TRL: each holds the whole model and takes its share of a step (DDP). Light.

Options that would share the model itself, or bring the processes together in another way than the worker does, are
refused here when the spec is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import Problem
from composer_core.spec.model import RunSpec

SHARDED = frozenset({"deepspeed", "fsdp", "fsdp_config", "parallelism_config"})
"""Options by which a process would hold only a part of the model."""
JOINED = frozenset({"accelerator_config", "ddp_backend", "ddp_timeout", "use_cpu"})
"""Options that say how processes come together and share batches, which several processes have settled already."""


def processes(spec: RunSpec) -> int:
    """Processes that train together."""
    count: int = spec.backend.settings.model_dump()["processes"]
    return count


def share(spec: RunSpec) -> int:
    """Sequences of one process in one optimiser step."""
    return spec.train.sequences_per_step // processes(spec)


def micro_batch(spec: RunSpec) -> int:
    """`train.micro_batch`, or the largest up to 8 that divides the share of a process."""
    return spec.train.micro_batch or max(d for d in range(1, 9) if share(spec) % d == 0)


def batch_problems(spec: RunSpec) -> Iterator[Problem]:
    """A micro-batch that does not divide what a process takes of a step."""
    count, own, micro = processes(spec), share(spec), micro_batch(spec)
    if spec.train.sequences_per_step % count or own % micro == 0:
        return  # the plan itself refuses what cannot be shared
    divisors = [d for d in range(1, own + 1) if own % d == 0]
    whose = "of a step" if count == 1 else f"that each of {count} processes takes of a step"
    yield Problem(
        key="train.micro_batch",
        problem=f"{micro} does not divide the {own} sequences {whose} (prompts_per_step x group_size)",
        fix=f"one of {', '.join(map(str, divisors))}",
    )


def process_problems(spec: RunSpec, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that do not go with DDP as the worker sets it up."""
    for name in options:
        key = f"backend.options.{name}"
        if name in SHARDED:
            yield Problem(
                key=key,
                problem="a model in parts is not supported: channels and objectives read whole weights, and the "
                "gradient of the output head would come out wrong",
                fix="leave it out; backend.processes trains on several GPUs with a whole model on each, model.lora "
                "makes room",
            )
        elif name in JOINED and processes(spec) > 1:
            yield Problem(
                key=key,
                problem="the worker decides how several processes come together: NCCL and a GPU for each, gloo on a "
                "machine without one",
                fix="leave it out; an empty CUDA_VISIBLE_DEVICES hides the GPUs",
            )
    checkpointing = options.get("gradient_checkpointing_kwargs")
    if processes(spec) > 1 and isinstance(checkpointing, Mapping) and checkpointing.get("use_reentrant"):
        yield Problem(
            key="backend.options.gradient_checkpointing_kwargs",
            problem="use_reentrant: true fails where several processes train on more than one forward per step",
            fix="use_reentrant: false, which is the default here",
        )
