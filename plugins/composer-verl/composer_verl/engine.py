"""verl's FSDP engine with the core's loss beside, or in place of, its own.

One optimiser step of verl's is `train_batch`: `forward_backward_batch`, which sums the counts over ranks before the
first micro-batch and has the ranks agree after the last one whether all was finite, `forward_step` for each, and
`optimizer_step`, which applies it.
Without `compose` it is verl's engine, bit for bit. Every rank runs the same forwards and collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.device import get_device_id, get_device_name
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from composer_core.batch import Batch, Rollouts
from composer_core.errors import NonFinite, UsageError
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.reading import Models
from composer_core.loss.tap import Tap
from composer_core.run.collectives import world_size
from composer_core.run.composition import Composition
from composer_core.run.control import agree
from composer_verl.rows import FIELD, channel_rows, decode, rollouts_of
from composer_verl.taught import for_queue, from_queue, likeliest, sources
from composer_verl.view import EngineView, Forward, Reader


@dataclass(frozen=True)
class Composed:
    """What a run wants of an engine."""

    loss: CompositeLoss
    native: bool
    """verl's own policy loss is the objective's; else it calls `policy_loss`, which is registered with it."""
    policy_loss: str
    """`loss_mode` of verl's that stands for the core's objective."""
    longest: int
    """Completion tokens allowed."""
    total_steps: int
    pad_id: int
    ahead: bool = False
    """Teachers of a top-k divergence read before the update (`ComposerEngine.teach`), not in it."""


class ComposerEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._composition: Composition | None = None
        self._step = 1
        self._metrics: dict[str, float] = {}
        self._fault: str | None = None
        self._reports: list[dict[str, float]] = []

    # -- what the worker calls ---------------------------------------------------------------------------------------

    def compose(self, wanted: Composed) -> None:
        """Compute these losses from now on; once, when the model is there and before the first step.

        Raises:
            UsageError: teachers are to read ahead, and no channel, or not every one, can learn from what they find.
        """
        self._sources = sources(wanted.loss, step=self._step) if wanted.ahead else ()
        if wanted.ahead and not self._sources:
            raise UsageError("no channel learns over a top k", at="backend.topk", fix="backend.topk: step")
        self._wanted = wanted
        self._composition = Composition(wanted.loss, self.module, native=wanted.native)
        self._found: str | None = None
        self._tap: Tap | None = None
        self._micro: tuple[EngineView, Rollouts] | None = None
        if not wanted.native:
            register_policy_loss(wanted.policy_loss)(self._policy_loss)

    def loss_function(self, config: Any) -> Any:
        """What verl backpropagates for a micro-batch; `config` is its ActorConfig."""
        return partial(ppo_loss if self._composition is None else self._loss, config=config)

    def teach(self, data: Any) -> TensorDict:
        """What teachers find likeliest for the hints of a batch, in its order: the fields of `taught.Source`.

        On every rank, in eval mode, before the batch's first optimiser step.
        """
        composition = self._composition
        assert composition is not None
        self._sources = sources(composition.loss, step=self._step)
        micro_batches, order = prepare_micro_batches(data, dp_group=self.get_data_parallel_group())
        parts = [self._taught(composition, micro.to(get_device_id())) for micro in micro_batches]
        found = {name: [own for part in parts for own in part[name]] for name in parts[0]}
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in found.items()}
        if order is not None:
            nested = {name: restore_dynamic_batch(rows, order) for name, rows in nested.items()}
        return TensorDict(nested, batch_size=len(data))

    def report(self) -> dict[str, Any]:
        """What the optimiser steps since the last call gave, the same on every rank: `steps`, their metrics in order,
        and `fault`, why the one behind them was not applied; None where all were.
        """
        found = {"steps": self._reports, "fault": self._fault}
        self._reports, self._fault = [], None
        return found

    def composition_state(self) -> dict[str, Any]:
        """Of channels, objective, teacher and the count of steps; this rank's part where the teacher is sharded."""
        own = {} if self._composition is None else self._composition.state_dict()
        return {"step": self._step, "composition": own}

    def load_composition(self, state: Mapping[str, Any]) -> None:
        """Restore what `composition_state` gave.

        Raises:
            RunFailed: it belongs to other channels or another teacher.
        """
        self._step = state["step"]
        if self._composition is not None:
            self._composition.load_state_dict(state["composition"])

    def _build_fsdp_module(self, module: Any) -> Any:
        """See `FSDPEngine`. A reference is offloaded to the CPU, in memory pinned for a GPU; on the CPU it is there."""
        own = self.engine_config
        if own.forward_only and get_device_name() == "cpu":
            self.engine_config = replace(own, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = own

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """See `FSDPEngine`; opens and closes the step's window."""
        if self._composition is None or forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._open(self._composition, data)
        outputs = super().forward_backward_batch(data, loss_function, forward_only)
        self._composition.add_up()
        self._tap = self._micro = None  # nor outlive the step, through the next generation
        found, self._found = agree(self._found), None
        self._fault = self._fault or found
        if found is None:
            self._metrics = self._composition.close()
        return outputs

    def _open(self, composition: Composition, data: Any) -> None:
        samples = decode(data[FIELD])
        names = [active.name for active in composition.loss.active]
        rows = channel_rows(samples, names, step=self._step)
        sequences = float(sum(not sample.filler for sample in samples))
        own = {
            "tokens": float(data["response_mask"].values().sum()),
            "sequences": sequences,
            "max_tokens": sequences * self._wanted.longest,
            "micro_batches": _micro_batches(data),
            **composition.loss.count(rows),
        }
        base = Batch(step=self._step, total_steps=self._wanted.total_steps, temperature=float(data["temperature"]))
        composition.open(own, base=base)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """See `FSDPEngineWithLMHead`."""
        if self._composition is not None and not forward_only:
            self._composition.add_up()  # the backward of the one before has run
            self._tap = self._micro = None  # else its logits would stand beside the ones to come
        return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """See `FSDPEngineWithLMHead`; what it reads of the logits goes through a `Tap`."""
        if self._composition is not None and torch.is_grad_enabled():
            self._tap = Tap(output.logits)
            output.logits = self._tap.logits
        return super().prepare_model_outputs(output, *args, **kwargs)

    def _loss(self, config: Any, model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> Any:
        composition, tap = self._composition, self._tap
        assert composition is not None
        assert tap is not None
        samples = decode(data[FIELD])
        rollouts = rollouts_of(data, samples)
        logps = _of_tokens(model_output["log_probs"].values(), rollouts)
        forward = Forward(rollouts.seqs, tap, logps, composition.base.temperature)
        taught = from_queue(self._sources, data) if self._wanted.ahead else None
        view = EngineView(self._reader(composition), forward, taught=taught)
        self._micro = (view, rollouts)
        rows = channel_rows(samples, [active.name for active in composition.loss.active], step=self._step)
        try:
            policy, metrics = ppo_loss(config, dict(model_output), data, dp_group)
            return composition.loss_of(view, rollouts, rows, stock=policy), metrics
        except NonFinite as error:
            # the others wait for this rank's share of the gradient: they are told before the optimiser's step
            self._found = self._found or error.problem
            composition.drop()
            return logps.sum() * math.nan, {}

    def _taught(self, composition: Composition, data: Any) -> dict[str, list[Tensor]]:
        """Of one micro-batch, sample by sample."""
        samples = decode(data[FIELD])
        rollouts = rollouts_of(data, samples)
        rows = channel_rows(samples, [active.name for active in composition.loss.active], step=self._step)
        batches = composition.loss.batches(rows, Batch(rollouts=rollouts, step=self._step))
        reader = self._reader(composition)
        found: dict[str, list[Tensor]] = {}
        for source in self._sources:
            hints = batches[source.channel].hints
            assert hints is not None  # a divergence is one of hints
            at = hints.teacher[hints.weight != 0]
            with reader.models.reading(source.model, grad=False):
                logits = reader.read(hints.seqs, at, model=source.model)
            found |= for_queue(source, likeliest(logits, hints.seqs.ids[at], source.spec), hints, rollouts)
        return found

    def _policy_loss(self, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """The core's objective as verl calls a policy loss: scaled for the mean over ranks."""
        assert self._composition is not None
        assert self._micro is not None
        return world_size() * self._composition.policy_of(*self._micro), {}

    def _reader(self, composition: Composition) -> Reader:
        models = Models(self.module, teacher=composition.teacher, reference=composition.reference)
        return Reader(models, pad_id=self._wanted.pad_id, around_forward=self._autocast)

    def _autocast(self) -> AbstractContextManager[None]:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(get_device_name(), dtype=self._autocast_dtype)

    def optimizer_step(self) -> float:
        """See `FSDPEngine`. A step that is not finite on some rank is applied on none, and so are those behind it until
        `report` has told of it.
        """
        if self._fault is not None:
            self.optimizer_zero_grad()
            return math.nan
        norm = float(super().optimizer_step())
        if not math.isfinite(norm):  # verl has left the step out, and the norm is the same everywhere
            self._fault = f"the gradient norm is {norm} at step {self._step}"
            return norm
        self._reports.append({**self._metrics, "grad_norm": norm})
        if self._composition is not None:
            self._composition.stepped(self._step, self._metrics)
        self._step += 1
        return norm

    def lr_scheduler_step(self) -> float:
        """See `FSDPEngine`; a generation that was broken off is to be done again at its rate."""
        if self._fault is not None:
            return float(self.lr_scheduler.get_last_lr()[0])
        return float(super().lr_scheduler_step())


def register_engine() -> None:
    """Have verl's workers of this process make a `ComposerEngine` where they would make its FSDP engine for a language
    model; idempotent. A vendor's engine goes before a device's, so nothing of verl's is overwritten.
    """
    for device, vendor in (("cpu", "cpu"), ("cuda", "nvidia")):
        registered = EngineRegistry._engines["language_model"]["fsdp2"]
        if registered.get((device, vendor)) is not ComposerEngine:
            EngineRegistry.register("language_model", "fsdp2", device=device, vendor=vendor)(ComposerEngine)


def _of_tokens(predicted: Tensor, rollouts: Rollouts) -> Tensor:
    """Log-probs of verl, (N,) with entry i about token i+1, as the core's, which is 0 for first and unscored tokens."""
    at = (rollouts.action & ~rollouts.seqs.first).nonzero().flatten()
    return predicted.new_zeros(predicted.shape).index_put((at,), predicted[at - 1])


def _micro_batches(data: Any) -> float:
    # with sequences packed by length nobody knows it yet, and no objective that needs it is planned with that
    return math.nan if data["use_dynamic_bsz"] else len(data) / data["micro_batch_size_per_gpu"]
