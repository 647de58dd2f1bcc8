"""The core's loss inside TRL's trainer: its rows, its counts and its share of each micro-batch's loss.

TRL generates, scores, shuffles, splits and steps; a `Composition` follows it. One window is one optimiser step: its
micro-batches are counted over all ranks before the first of them is computed, and their sums are added up over all
ranks after the last. Every rank runs the same forwards and collectives, whatever its rows hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.composite import POLICY, Breakdown, CompositeLoss
from composer_core.loss.reduce import global_count
from composer_core.loss.teachers import SelfTeacher, Teacher, make_teacher
from composer_core.loss.views import ModelView
from composer_core.protocols import Need, RolloutText, Row
from composer_core.run.collectives import process_index, sum_over_ranks, world_size
from composer_trl.micro_batch import Forward, rollouts_of, sampled, view_of

ROWS = "composer_rows"
"""Key in TRL's batch: per rollout, each channel's row."""


@dataclass
class Window:
    """One optimiser step of this rank."""

    counts: Mapping[str, float]
    """Over all ranks."""
    rows: Sequence[Mapping[str, Sequence[Row | None]]]
    """Per micro-batch."""
    base: Batch
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Composition:
    """See the module.

    Args:
        loss: objective and channels.
        policy: the model that is trained, unwrapped, as it is before the first step.
        native: the trainer computes the objective itself.
        pad_id: of the tokenizer.
        autocast: entered around each forward of a model.
    """

    def __init__(
        self,
        loss: CompositeLoss,
        policy: nn.Module,
        *,
        native: bool,
        pad_id: int,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.loss, self.native = loss, native
        self._policy, self._pad_id, self._autocast = policy, pad_id, autocast
        wanted, frozen = loss.teacher, SelfTeacher("frozen")
        asked = any(Need.REFERENCE in active.needs for active in loss.active)
        self.reference: Teacher | None = make_teacher(policy, frozen) if asked or wanted == frozen else None
        if wanted is None or wanted == frozen:
            self.teacher = self.reference if wanted else None
        else:
            self.teacher = make_teacher(policy, wanted)
        self._window: Window | None = None
        self._parts: Breakdown | None = None

    # -- where rollouts end ------------------------------------------------------------------------------------------

    def rows(self, rollouts: Sequence[RolloutText]) -> list[dict[str, Row | None]]:
        """Each channel's row of each rollout."""
        return self.loss.prepare_all(rollouts)

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def open(self, micro_batches: Sequence[Mapping[str, Any]], *, base: Batch, longest: int) -> None:
        """`open_rows` of TRL's micro-batches."""
        tokens = sum(int(sampled(inputs).sum()) for inputs in micro_batches)
        self.open_rows([inputs[ROWS] for inputs in micro_batches], tokens=tokens, base=base, longest=longest)

    def open_rows(
        self, micro_batches: Sequence[Sequence[Mapping[str, Row | None]]], *, tokens: int, base: Batch, longest: int
    ) -> None:
        """Before the first forward of a step: count its rows over all ranks, draw those that have no rollout.

        Args:
            micro_batches: for each of their rollouts every channel's row.
            tokens: action tokens of all of them.
            base: step, steps and temperature.
            longest: tokens that a completion may have.
        """
        sizes = [len(rollouts) for rollouts in micro_batches]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        splits = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        per_rollout = [row for rollouts in micro_batches for row in rollouts]
        rows: dict[str, Sequence[Row | None]] = {
            active.name: [row[active.name] for row in per_rollout] for active in self.loss.active
        }
        rows |= self.loss.draw(base.step, process_index(), world_size())
        own = {
            "tokens": float(tokens),
            "sequences": float(ends[-1]),
            "max_tokens": float(ends[-1] * longest),
            "micro_batches": float(len(sizes)),
        }
        counts = sum_over_ranks({**own, **self.loss.count(rows)})
        self._window = Window(counts, self.loss.split(rows, splits), base)

    def micro_loss(self, inputs: Mapping[str, Any], forward: Forward, *, index: int, stock: Tensor | None) -> Tensor:
        """`loss_of` for a micro-batch of TRL's, which `forward` was run on."""
        rollouts = rollouts_of(inputs)
        view = self._view(inputs, forward, seqs=rollouts.seqs)
        return self.loss_of(view, rollouts, index=index, stock=stock)

    def loss_of(self, view: ModelView, rollouts: Rollouts | None, *, index: int, stock: Tensor | None = None) -> Tensor:
        """What the trainer backpropagates for one micro-batch, scaled for its mean over ranks.

        `stock` is the trainer's own policy loss, None where the core computes the objective.

        Raises:
            NonFinite: a channel's loss, or that of the core's objective.
        """
        window = self._open_window()
        batch = replace(window.base, rollouts=rollouts, counts=window.counts)
        policy = self._policy_loss(view, batch) if stock is None else stock / world_size()
        self._parts = self.loss.channels(view, self.loss.batches(window.rows[index], batch))
        window.sums["loss/policy"] += float(policy.detach())
        window.sums["loss/total"] += float(policy.detach() + self._parts.total.detach())
        # gradients are averaged over ranks, and these are sums over global counts
        return world_size() * (policy + self._parts.total)

    def add_up(self) -> None:
        """After the backward of a micro-batch: its sums, which hold the gradient's norms only now."""
        if self._parts is not None:
            for name, value in self._parts.sums().items():
                self._open_window().sums[name] += float(value)
        self._parts = None

    def close(self) -> dict[str, float]:
        """After the last backward of a step: its metrics over all ranks."""
        window = self._open_window()
        self._window = None
        return self.loss.metrics(sum_over_ranks(window.sums), window.counts)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the optimiser's step, on every rank."""
        self.loss.on_step_end(step, metrics)
        for teacher in {id(t): t for t in (self.teacher, self.reference) if t is not None}.values():
            teacher.step()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of channels, objective and teacher, between two steps."""
        return {"loss": self.loss.state_dict(), "teacher": {} if self.teacher is None else self.teacher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFailed: it belongs to other channels or another teacher.
        """
        self.loss.load_state_dict(state["loss"])
        if self.teacher is not None:
            self.teacher.load_state_dict(state["teacher"])

    # -- its parts ---------------------------------------------------------------------------------------------------

    def not_a_number(self, forward: Forward) -> Tensor:
        """A loss that is not a number and has the graph of every other, for a rank that found a fault: the others wait
        for its gradients.
        """
        assert forward.logps is not None
        self._parts = None
        return forward.logps.sum() * math.nan

    def _open_window(self) -> Window:
        assert self._window is not None, "a micro-batch outside of a step"
        return self._window

    def view(self, seqs: Seqs | None) -> ModelView:
        """The policy as losses see it, with forwards of its own; `seqs` are the rollouts."""
        return ModelView(
            self._policy,
            rollouts=seqs,
            teacher=self.teacher,
            reference=self.reference,
            pad_id=self._pad_id,
            around_forward=self._autocast,
        )

    def _view(self, inputs: Mapping[str, Any], forward: Forward, *, seqs: Seqs) -> ModelView:
        return view_of(
            self._policy,
            inputs,
            forward,
            seqs=seqs,
            temperature=self._open_window().base.temperature,
            teacher=self.teacher,
            reference=self.reference,
            pad_id=self._pad_id,
            autocast=self._autocast,
        )

    def _policy_loss(self, view: ModelView, batch: Batch) -> Tensor:
        if self.loss.objective is None:
            return torch.zeros(())
        term = self.loss.policy(view, batch)
        divisor = global_count(batch.counts, term.count)
        for name, value in term.metrics.items():
            self._open_window().sums[f"{POLICY}/{name}"] += float(value.detach() / divisor)
        return term.sum / divisor
