"""The one loss: policy objective plus weight x each channel, and what a backend needs to feed and save it.

    rows    = loss.prepare(rollout)           where rollouts end: JSON, one row or None per channel
    counts  = all_reduce(loss.count(rows))    whole window, all ranks, before any forward
    batches = loss.batches(rows, base)        per micro-batch, after every shuffle
    term    = loss.policy(view, base)         unless the trainer computes the objective itself
    parts   = loss.channels(view, batches)    divided by the counts: here, and nowhere else

A channel of weight 0 is not there at all: not prepared, counted, collated or computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Batch, Hints, Pairs
from composer_core.errors import RunFailed, UsageError
from composer_core.loss.reduce import global_count
from composer_core.protocols import LossChannel, Objective, PolicyView, RolloutText, Row, Stateful, Term

Rows = Mapping[str, Sequence[Row | None]]
"""Per channel, one row or None for each rollout, in the rollouts' order."""

POLICY = "policy"
"""What the objective is called in metrics, errors and saved state; no channel may be."""
ROWS, ACTIVE = "rows", "active"
"""Counts made here for every channel: all its rows, and those that are not None."""


@dataclass(frozen=True)
class ActiveChannel:
    """A channel of the spec, loaded."""

    name: str
    weight: float
    channel: LossChannel


@dataclass(frozen=True)
class Part:
    """One channel's share of one micro-batch, for the log; nothing here carries a gradient."""

    value: Tensor
    """Sum / global count, before the weight; adds up over micro-batches and ranks to the channel's loss."""
    weight: float
    metrics: Mapping[str, Tensor]
    """Divided by the same count; they add up likewise."""
    active: float
    """Share of the step's rows that held something, over all ranks."""


@dataclass(frozen=True)
class Breakdown:
    """The channels' part of the loss on one micro-batch."""

    total: Tensor
    """Scalar with gradient: local sums over global counts. Where upstream averages gradients over ranks, the backend
    multiplies it by the number of ranks."""
    terms: Mapping[str, Part]


