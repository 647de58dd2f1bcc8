"""verl joins the table: its real FSDP2 engine, one process, without Ray.

The engine computes the old log-probs, splits, accumulates and runs the backward; gradients are read where the optimiser
would use them. As a program (`join_verl.py RANK FOLDER MODELS CASE...`) it is one of two processes and writes what it
found to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VERL_USE_EXTERNAL_PLUGINS="auto")

import torch
import torch.distributed as dist
from parity_reference import build, fixed
from parity_table import CASES, COMPLETIONS, GROUP_SIZE, LONGEST, PROMPTS, REWARDS, Case, Step, composite, rollout
from safetensors.torch import save_file
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import (
    ActorConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)

from composer_core.batch import Rollouts
from composer_verl.engine import Composed, ComposerEngine
from composer_verl.rows import FIELD, Sample, encode

PACKED, AHEAD = "+packed", "+ahead"
"""Behind the name of a case: see `Verl`."""


class Engine(ComposerEngine):
    """verl's engine around the table's policy, which it does not load itself."""

    def __init__(self, case: Case, folder: Path, **configs: Any) -> None:
        self._case, self._folder = case, folder
        super().__init__(**configs)

    def _build_module(self) -> torch.nn.Module:
        policy = build(self._case, self._folder)
        if self._case.checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module.enable_input_require_grads()
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self._case.dtype != "float64":
            return super()._build_fsdp_module(module)
        with patch.object(
            PrecisionType, "to_dtype", staticmethod(lambda _: torch.float64)
        ):  # which verl has no name for
            module = super()._build_fsdp_module(module)
        self._autocast_dtype = torch.float32  # which means none
        return module


class Verl:
    """See the module.

    `packed`: sequences lie one behind the other, as on a GPU with flash attention. `ahead`: teachers read before the
    first optimiser step.
    """

    def __init__(self, *, packed: bool = False, ahead: bool = False) -> None:
        self._packed, self._ahead = packed, ahead

    def refuses(self, case: Case) -> str | None:
        """What it has no code for."""
        if case.pad_to is not None:
            return "verl pads to the longest sequence only"
        return None

    def run(self, case: Case, folder: Path, scratch: Path) -> Sequence[Step]:
        """One batch, then the case's optimiser steps on it."""
        with alone():
            return train(case, folder, packed=self._packed, ahead=self._ahead)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_engine(case: Case, folder: Path, *, packed: bool = False) -> ComposerEngine:
    """An engine with the table's policy, before its first step."""
    low = {"bfloat16": "bf16", "autocast": "bf16"}.get(case.dtype, "fp32")
    precision = {"param_dtype": low, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = Engine(
        case,
        folder,
        model_config=HFModelConfig(
            path=str(folder / case.model),
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=packed,
            lora_rank=0 if case.adapter == "none" else 4,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision=precision,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            wrap_policy={} if case.adapter == "none" else {"transformer_layer_cls_to_wrap": _layers(case, folder)},
        ),
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=case.rate, weight_decay=0.0, clip_grad=1e9, total_training_steps=9
        ),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def _layers(case: Case, folder: Path) -> list[str]:
    return list(build(case, folder).base_model.model._no_split_modules)


def actor_config(case: Case, loss_mode: str) -> ActorConfig:
    """verl's, with a policy loss of ours."""
    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=len(REWARDS),
        ppo_micro_batch_size_per_gpu=case.micro_batch,
        rollout_n=1,
        use_dynamic_bsz=False,
        policy_loss={"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": loss_mode},
    )


def train(
    case: Case, folder: Path, *, share: range = range(len(REWARDS)), packed: bool = False, ahead: bool = False
) -> list[Step]:
    """The case's optimiser steps on this process' share of the rollouts."""
    engine, data, function = ready(case, folder, share=share, packed=packed, ahead=ahead)
    return [take_step(engine, data, function) for _ in range(case.steps)]


