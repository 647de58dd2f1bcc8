"""TRL joins the table: the real `ComposerGRPOTrainer.train`, fed through TRL's own `rollout_func`.

So the override of the generation, TRL's scoring, shuffle, split, accumulation and backward all run; gradients are read
where the optimiser would use them. As a program (`join_trl.py RANK FOLDER MODELS CASE...`) it is one of two processes
and writes what it found to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from parity_reference import build
from parity_table import (
    CASES,
    COMPLETIONS,
    GROUP_SIZE,
    LONGEST,
    PROMPTS,
    REWARDS,
    Case,
    Step,
    action,
    composite,
    objective_settings,
    reward,
)  # fmt: skip
from safetensors.torch import save_file
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from composer_core.hf.models import load_tokenizer
from composer_trl.metrics import OWN
from composer_trl.objectives import config_fields, core_fields
from composer_trl.trainer import ComposerGRPOTrainer

OWN_HEAD = "+own-head"
"""Behind the name of a case: its policy log-probs come from the core's output head."""


class Trl:
    """See the module; with `own_head` as the backend runs it where TRL has no kernel of its own."""

    def __init__(self, *, own_head: bool = False) -> None:
        self._own_head = own_head

    def refuses(self, case: Case) -> str | None:
        """Nothing."""
        return None

    def run(self, case: Case, folder: Path, scratch: Path) -> Sequence[Step]:
        """One generation, then the case's optimiser steps on it."""
        return _train(make_trainer(case, folder, scratch, own_head=self._own_head))


def make_trainer(case: Case, folder: Path, scratch: Path, *, world: int = 1, **more: Any) -> ComposerGRPOTrainer:
    """A trainer that will sample the table's rollouts."""
    fields = (config_fields if case.native else core_fields)(case.objective, objective_settings(case))
    micro_batches = len(REWARDS) // (world * case.micro_batch)
    args = GRPOConfig(
        output_dir=str(scratch / "out"),
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        num_generations=GROUP_SIZE,
        num_iterations=case.steps,
        max_steps=case.steps,
        max_completion_length=LONGEST,
        temperature=case.temperature,
        optim="sgd",
        learning_rate=case.rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        pad_to_multiple_of=case.pad_to,
        gradient_checkpointing=case.checkpointing,
        bf16=case.dtype == "autocast",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        **fields,
    )
    trainer = ComposerGRPOTrainer(
        model=build(case, folder),
        reward_funcs=partial(_rewards, case=case),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(len(PROMPTS))]}),
        processing_class=load_tokenizer(folder / case.model),
        loss=composite(case),
        native=case.native,
        rollout_func=_rollouts,
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rollouts(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """The table's rollouts of this process' prompts."""
    first = trainer.accelerator.process_index * len(prompts)
    numbers = range(first, first + len(prompts))
    assert [int(prompt) for prompt in prompts] == [number // GROUP_SIZE for number in numbers]
    return {
        "prompt_ids": [PROMPTS[number // GROUP_SIZE] for number in numbers],
        "completion_ids": [COMPLETIONS[number] for number in numbers],
        "logprobs": None,
        "env_mask": [[int(flag) for flag in action(number)] for number in numbers],
    }


def _rewards(completion_ids: Sequence[Sequence[int]], *, case: Case, **_: Any) -> list[float | None]:
    return [reward(COMPLETIONS.index(list(ids)), case) for ids in completion_ids]


class _Gradients(TrainerCallback):
    """Those of each optimiser step, before it."""

    def __init__(self, trainer: ComposerGRPOTrainer) -> None:
        self._trainer = trainer
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """See `transformers.TrainerCallback`."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self.found.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})


def _losses(entry: dict[str, float]) -> dict[str, float]:
    ours = {name.removeprefix(OWN): value for name, value in entry.items() if name.startswith(OWN)}
    return {name: value for name, value in ours.items() if name.startswith("loss/")}


def _train(trainer: ComposerGRPOTrainer) -> list[Step]:
    gradients = _Gradients(trainer)
    trainer.add_callback(gradients)
    trainer.train()
    logged = [_losses(entry) for entry in trainer.state.log_history if f"{OWN}loss/policy" in entry]
    return [Step(*found) for found in zip(logged, gradients.found, strict=True)]


def _rank(rank: int, folder: Path, models: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        case = next(replace(case, micro_batch=2) for case in CASES if case.id == name.removesuffix(OWN_HEAD))
        own = name.endswith(OWN_HEAD)
        steps = _train(make_trainer(case, models, folder / str(rank), world=2, own_head=own))
        for number, step in enumerate(steps, start=1):
            save_file(dict(step.gradients), folder / f"{name}-{number}-{rank}.safetensors")
        (folder / f"{name}-{rank}.json").write_text(json.dumps([dict(step.losses) for step in steps]))


joiner = Trl()

if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