class CompositeLoss:
    """The objective and the channels of a run."""

    def __init__(self, channels: Sequence[ActiveChannel], objective: Objective) -> None:
        names = [channel.name for channel in channels]
        for name in names:
            if name == POLICY or names.count(name) > 1:
                taken = "the objective" if name == POLICY else "another channel"
                raise UsageError(f"a channel is called {name!r}, which is the name of {taken}", at="loss.channels")
        self.objective = objective
        self.active = tuple(channel for channel in channels if channel.weight != 0)
        """Those that are computed, in the spec's order."""

    # -- feeding -----------------------------------------------------------------------------------------------------

    def prepare(self, rollout: RolloutText) -> dict[str, Row | None]:
        """Each channel's row for one finished rollout."""
        return {active.name: active.channel.prepare(rollout) for active in self.active}

    def count(self, rows: Rows) -> dict[str, float]:
        """Local counts as "<channel>.<name>", additive over rows; the backend sums them over ranks and window.

        Raises:
            RunFailed: a channel counts other names for one row than for another, or a name that is made here.
        """
        counts: dict[str, float] = {}
        for name, channel, channel_rows in self._each(rows):
            counts[f"{name}.{ROWS}"] = float(len(channel_rows))
            counts[f"{name}.{ACTIVE}"] = float(sum(row is not None for row in channel_rows))
            own = dict.fromkeys(channel.count(None), 0.0)
            for row in channel_rows:
                counted = channel.count(row)
                _check_names(name, counted, expected=own)
                own = {key: own[key] + value for key, value in counted.items()}
            counts |= {f"{name}.{key}": value for key, value in own.items()}
        return counts

    def batches(self, rows: Rows, base: Batch) -> dict[str, Batch]:
        """Each channel's own batch: `base` with what its `collate` made of these rows."""
        made: dict[str, Batch] = {}
        for name, channel, channel_rows in self._each(rows):
            tensors = channel.collate(channel_rows, base.rollouts)
            if isinstance(tensors, Hints):
                made[name] = replace(base, hints=tensors)
            elif isinstance(tensors, Pairs):
                made[name] = replace(base, pairs=tensors)
            else:
                made[name] = replace(base, extra=tensors)
        return made

    # -- computing ---------------------------------------------------------------------------------------------------

    def channels(self, view: PolicyView, batches: Mapping[str, Batch]) -> Breakdown:
        """Sum of weight x local sum / global count over the channels, each from its own batch.

        Raises:
            RunFailed: a term is not finite, or is to be divided by a count that nobody made.
        """
        total = torch.zeros(())
        terms: dict[str, Part] = {}
        for active in self.active:
            batch = batches[active.name]
            term = active.channel.loss(view, batch)
            _check_finite(term, name=active.name, step=batch.step)
            divisor = global_count(batch.counts, f"{active.name}.{term.count}", term.count)
            value = term.sum / divisor
            total = total + active.weight * value
            terms[active.name] = Part(
                value=value.detach(),
                weight=active.weight,
                metrics={key: metric.detach() / divisor for key, metric in term.metrics.items()},
                active=active_share(batch.counts, active.name),
            )
        return Breakdown(total, terms)

    def policy(self, view: PolicyView, batch: Batch) -> Term:
        """The objective's local sum; the backend divides it by `batch.counts[term.count]`.

        Raises:
            RunFailed: the sum is not finite.
        """
        term = self.objective.loss(view, batch)
        _check_finite(term, name=POLICY, step=batch.step)
        return term

    # -- state -------------------------------------------------------------------------------------------------------

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the all-reduced metrics of an optimiser step to every part that has state."""
        for _, part in self._stateful():
            part.on_step_end(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        """State by channel name (the objective's under "policy"): JSON values and tensors."""
        return {name: dict(part.state_dict()) for name, part in self._stateful()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFailed: the saved parts are not those of this run.
        """
        parts = dict(self._stateful())
        if set(parts) != set(state):
            raise RunFailed(
                f"the checkpoint holds state of {sorted(state) or 'no channel'}, this run has state in "
                f"{sorted(parts) or 'no channel'}",
                fix="resume with the channels and weights that the checkpoint was made with",
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def _stateful(self) -> Iterator[tuple[str, Stateful]]:
        if isinstance(self.objective, Stateful):
            yield POLICY, self.objective
        for active in self.active:
            if isinstance(active.channel, Stateful):
                yield active.name, active.channel

    def _each(self, rows: Rows) -> Iterator[tuple[str, LossChannel, Sequence[Row | None]]]:
        for active in self.active:
            yield active.name, active.channel, rows[active.name]


def _check_names(channel: str, counted: Mapping[str, float], *, expected: Mapping[str, float]) -> None:
    # a rank whose rows are all None must bring the same names to the all-reduce as the others, or they wait for ever
    if set(counted) != set(expected):
        raise RunFailed(
            f"channel {channel!r} counts {sorted(counted)} for a row and {sorted(expected)} for none",
            fix="return the same names from `count` for every row, None included",
        )
    if taken := {ROWS, ACTIVE} & set(counted):
        raise RunFailed(f"channel {channel!r} counts {sorted(taken)}, which the core counts itself", fix="rename it")


def _check_finite(term: Term, *, name: str, step: int) -> None:
    value = float(term.sum.detach())
    if value != value or value in (float("inf"), float("-inf")):
        raise RunFailed(
            f"the loss of {name!r} is {value} at step {step}",
            fix="lower train.learning_rate or the channel's weight; `loss/` in metrics.jsonl shows where it began",
        )


def active_share(counts: Mapping[str, float], name: str) -> float:
    """Share of a channel's rows that are not None, from the step's counts."""
    return counts.get(f"{name}.{ACTIVE}", 0.0) / max(counts.get(f"{name}.{ROWS}", 0.0), 1.0)
