"""The core's loss inside a trainer that splits, accumulates and steps by itself: counts, shares and sums of its steps.

    composition.open(own, base=base)              before the first forward of an optimiser step: counted over all ranks
    loss = composition.loss_of(view, ...)         each micro-batch: what the trainer backpropagates
    composition.add_up()                          after its backward
    metrics = composition.close()                 after the last one: over all ranks
    composition.stepped(step, metrics)            after the optimiser's step

Every rank makes the same calls, whatever its rows hold: `open` and `close` are collectives. How a trainer carries rows
through its queues and splits, and what its view of the policy is made of, stand in the trainer's own package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from composer_core.batch import Batch, Rollouts
from composer_core.loss.composite import POLICY, Breakdown, CompositeLoss
from composer_core.loss.reduce import global_count
from composer_core.loss.teachers import SelfTeacher, Teacher, make_teacher
from composer_core.protocols import Need, PolicyView, Row
from composer_core.run.collectives import sum_over_ranks, world_size


@dataclass(frozen=True)
class _Window:
    """One optimiser step of this rank."""

    base: Batch
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Composition:
    """See the module.

    Args:
        loss: objective and channels.
        policy: the model that is trained, unwrapped, as it is before the first step.
        native: the trainer computes the objective itself.
    """

    def __init__(self, loss: CompositeLoss, policy: nn.Module, *, native: bool) -> None:
        self.loss, self.native = loss, native
        wanted, frozen = loss.teacher, SelfTeacher("frozen")
        asked = any(Need.REFERENCE in active.needs for active in loss.active)
        self.reference: Teacher | None = make_teacher(policy, frozen) if asked or wanted == frozen else None
        """What channels mean by the model "reference"; None: nobody asks for it."""
        self.teacher: Teacher | None = self.reference if wanted == frozen else None
        """What they mean by "teacher"; None: nobody asks for it."""
        if wanted is not None and wanted != frozen:
            self.teacher = make_teacher(policy, wanted)
        self._window: _Window | None = None
        self._parts: Breakdown | None = None

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def open(self, own: Mapping[str, float], *, base: Batch) -> None:
        """Before the first forward of a step, on every rank: sum its counts over them.

        Args:
            own: this rank's counts of the whole step: those that `Batch.counts` names, and `loss.count(rows)`.
            base: step, total steps and temperature; the rest is filled in here.
        """
        self._window = _Window(replace(base, counts=sum_over_ranks(own)))

    @property
    def base(self) -> Batch:
        """What the micro-batches of the open step have in common: step, temperature and counts."""
        return self._open_window().base

    @property
    def counts(self) -> Mapping[str, float]:
        """Of the open step, over all ranks."""
        return self.base.counts

    def loss_of(
        self,
        view: PolicyView,
        rollouts: Rollouts | None,
        rows: Mapping[str, Sequence[Row | None]],
        *,
        stock: Tensor | None = None,
    ) -> Tensor:
        """What the trainer backpropagates for one micro-batch, scaled for its mean over ranks.

        Args:
            view: the policy, of this micro-batch alone.
            rollouts: of this micro-batch; None where there are none.
            rows: channel -> its rows of this micro-batch.
            stock: the trainer's own policy loss, scaled for a mean over ranks too; None: the core's objective is
                computed. A trainer that asks for the objective in the middle of its own loss calls `policy_of` there,
                times the ranks, and passes the whole here.

        Raises:
            NonFinite: a channel's loss, or that of the core's objective.
        """
        policy = self.policy_of(view, rollouts) if stock is None else stock / world_size()
        # gradients are averaged over ranks, and these are sums over global counts
        return world_size() * (policy + self.channels_of(view, rollouts, rows, policy=policy))

    def policy_of(self, view: PolicyView, rollouts: Rollouts | None) -> Tensor:
        """The core's objective on one micro-batch, a scalar: local sum / global count; 0 where there is none.

        Raises:
            NonFinite: it.
        """
        if self.loss.objective is None:
            return torch.zeros(())
        window = self._open_window()
        term = self.loss.policy(view, replace(window.base, rollouts=rollouts))
        divisor = global_count(self.counts, term.count)
        for name, value in term.metrics.items():
            window.sums[f"{POLICY}/{name}"] += float(value.detach() / divisor)
        return term.sum / divisor

    def channels_of(
        self, view: PolicyView, rollouts: Rollouts | None, rows: Mapping[str, Sequence[Row | None]], *, policy: Tensor
    ) -> Tensor:
        """The channels on one micro-batch, a scalar: weighted local sums / global counts. Arguments as of `loss_of`.

        `policy` is this rank's share of the policy loss, for the log: a local sum / global count.

        Raises:
            NonFinite: a channel's loss.
        """
        window = self._open_window()
        batches = self.loss.batches(rows, replace(window.base, rollouts=rollouts))
        self._parts = self.loss.channels(view, batches)
        window.sums["loss/policy"] += float(policy.detach())
        window.sums["loss/total"] += float(policy.detach() + self._parts.total.detach())
        return self._parts.total

    def add_up(self) -> None:
        """After the backward of a micro-batch: its sums, which hold the gradient's norms only now."""
        if self._parts is not None:
            for name, value in self._parts.sums().items():
                self._open_window().sums[name] += float(value)
        self._parts = None

    def drop(self) -> None:
        """In place of `add_up`, where a micro-batch was found not to be finite: nothing of its channels is added."""
        self._parts = None

    def close(self) -> dict[str, float]:
        """After the last backward of a step, on every rank: its metrics over all of them."""
        window = self._open_window()
        self._window = None
        return self.loss.metrics(sum_over_ranks(window.sums), window.base.counts)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the optimiser's step, on every rank: channels and teachers take theirs.

        Args:
            step: of the optimiser, from 1.
            metrics: what `close` gave.
        """
        self.loss.on_step_end(step, metrics)
        for teacher in {id(t): t for t in (self.teacher, self.reference) if t is not None}.values():
            teacher.step()

    def _open_window(self) -> _Window:
        assert self._window is not None, "a micro-batch outside of a step"
        return self._window

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
