"""From one optimiser step's rollouts to gradients: the part of a backend that every adapter must get right.

Counts are made over all ranks and the whole window before any forward; each micro-batch adds local sums divided by
those; so the gradient does not depend on how the window is split over micro-batches or ranks. Runs on one process,
or on several when torch.distributed is initialised. No sampling, rewards or optimiser here: `toy.py` has those, and
tests feed fixed rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import NonFinite
from composer_core.loss.composite import POLICY, CompositeLoss, Rows
from composer_core.loss.reduce import global_count
from composer_core.loss.views import ModelView
from composer_core.run.collectives import sum_over_ranks, world_size
from composer_core.run.control import agree


@dataclass(frozen=True)
class Window:
    """What one optimiser step is made of, on this rank."""

    rollouts: Rollouts
    rows: Rows
    """Channel -> one row or None per sequence, or the rows it drew."""
    splits: Sequence[Sequence[int]]
    """Indices of the sequences in each micro-batch."""
    longest: int
    """Completion tokens allowed, for the `max_tokens` count."""


def accumulate_gradients(
    policy: nn.Module, loss: CompositeLoss, window: Window, *, base: Batch, reference: nn.Module | None = None
) -> dict[str, float]:
    """Add the window's gradient to `policy`, equal on all ranks; returns the step's losses, over all ranks.

    Args:
        policy: the model in training mode; its gradients are those of earlier calls, usually None.
        loss: objective and channels.
        window: this rank's rollouts.
        base: step, total steps and temperature; the rest is filled in per micro-batch.
        reference: serves as both `reference` and (frozen) `teacher` to channels that ask for one.

    Raises:
        NonFinite: a loss is not finite on some rank; on all of them, with the text of the first.
    """
    counts = sum_over_ranks({**_own_counts(window), **loss.count(window.rows)})
    logged: defaultdict[str, float] = defaultdict(float)
    fault = None
    try:
        for indices, rows in zip(window.splits, loss.split(window.rows, window.splits), strict=True):
            batch = replace(base, rollouts=take(window.rollouts, indices), counts=counts)
            for name, value in _add_gradients(policy, loss, batch, rows=rows, reference=reference).items():
                logged[name] += float(value.detach())
    except NonFinite as error:
        fault = error.problem
    # before the next collective, which a rank must not enter alone
    if (fault := agree(fault)) is not None:
        raise NonFinite(fault)
    _average_gradients(policy)
    return {**loss.metrics(sum_over_ranks(logged), counts), "tokens": counts["tokens"]}


def _add_gradients(
    policy: nn.Module, loss: CompositeLoss, batch: Batch, *, rows: Rows, reference: nn.Module | None
) -> dict[str, Tensor]:
    """One micro-batch's backward; its sums for the log."""
    assert batch.rollouts is not None
    view = ModelView(policy, rollouts=batch.rollouts.seqs, teacher=reference, reference=reference)
    term = loss.policy(view, batch)
    divisor = global_count(batch.counts, term.count)
    parts = loss.channels(view, loss.batches(rows, batch))
    total = term.sum / divisor + parts.total
    # gradients are averaged over ranks later, as DDP does it: a local sum over a global count would arrive
    # world_size times too small. Undo that once, here.
    (world_size() * total).backward()  # type: ignore[no-untyped-call]
    own = {f"{POLICY}/{key}": value / divisor for key, value in term.metrics.items()}
    return {"loss/total": total, "loss/policy": term.sum / divisor, **own, **parts.sums()}


def take(rollouts: Rollouts, indices: Sequence[int]) -> Rollouts:
    """Some sequences of packed rollouts, in the order given."""
    bounds = rollouts.seqs.cu.tolist()
    spans = [torch.arange(bounds[i], bounds[i + 1]) for i in indices]
    tokens = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    sequences = torch.tensor(list(indices), dtype=torch.int64)
    lengths = rollouts.seqs.lengths[sequences]

    def pick(values: Tensor | None, at: Tensor) -> Tensor | None:
        return None if values is None else values[at]

    return Rollouts(
        seqs=Seqs(
            ids=rollouts.seqs.ids[tokens],
            cu=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            scored=pick(rollouts.seqs.scored, tokens),
        ),
        action=rollouts.action[tokens],
        advantages=pick(rollouts.advantages, tokens),
        old_logps=pick(rollouts.old_logps, tokens),
        sampler_logps=pick(rollouts.sampler_logps, tokens),
        ref_logps=pick(rollouts.ref_logps, tokens),
        rewards=pick(rollouts.rewards, sequences),
        group=pick(rollouts.group, sequences),
        uid=tuple(rollouts.uid[i] for i in indices) if rollouts.uid else (),
    )


def _own_counts(window: Window) -> dict[str, float]:
    sequences = float(len(window.rollouts.seqs))
    return {
        "tokens": float(window.rollouts.action.sum()),
        "sequences": sequences,
        "max_tokens": sequences * window.longest,
        "micro_batches": float(len(window.splits)),
    }


def _average_gradients(policy: nn.Module) -> None:
    if not dist.is_initialized():
        return
    for parameter in policy.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # not used on this rank: it must still join the collective
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size()
