"""Training without rollouts: recorded traces and preference pairs through the core's loss, on `transformers.Trainer`.

Adapters, schedules, accumulation, checkpoints and callbacks are upstream's; the loss is `CompositeLoss` on `ModelView`,
counted over the window and all ranks by a `TRLComposition`, as in `trainer.py`. Rows come in an order that only the
step and the seed decide, so a resumed run goes on where it was. Each process computes gradients on its own weights, and
they are averaged here before the optimiser's step: no forward goes through DDP, which would wait for one of its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import NonFinite, UsageError
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.channel import Draws
from composer_core.loss.composite import CompositeLoss
from composer_core.run.collectives import sum_over_ranks, world_size
from composer_core.run.context import RunContext
from composer_core.run.recorded import LONGEST, RecordedRow
from composer_core.run.state import capture_rng, restore_rng
from composer_trl.backend import RunListener, config_of, lora_config
from composer_trl.composition import TRLComposition
from composer_trl.finite import FiniteSteps
from composer_trl.metrics import OWN
from composer_trl.trainer import AfterOptimizer

TEMPERATURE = 1.0
"""Nothing recorded was sampled from this policy: its log-probs are the model's own."""


class Unrolled(Dataset[RecordedRow | None]):
    """Rows as optimiser steps take them, one behind the other to the end of the run.

    Each row comes once per round, in an order of its own each time. Without rows every item is None: a step then holds
    what channels draw by themselves.
    """

    def __init__(self, rows: Sequence[RecordedRow], *, items: int, seed: int) -> None:
        self._rows, self._items, self._seed = rows, items, seed
        self._round: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: int) -> RecordedRow | None:
        if not self._rows:
            return None
        round_, place = divmod(item, len(self._rows))
        if self._round[0] != round_:
            order = list(range(len(self._rows)))
            random.Random(f"{self._seed}-{round_}").shuffle(order)
            self._round = (round_, order)
        return self._rows[self._round[1][place]]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass of this process is about."""

    rows: tuple[RecordedRow, ...]
    index: int
    last: bool
    """Of its optimiser step."""


class RecordedTrainer(FiniteSteps, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` on recorded rows; see the module.

    Args:
        model: the policy, with its adapters.
        args: batch sizes, steps and the optimiser; `remove_unused_columns` must be False.
        loss: channels, and `lm-ce` or no objective.
        rows: of recorded traces; may be empty where a channel draws rows of its own.
        seed: order of the rows.
        longest: tokens that a row may have, for channels that count by it.
        kwargs: as `transformers.Trainer` takes them.

    Raises:
        UsageError: there are fewer rows than one step takes, or two channels want different teachers.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        loss: CompositeLoss,
        rows: Sequence[RecordedRow],
        seed: int = 0,
        longest: int = LONGEST,
        **kwargs: Any,
    ) -> None:
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size()
        if 0 < len(rows) < per_step:
            raise UsageError(
                f"{len(rows)} recorded rows, but one step takes {per_step}",
                at="data.traces",
                fix="lower train.prompts_per_step",
            )
        items = Unrolled(rows, items=args.max_steps * per_step, seed=seed)
        super().__init__(model, args, train_dataset=items, data_collator=_together, **kwargs)
        self.model_accepts_loss_kwargs = True  # upstream then leaves the loss as it is
        self._longest = longest
        self._composition = TRLComposition(
            loss,
            self.accelerator.unwrap_model(self.model),
            native=False,
            pad_id=self.processing_class.pad_token_id,
            autocast=self.accelerator.autocast,
        )
        self._drawing = [a.name for a in loss.active if isinstance(a.channel, Draws) and a.channel.rows_per_step]
        self._read = self._seen = 0.0
        self._began = time.perf_counter()
        self._line: dict[str, float] = {}
        self.add_callback(AfterOptimizer(self._after_optimizer))

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], int]:
        """See `transformers.Trainer`; the whole window is known here, before its first forward."""
        self._began = time.perf_counter()
        batches = [tuple(row for row in next(epoch_iterator)["rows"] if row is not None) for _ in range(num_batches)]
        self._composition.open_rows(
            [[row.rows for row in rows] for rows in batches],
            tokens=sum(sum(row.action) for rows in batches for row in rows),
            base=Batch(step=self.state.global_step + 1, total_steps=self.state.max_steps, temperature=TEMPERATURE),
            longest=self._longest,
        )
        self._read = float(sum(len(row.ids) for rows in batches for row in rows))
        window = [MicroBatch(rows, index, index == num_batches - 1) for index, rows in enumerate(batches)]
        return [{"micro_batch": micro_batch} for micro_batch in window], 1

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer`: this process's share of the step's loss, times the number of processes."""
        micro_batch: MicroBatch = inputs["micro_batch"]
        rollouts = rollouts_of(micro_batch.rows, self.args.device)
        try:
            return self._composition.recorded_loss(rollouts, index=micro_batch.index)
        except NonFinite as error:
            self._found(error.problem)
            return torch.zeros((), device=self.args.device, requires_grad=True)

    def training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer`.

        Raises:
            NonFinite: the loss of this step, on every process; nothing of the step was applied.
        """
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        last = inputs["micro_batch"].last
        self._raise_together(last=last)
        self._composition.add_up()
        if last:
            self._average_gradients()
            self._close()
        return loss

    def _average_gradients(self) -> None:
        if world_size() == 1:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # not used on this process: it must still join the collective
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size()

    def _close(self) -> None:
        """The step's metrics, and the tokens that the policy read in it: rows, and what channels drew."""
        self._line = self._composition.close()
        if self._composition.loss.objective is None:
            del self._line["loss/policy"]
        read = sum_over_ranks({"read": self._read})["read"]
        self._seen += read + sum(self._line[f"tokens/{name}"] for name in self._drawing)

    def _after_optimizer(self) -> None:
        self._composition.stepped(self.state.global_step + 1, self._line)
        self._line["step_time"] = time.perf_counter() - self._began

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `transformers.Trainer`; the line of a step is its own, no mean since the last one."""
        if "loss" in logs:
            own = {f"{OWN}{name}": value for name, value in self._line.items()}
            logs = {**logs, **own, "loss": self._line["loss/total"], "num_tokens": self._seen}
        epoch, self.state.epoch = self.state.epoch, None  # it would say how much of the run is done
        super().log(logs, start_time)
        self.state.epoch = epoch

    # -- the place between two steps ---------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Where training stands between two steps, beyond what upstream saves; as `run.state.save_state` takes it."""
        return {"tokens": self._seen, "rng": capture_rng()}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Stand where `place` was taken: call it before `train(resume_from_checkpoint=...)` of the same step."""
        self._seen = place["tokens"]

    def composition_state(self) -> dict[str, Any]:
        """State of channels, objective and teacher between two steps."""
        return self._composition.state_dict()

    def load_composition(self, state: Mapping[str, Any]) -> None:
        """Restore what `composition_state` gave; before `train`, as `go_to`.

        Raises:
            RunFailed: it belongs to other channels or another teacher.
        """
        self._composition.load_state_dict(state)

    def save_at(self, place: Mapping[str, Any]) -> None:
        """Save the state of the last applied step, whose `place` this is, after a later one was broken off."""
        self.go_to(place)
        restore_rng(place["rng"])  # upstream saves the generators' state as it is now
        self._save_checkpoint(self.model, trial=None)


def rollouts_of(rows: Sequence[RecordedRow], device: torch.device | str) -> Rollouts | None:
    """Rows as rollouts, S of them; None where there is none. A reward that a trace lacks is NaN."""
    if not rows:
        return None
    action = torch.tensor([flag for row in rows for flag in row.action], device=device)
    rewards = [math.nan if row.reward is None else row.reward for row in rows]
    return Rollouts(
        seqs=replace(Seqs.from_lists([row.ids for row in rows], device=device), scored=action),
        action=action,
        rewards=torch.tensor(rewards, device=device),
        uid=tuple(row.uid for row in rows),
    )


def recorded_trainer(run: RunContext, loss: CompositeLoss, listener: RunListener) -> RecordedTrainer:
    """The trainer of a run without rollouts."""
    folder, model = run.model_folder(), run.spec.model
    policy: Any = load_policy(folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    if model.lora is not None:
        from peft import get_peft_model

        policy = get_peft_model(policy, lora_config(model.lora))
    trainer = RecordedTrainer(
        policy,
        config_of(run, TrainingArguments),
        loss=loss,
        rows=run.recorded(),
        seed=run.spec.seed,
        longest=run.spec.data.max_tokens or LONGEST,
        processing_class=load_tokenizer(folder, trust_remote_code=model.trust_remote_code),
        callbacks=[listener],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _together(rows: list[RecordedRow | None]) -> dict[str, Any]:
    return {"rows": rows}
