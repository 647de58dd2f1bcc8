"""What a teacher finds likeliest at hinted tokens, read once for a batch and kept through its optimiser steps.

`backend.topk: batch`. `ComposerEngine.teach` reads before the update; what it found goes through verl's queue in two
fields per channel, aligned with the hinted tokens of each sample; `Taught` gives it to the view of each micro-batch as
logits that a `Tap` takes where the teacher's own would stand. So no teacher runs while the training forward's logits
are there, and the formulas stay the core's.

verl's hook for logits processors would be called at the same place. It hands out logits that are divided by the
sampling temperature already, and each reader's gradient by them is a further tensor of their size, so it is not used.
Letters: S samples, K hinted tokens, k entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_core.batch import Hints, Rollouts, Seqs
from composer_core.divergences import Divergence, Support
from composer_core.errors import RunFailed, UsageError
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.distributions import log_probs
from composer_core.loss.head import chunk_size
from composer_core.protocols import Model

_NO_TOKEN = -1
"""The only row of a sample that has no hint: queue and splits of verl's are not asked to carry empty ones."""


@dataclass(frozen=True)
class Source:
    """A channel that learns over the teacher's top k."""

    channel: str
    spec: Divergence
    model: Model
    """Whose weights read the hint."""

    @property
    def fields(self) -> tuple[str, str]:
        """In a batch of verl's: token ids and log-probs, each (S, K, k + 1) jagged."""
        return f"composer_taught_ids_{self.channel}", f"composer_taught_logps_{self.channel}"


@dataclass(frozen=True)
class Taught:
    """What a teacher has found for the hints of one micro-batch, sample by sample."""

    source: Source
    ids: Tensor
    """(K, k + 1): the likeliest first; the last is the hinted token itself."""
    logps: Tensor
    """(K, k + 1) at the temperature of `source.spec`."""

    def answers(self, spec: Divergence, model: Model) -> bool:
        """Whether it was read for this divergence."""
        return (self.source.spec, self.source.model) == (spec, model)

    def of(self, hints: Hints, rollouts: Seqs) -> Taught:
        """In the order of the hints whose weight is not 0.

        Raises:
            RunFailed: they are about other tokens.
        """
        real = hints.weight.nonzero().flatten()
        order = by_sample(hints, rollouts)
        tokens = hints.seqs.ids[hints.teacher[real]]
        if not torch.equal(tokens[order], self.ids[:, -1]):
            raise RunFailed(
                f"channel {self.source.channel!r}: what the teacher read before the update is about {len(self.ids)} "
                f"other tokens than the {len(real)} hinted ones of this micro-batch"
            )
        back = order.argsort()
        return Taught(self.source, self.ids[back], self.logps[back])

    def logits(self, rows: slice, vocab: int) -> Tensor:
        """Rows of a teacher that has these entries and gives the rest of its mass to all others alike, (rows, V)."""
        ids, logps = self.ids[rows, :-1], self.logps[rows, :-1]
        least = torch.finfo(logps.dtype).eps
        covered, last = logps.logsumexp(-1, keepdim=True), logps[:, -1:]
        # the rest as `topk.restricted` has it
        rest = torch.log(-torch.expm1(covered.clamp(max=-least))) - math.log(max(vocab - ids.shape[1], 1))
        # their mean is not above the likeliest of them, and a rounding must not lift it into the top k
        others = torch.minimum(rest, last - 16 * least * (1 - last))
        return others.expand(-1, vocab).scatter(1, ids, logps) * self.source.spec.temperature

    def own(self, rows: slice) -> Tensor:
        """Log-probs of the hinted tokens themselves, (rows,)."""
        return self.logps[rows, -1]


def sources(loss: CompositeLoss, *, step: int) -> tuple[Source, ...]:
    """The channels that learn over a top k at this step.

    Raises:
        UsageError: the student's logits are needed to know which entries a channel wants; or two channels want the
            same of one teacher, whose hints nobody could tell apart.
    """
    found: list[Source] = []
    for active in loss.active:
        teacher = getattr(active.channel, "teacher", None)
        model: Model = "policy" if teacher is None or teacher.weights == "live" else "teacher"
        specs = [spec for spec in active.channel.divergences(step) if spec.support.is_topk]
        if any(not is_known_before(spec) for spec in specs) or len(specs) > 1:
            raise _refusal(f"{active.name!r} learns over more than the top k of its teacher alone")
        found += [Source(active.name, spec, model) for spec in specs]
    for number, source in enumerate(found):
        if any((source.spec, source.model) == (other.spec, other.model) for other in found[:number]):
            raise _refusal(f"{source.channel!r} and another channel learn over the same top k of one teacher")
    return tuple(found)


def _refusal(problem: str) -> UsageError:
    return UsageError(
        f"channel {problem}, which cannot be read before the update", at="backend.topk", fix="backend.topk: step"
    )


def is_known_before(spec: Divergence) -> bool:
    """Whether the teacher's top k is all that a divergence needs of it."""
    return spec.support is Support.TOPK_TEACHER and spec.taid is None and spec.gate is None


@torch.no_grad()
def likeliest(logits: Tensor, tokens: Tensor, spec: Divergence) -> tuple[Tensor, Tensor]:
    """Ids and log-probs, (K, k + 1) each, as `Taught` has them, from a teacher's logits, (K, V)."""
    assert spec.k is not None  # as Divergence checks
    vocab = logits.shape[-1]
    step, ids, logps = chunk_size(vocab), [], []
    for rows, own in zip(logits.split(step), tokens.split(step), strict=True):
        known = log_probs(rows, spec.temperature)
        chosen = torch.cat([known.topk(min(spec.k, vocab), dim=-1).indices, own[:, None]], -1)
        ids.append(chosen)
        logps.append(known.gather(-1, chosen))
    return torch.cat(ids), torch.cat(logps)


def by_sample(hints: Hints, rollouts: Seqs) -> Tensor:
    """The hints of weight other than 0 in the order of the samples they are about, (K,); within one as they are."""
    return rollouts.owner[hints.student[hints.weight != 0]].argsort(stable=True)


def for_queue(
    source: Source, found: tuple[Tensor, Tensor], hints: Hints, rollouts: Rollouts
) -> dict[str, list[Tensor]]:
    """`source.fields` of each sample of a micro-batch, from what `likeliest` gave for its hints."""
    order = by_sample(hints, rollouts.seqs)
    counts = rollouts.seqs.owner[hints.student[hints.weight != 0]].bincount(minlength=len(rollouts.seqs)).tolist()
    parts: dict[str, list[Tensor]] = {}
    for field, values, filler in zip(source.fields, found, (_NO_TOKEN, 0.0), strict=True):
        none = values.new_full((1, values.shape[1]), filler)
        parts[field] = [own if len(own) else none for own in values[order].split(counts)]
    return parts


def from_queue(wanted: Sequence[Source], data: Mapping[str, Any]) -> tuple[Taught, ...]:
    """What `for_queue` gave, of a micro-batch of verl's."""
    found = []
    for source in wanted:
        ids, logps = (data[field].values() for field in source.fields)
        real = ids[:, -1] != _NO_TOKEN
        found.append(Taught(source, ids[real], logps[real]))
    return tuple(found)
