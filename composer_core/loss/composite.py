"""The one loss: policy objective plus weight x each channel, and what a backend needs to feed and save it.

    rows    = loss.prepare(rollout)           where rollouts end: JSON, one row or None per channel (or `prepare_all`)
    rows   |= loss.draw(step, rank, world)    rows of channels that have their own, such as preference pairs
    counts  = all_reduce(loss.count(rows))    whole window, all ranks, before any forward
    rows    = loss.split(rows, splits)[m]     one micro-batch of them, after every shuffle
    batches = loss.batches(rows, base)
    term    = loss.policy(view, base)         unless the trainer computes the objective itself
    parts   = loss.channels(view, batches)    divided by the counts: here, and nowhere else
    sums   += parts.sums()                    over micro-batches, then ranks
    logged  = loss.metrics(sums, counts)      the names of metrics.jsonl

A channel of weight 0 is not there at all: not prepared, counted, collated or computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from composer_core.batch import Batch, Hints, Pairs
from composer_core.errors import NonFinite, RunFailed, UsageError
from composer_core.loss.channel import Draws, Planned, PreparesAll
from composer_core.loss.reduce import global_count
from composer_core.loss.teachers import SelfTeacher
from composer_core.loss.watch import Measure, Watched
from composer_core.protocols import LossChannel, Need, Objective, PolicyView, RolloutText, Row, Stateful, Term

Rows = Mapping[str, Sequence[Row | None]]
"""Per channel, one row or None for each rollout, in the rollouts' order; of a channel that draws, its own rows."""

POLICY = "policy"
"""What the objective is called in metrics, errors and saved state; no channel may be."""
ROWS, ACTIVE = "rows", "active"
"""Counts made here for every channel: all its rows, and those that are not None."""
GRADIENT_SQUARE, GRADIENT_NORM = "grad_square", "grad_norm"
"""What `Breakdown.sums` adds up, and what `CompositeLoss.metrics` makes of it."""


@dataclass(frozen=True)
class ActiveChannel:
    """A channel of the spec, loaded."""

    name: str
    weight: float
    channel: LossChannel
    needs: frozenset[Need] = frozenset()
    """The alternative of its needs that the plan chose."""


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
    measure: Measure | None = None
    """Catches the gradient that weight x value sends into what the view handed out; `measure.square` is known after
    the backward and adds up over micro-batches and ranks."""


@dataclass(frozen=True)
class Breakdown:
    """The channels' part of the loss on one micro-batch."""

    total: Tensor
    """Scalar with gradient: local sums over global counts. Where upstream averages gradients over ranks, the backend
    multiplies it by the number of ranks."""
    terms: Mapping[str, Part]
    finite: bool = True
    """False only with `on_nonfinite="skip"`. A step is skipped by all ranks or by none: take the minimum over them and
    over the window before the optimiser."""

    def sums(self) -> dict[str, Tensor]:
        """For the log, detached; each adds up over micro-batches and ranks. `CompositeLoss.metrics` names the rest.

        Ask after the backward: before it, gradient norms are not there.
        """
        sums: dict[str, Tensor] = {}
        for name, part in self.terms.items():
            sums[f"loss/{name}"] = part.value
            sums |= {f"{name}/{key}": value for key, value in part.metrics.items()}
            if part.measure is not None and (square := part.measure.square) is not None:
                sums[f"{GRADIENT_SQUARE}/{name}"] = square
        return sums