def ready(
    case: Case,
    folder: Path,
    *,
    share: range = range(len(REWARDS)),
    packed: bool = False,
    ahead: bool = False,
    **more: Any,
) -> tuple[ComposerEngine, TensorDict, Any]:
    """An engine, a batch with all that its optimiser steps need, and the loss function; `more`: of verl's batch."""
    loss, engine = composite(case), make_engine(case, folder, packed=packed)
    data = batch_of(case, folder, loss, share=share)
    told = {
        "temperature": case.temperature,
        "use_remove_padding": packed,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": case.micro_batch,
        "global_batch_size": len(REWARDS),
        "calculate_entropy": False,
        "compute_loss": False,
    }
    tu.assign_non_tensor(data, **{**told, **more})
    with engine.eval_mode():
        logps = engine.infer_batch(data)["model_output"]["log_probs"]
    data["old_log_probs"] = _responses(logps, data)
    composed = Composed(
        loss,
        native=False,
        policy_loss="composer_core",
        longest=LONGEST,
        total_steps=case.steps,
        pad_id=engine.model_config.tokenizer.pad_token_id,
        ahead=ahead,
    )
    engine.compose(composed)
    if ahead:
        with engine.eval_mode():
            data.update(engine.teach(data))
    return engine, data, engine.loss_function(actor_config(case, "composer_core"))


def take_step(engine: ComposerEngine, data: TensorDict, function: Any) -> Step:
    """One optimiser step, with all of its metrics among the losses."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data.copy(), function)
        gradients = {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in engine.module.named_parameters()
            if parameter.grad is not None
        }
        engine.optimizer_step()
    report = engine.report()
    assert report["fault"] is None, report["fault"]
    (metrics,) = report["steps"]
    return Step(metrics, gradients)


def batch_of(case: Case, folder: Path, loss: Any, *, share: range) -> TensorDict:
    """The table's rollouts as verl's workers get them."""
    known = fixed(case, folder, loss.objective)
    rows = [{a.name: a.channel.prepare(rollout(i, case)) for a in loss.active} for i in range(len(REWARDS))]
    drawn: list[dict[str, dict[str, list[Any]]]] = [{} for _ in REWARDS]
    for step in range(1, case.steps + 1):
        for name, own in loss.draw(step, 0, 1).items():
            for i in range(len(REWARDS)):
                drawn[i].setdefault(str(step), {})[name] = list(own[i :: len(REWARDS)])
    samples = [
        Sample(
            str(i),
            i // GROUP_SIZE,
            None if torch.isnan(known.rewards[i]) else float(known.rewards[i]),
            rows[i],
            drawn[i],
        )
        for i in share
    ]
    prompts = [torch.tensor(PROMPTS[i // GROUP_SIZE]) for i in share]
    responses = [torch.tensor(COMPLETIONS[i]) for i in share]
    ids = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]
    mask = _nested([known.action[own][-len(COMPLETIONS[i]) :].long() for i, own in _owned(known, share)])

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return _nested([values[own][-len(COMPLETIONS[i]) :] for i, own in _owned(known, share)])

    fields = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(own)) for own in ids]),
        "prompts": _nested(prompts),
        "responses": _nested(responses),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": tokens(known.advantages),
        "ref_log_prob": tokens(known.ref_logps),
        FIELD: encode(samples),
    }
    return TensorDict(fields, batch_size=len(share))


def _owned(known: Rollouts, share: range) -> Iterator[tuple[int, torch.Tensor]]:
    return ((i, known.seqs.owner == i) for i in share)


def _nested(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def _responses(logps: torch.Tensor, data: TensorDict) -> torch.Tensor:
    lengths = data["responses"].offsets().diff().tolist()
    return _nested([own[-n - 1 : -1] for own, n in zip(logps.unbind(), lengths, strict=True)])


def _rank(rank: int, folder: Path, models: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name in names:
        known, *form = name.partition("+")
        case = next(replace(case, micro_batch=2) for case in CASES if case.id == known)
        own, form = range(rank * 4, rank * 4 + 4), "".join(form)
        steps = train(case, models, share=own, packed=form == PACKED, ahead=form == AHEAD)
        for number, step in enumerate(steps, start=1):
            save_file(dict(step.gradients), folder / f"{name}-{number}-{rank}.safetensors")
        (folder / f"{name}-{rank}.json").write_text(json.dumps([dict(step.losses) for step in steps]))
    dist.destroy_process_group()


joiner = Verl()

if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
