"""The core's `Composition` as TRL's trainers need it: rows that ride in their batches, and views of their models.

TRL generates, scores, shuffles, splits and steps; a `TRLComposition` follows it. The rows of a step are known before
its first micro-batch, so they are counted and split here; each micro-batch is then named by its index. What a share of
the loss is, and what is summed over ranks, stands in `composer_core.run.composition`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.views import ModelView
from composer_core.protocols import RolloutText, Row
from composer_core.run.collectives import process_index, world_size
from composer_core.run.composition import Composition
from composer_trl.micro_batch import Forward, rollouts_of, sampled, view_of

ROWS = "composer_rows"
"""Key in TRL's batch: per rollout, each channel's row."""


class TRLComposition(Composition):
    """See the module.

    Args:
        loss, policy, native: as `Composition` takes them.
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
        super().__init__(loss, policy, native=native)
        self._policy, self._pad_id, self._autocast = policy, pad_id, autocast
        self._rows: Sequence[Mapping[str, Sequence[Row | None]]] = ()

    # -- where rollouts end ------------------------------------------------------------------------------------------

    def rows(self, rollouts: Sequence[RolloutText]) -> list[dict[str, Row | None]]:
        """Each channel's row of each rollout."""
        return self.loss.prepare_all(rollouts)

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def open_batches(self, micro_batches: Sequence[Mapping[str, Any]], *, base: Batch, longest: int) -> None:
        """`open_rows` of TRL's micro-batches."""
        tokens = sum(int(sampled(inputs).sum()) for inputs in micro_batches)
        self.open_rows([inputs[ROWS] for inputs in micro_batches], tokens=tokens, base=base, longest=longest)

    def open_rows(
        self, micro_batches: Sequence[Sequence[Mapping[str, Row | None]]], *, tokens: int, base: Batch, longest: int
    ) -> None:
        """`open` the step of these rows, and of those that channels draw and no rollout has.

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
        self.open({**own, **self.loss.count(rows)}, base=base)
        self._rows = self.loss.split(rows, splits)

    def batch_loss(self, inputs: Mapping[str, Any], forward: Forward, *, index: int, stock: Tensor | None) -> Tensor:
        """`loss_of` a micro-batch of TRL's, which `forward` was run on."""
        rollouts = rollouts_of(inputs)
        view = view_of(
            self._policy,
            inputs,
            forward,
            seqs=rollouts.seqs,
            temperature=self.base.temperature,
            teacher=self.teacher,
            reference=self.reference,
            pad_id=self._pad_id,
            autocast=self._autocast,
        )
        return self.loss_of(view, rollouts, self._rows[index], stock=stock)

    def recorded_loss(self, rollouts: Rollouts | None, *, index: int) -> Tensor:
        """`loss_of` a micro-batch that nobody has run a forward on."""
        return self.loss_of(self._view(None if rollouts is None else rollouts.seqs), rollouts, self._rows[index])

    def not_a_number(self, forward: Forward) -> Tensor:
        """A loss that is not a number and has the graph of every other, for a rank that found a fault: the others wait
        for its gradients.
        """
        assert forward.logps is not None
        self.drop()
        return forward.logps.sum() * math.nan

    def _view(self, seqs: Seqs | None) -> ModelView:
        """The policy as losses see it, with forwards of its own; `seqs` are the rollouts."""
        return ModelView(
            self._policy,
            rollouts=seqs,
            teacher=self.teacher,
            reference=self.reference,
            pad_id=self._pad_id,
            around_forward=self._autocast,
        )