class CompositeLoss:
    """The objective and the channels of a run.

    `on_nonfinite="skip"` is for programs that drive a trainer of their own and look at `Breakdown.finite`. No spec can
    ask for it: our backends end a run at the first loss that is not finite, and say which token it was.
    """

    def __init__(
        self,
        channels: Sequence[ActiveChannel],
        objective: Objective | None,
        *,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        names = [channel.name for channel in channels]
        for name in names:
            if name == POLICY or names.count(name) > 1:
                taken = "the objective" if name == POLICY else "another channel"
                raise UsageError(f"a channel is called {name!r}, which is the name of {taken}", at="loss.channels")
        self.objective = objective
        """None where a run learns by channels alone."""
        self.active = tuple(channel for channel in channels if channel.weight != 0)
        """Those that are computed, in the spec's order."""
        self._skips = on_nonfinite == "skip"
        for active in self.active:
            if active.needs and isinstance(active.channel, Planned):
                active.channel.planned(active.needs)

    @property
    def teacher(self) -> SelfTeacher | None:
        """What the channels mean by the model "teacher", for the backend to make; None: nobody asks for one.

        Raises:
            UsageError: two channels want different ones; a trainer has one.
        """
        wanted = {a.name: t for a in self.active if (t := getattr(a.channel, "teacher", None)) is not None}
        if len(set(wanted.values())) > 1:
            said = " and ".join(f"{name!r} wants {teacher.weights} weights" for name, teacher in wanted.items())
            raise UsageError(f"the channels want different teachers: {said}", at="loss.channels")
        return next(iter(wanted.values()), None)

    # -- feeding -----------------------------------------------------------------------------------------------------

    def prepare(self, rollout: RolloutText) -> dict[str, Row | None]:
        """Each channel's row for one finished rollout."""
        return self.prepare_all([rollout])[0]

    def prepare_all(self, rollouts: Sequence[RolloutText]) -> list[dict[str, Row | None]]:
        """`prepare` of each, for rollouts that end together: some channels ask others about them, and that takes as
        long for one as for many.
        """
        rows = {
            active.name: active.channel.prepare_all(rollouts)
            if isinstance(active.channel, PreparesAll)
            else [active.channel.prepare(rollout) for rollout in rollouts]
            for active in self.active
        }
        return [{name: own[index] for name, own in rows.items()} for index in range(len(rollouts))]

    def draw(self, step: int, rank: int, world: int) -> dict[str, Sequence[Row | None]]:
        """Rows for this rank of the channels that have their own, the same whenever a step is asked for."""
        return {
            active.name: active.channel.draw(step, rank, world)
            for active in self.active
            if isinstance(active.channel, Draws) and active.channel.rows_per_step
        }

    def split(self, rows: Rows, splits: Sequence[Sequence[int]]) -> list[dict[str, Sequence[Row | None]]]:
        """Rows per micro-batch: those of rollouts go where their rollout goes (`splits` holds indices of rollouts),
        drawn ones are dealt out in turn, so that no micro-batch gets more than one more than another.
        """
        drawn = {a.name for a in self.active if isinstance(a.channel, Draws) and a.channel.rows_per_step}
        return [
            {
                name: own[m :: len(splits)] if name in drawn else [own[i] for i in indices]
                for name, _, own in self._each(rows)
            }
            for m, indices in enumerate(splits)
        ]

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
            RunFailed: a term is not finite (unless those steps are skipped), or is to be divided by a count that
                nobody made.
        """
        total = torch.zeros(())
        terms: dict[str, Part] = {}
        finite = True
        for active in self.active:
            batch, watched = batches[active.name], Watched(view)
            term = active.channel.loss(watched, batch)
            finite = self._is_finite(term, watched, name=active.name, batch=batch) and finite
            divisor = global_count(batch.counts, f"{active.name}.{term.count}", term.count)
            weighted = active.weight * (term.sum / divisor)
            total = total + weighted
            terms[active.name] = Part(
                value=(term.sum / divisor).detach(),
                weight=active.weight,
                metrics={key: metric.detach() / divisor for key, metric in term.metrics.items()},
                active=active_share(batch.counts, active.name),
                measure=watched.measure(weighted),
            )
        return Breakdown(total, terms, finite)

    def policy(self, view: PolicyView, batch: Batch) -> Term:
        """The objective's local sum; the backend divides it by `batch.counts[term.count]`.

        Raises:
            RunFailed: the sum is not finite (unless those steps are skipped: the backend then looks itself), or there
                is no objective.
        """
        if self.objective is None:
            raise RunFailed("this run has no objective, and the trainer asks for its loss")
        watched = Watched(view)
        term = self.objective.loss(watched, batch)
        self._is_finite(term, watched, name=POLICY, batch=batch)
        return term

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """A step's lines about channels, from `Breakdown.sums` added up over window and ranks and the global counts.

        `loss/<name>`, `weight/<name>`, `active/<name>` (share of rows), `grad_norm/<name>` (weight included),
        `tokens/<name>` (those it counted, all action tokens if it counts none), and `<name>/<metric>`.
        """
        logged = {key: value for key, value in sums.items() if not key.startswith(f"{GRADIENT_SQUARE}/")}
        for active in self.active:
            name = active.name
            logged[f"weight/{name}"] = active.weight
            logged[f"active/{name}"] = active_share(counts, name)
            logged[f"tokens/{name}"] = counts.get(f"{name}.tokens", counts.get("tokens", 0.0))
            if (square := sums.get(f"{GRADIENT_SQUARE}/{name}")) is not None:
                logged[f"{GRADIENT_NORM}/{name}"] = math.sqrt(square)
        return logged

    def _is_finite(self, term: Term, watched: Watched, *, name: str, batch: Batch) -> bool:
        value = float(term.sum.detach())
        if math.isfinite(value) or self._skips:
            return math.isfinite(value)
        fault = watched.fault(batch.rollouts)
        raise NonFinite(
            f"the loss of {name!r} is {value} at step {batch.step}" + (f": {fault}" if fault else ""),
            fix="lower train.learning_rate or the channel's weight; `loss/` in metrics.jsonl shows where it began",
        )

    # -- state -------------------------------------------------------------------------------------------------------

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the all-reduced metrics of an optimiser step to every part that has state.

        A part also finds its own, such as `loss/<name>`, under their bare names, whatever it is called in the spec.
        """
        for name, part in self._stateful():
            own = {key.removesuffix(f"/{name}"): v for key, v in metrics.items() if key.endswith(f"/{name}")}
            part.on_step_end(step, {**metrics, **own})

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


def active_share(counts: Mapping[str, float], name: str) -> float:
    """Share of a channel's rows that are not None, from the step's counts."""
    return counts.get(f"{name}.{ACTIVE}", 0.0) / max(counts.get(f"{name}.{ROWS}", 0.0), 1.0)
