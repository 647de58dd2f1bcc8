"""The policy inside verl's engine as losses see it.

verl's own forward of the rollouts is the student's; the engine puts a `Tap` behind its logits. Other sequences (a
teacher's, preference pairs) are read by forwards of the whole wrapped model, since FSDP gathers weights there; the
output head sees only the rows that a loss reads (`Reader`). What a teacher has read before the update is not read
again (`taught.py`). Letters: N tokens packed, K hint tokens, V vocabulary, T longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_core.batch import Hints, Seqs
from composer_core.divergences import Divergence, Support
from composer_core.errors import RunFailed
from composer_core.loss.distributions import floored
from composer_core.loss.head import chunk_size
from composer_core.loss.outputs import picked_logps, scaled
from composer_core.loss.reading import Models, check_same_tokens, packed_together
from composer_core.loss.tap import Tap
from composer_core.protocols import Model
from composer_verl.taught import Taught


@dataclass(frozen=True)
class Forward:
    """verl's forward of a micro-batch."""

    seqs: Seqs
    tap: Tap
    """Behind its logits, (S, T, V) padded on the right, or (1, N, V) packed, before any temperature."""
    logps: Tensor
    """(N,) with gradient."""
    temperature: float
    """That of `logps`."""

    def rows(self, at: Tensor) -> Tensor:
        """Rows of `tap` that predict the tokens at flat indices `at`, (len(at),)."""
        if self.tap.logits.shape[0] == 1 and len(self.seqs) != 1:
            return at - 1
        sequence = self.seqs.owner[at]
        return sequence * self.tap.logits.shape[1] + at - self.seqs.cu[sequence] - 1


@dataclass(frozen=True)
class Reader:
    """Forwards of the wrapped model on sequences that verl's own forward has not."""

    models: Models
    pad_id: int
    around_forward: Callable[[], AbstractContextManager[None]]
    """For the engine's autocast."""

    def read(self, seqs: Seqs, at: Tensor, *, model: Model) -> Tensor:
        """Raw logits that predict the tokens at flat indices `at`, (len(at), V). Call it inside `models.reading`."""
        network = self.models.network(model)
        ids, mask = seqs.padded(self.pad_id)
        if not ids.numel():  # nothing here, yet the other ranks run a forward: one padding token joins them
            ids, mask = ids.new_full((1, 1), self.pad_id), mask.new_ones((1, 1))
        mask[:, 0] = True  # an empty sequence would leave its row nothing to attend to
        sequence = seqs.owner[at]
        rows = sequence * ids.shape[1] + at - seqs.cu[sequence] - 1
        with self.around_forward(), _projecting(network, rows):
            logits: Tensor = network(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits.reshape(-1, logits.shape[-1])[: len(at)]


class EngineView:
    """See the module; one per micro-batch.

    `taught` is what teachers have read of its hints before the update; None: they read when they are asked.
    """

    def __init__(self, reader: Reader, forward: Forward, *, taught: Sequence[Taught] | None = None) -> None:
        self._reader, self._models, self._forward, self._taught = reader, reader.models, forward, taught
        # the Seqs and Hints are kept beside what was found: identity is only a key while the object lives
        self._logps: list[tuple[Seqs, Model, bool, float, Tensor]] = [
            (forward.seqs, "policy", True, forward.temperature, forward.logps)
        ]
        self._gaps: list[tuple[Hints, Model, float, Tensor]] = []
        self._joined: list[tuple[Seqs, ...]] = []
        self.anchors: list[Tensor] = []
        """See `loss.watch.Anchored`."""

    def join(self, *seqs: Seqs) -> None:
        """See `loss.watch.Joins`."""
        self._joined.append(seqs)

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (N,), in at least float32."""
        asked = (model, grad, temperature)
        for known, *given, logps in self._logps:
            if known is seqs and tuple(given) == asked:
                return logps
        if seqs is self._forward.seqs and model == "policy":
            together = (seqs,)
            found = [self._of_rollouts(grad=grad, temperature=temperature)]
        else:
            together = next((joined for joined in self._joined if any(part is seqs for part in joined)), (seqs,))
            found = self._of_others(together, model=model, grad=grad, temperature=temperature)
        self._logps += [(part, *asked, logps) for part, logps in zip(together, found, strict=True)]
        return next(logps for part, logps in zip(together, found, strict=True) if part is seqs)

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """See `protocols.PolicyView`: (K,), 0 for filler. The teacher's forward runs whatever the weights are.

        Raises:
            RunFailed: student and teacher tokens are not the same; or the teacher has read other hints than these.
        """
        if (known := self._known_gap(hints, spec, teacher)) is not None:
            return known
        check_same_tokens(hints, self._forward.seqs)
        real = hints.weight.nonzero().flatten()
        student = hints.student[real]
        if self._taught is not None and spec.support.is_topk:
            values, gap = self._from_taught(self._known(spec, teacher).of(hints, self._forward.seqs), student)
        else:
            with self._models.reading(teacher, grad=False):
                taught = self._reader.read(hints.seqs, hints.teacher[real], model=teacher)
            values, gap = self._tapped_divergence(student, taught, spec)
        self._gaps.append((hints, teacher, spec.temperature, _spread(gap, real, hints)))
        return _spread(values, real, hints)

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (len(at), V), divided by the temperature, in at least float32."""
        if seqs is self._forward.seqs and model == "policy":
            rows = self._tapped(at)
            return scaled(rows if grad else rows.detach(), temperature)
        with self._models.reading(model, grad=grad):
            return scaled(self._reader.read(seqs, at, model=model), temperature)

    # -- its parts ---------------------------------------------------------------------------------------------------

    def _tapped_divergence(self, student: Tensor, taught: Tensor, spec: Divergence) -> tuple[Tensor, Tensor]:
        """Values and gap, (K,), of the tokens at `student` from their teacher's logits, (K, V), which are used up."""
        own = self._forward
        values, gap, probe = own.tap.divergence(own.rows(student), taught, spec, ids=own.seqs.ids[student])
        self.anchors.append(probe)
        return values, gap

    def _known(self, spec: Divergence, teacher: Model) -> Taught:
        found = next((own for own in self._taught or () if own.answers(spec, teacher)), None)
        if found is None:
            raise RunFailed(
                f"a loss asks for {spec.support} of the {teacher} model, which nobody read before the update",
                fix="backend.topk: step",
            )
        return found

    def _from_taught(self, taught: Taught, student: Tensor) -> tuple[Tensor, Tensor]:
        """Likewise, a chunk of tokens at a time: no teacher's logits of them all."""
        vocab, found = self._forward.tap.logits.shape[-1], []
        step = chunk_size(vocab)
        for start in range(0, max(len(student), 1), step):  # of none too: they are joined to the graph
            rows = slice(start, start + step)
            logits, spec = taught.logits(rows, vocab), taught.source.spec
            ids = self._forward.seqs.ids[student[rows]]
            seen = floored(logits.gather(-1, ids[:, None]).squeeze(-1) / spec.temperature)
            values, gap = self._tapped_divergence(student[rows], logits, spec)
            found.append((values, gap + seen - floored(taught.own(rows))))  # the token may be none of the top k
        values, gap = (torch.cat(parts) for parts in zip(*found, strict=True))
        return values, gap

    def _known_gap(self, hints: Hints, spec: Divergence, teacher: Model) -> Tensor | None:
        """The values of a sampled divergence without gradient, as an earlier one of the same hints left them behind."""
        if torch.is_grad_enabled() or spec.support is not Support.SAMPLED or spec.taid is not None or spec.gate:
            return None
        asked = (teacher, spec.temperature)
        return next((gap for known, *given, gap in self._gaps if known is hints and tuple(given) == asked), None)

    def _tapped(self, at: Tensor) -> Tensor:
        logits = self._forward.tap.logits
        return logits.reshape(-1, logits.shape[-1])[self._forward.rows(at)]

    def _of_rollouts(self, *, grad: bool, temperature: float) -> Tensor:
        own = self._forward
        if not grad and temperature == own.temperature:
            return own.logps.detach()
        at = _scored(own.seqs)
        with torch.set_grad_enabled(grad):
            return _scatter(picked_logps(self._tapped(at), own.seqs.ids[at], temperature=temperature), at, own.seqs)

    def _of_others(self, parts: Sequence[Seqs], *, model: Model, grad: bool, temperature: float) -> list[Tensor]:
        """One forward of them all."""
        together = packed_together(parts)
        starts = [0, *torch.tensor([len(part.ids) for part in parts]).cumsum(0).tolist()]
        at = [_scored(part) for part in parts]
        flat = torch.cat([own + start for own, start in zip(at, starts, strict=False)])
        with self._models.reading(model, grad=grad):
            rows = self._reader.read(together, flat, model=model)
            logps = picked_logps(rows, together.ids[flat], temperature=temperature)
        split = logps.split([len(own) for own in at])
        return [_scatter(own, where, part) for own, where, part in zip(split, at, parts, strict=True)]


@contextmanager
def _projecting(network: nn.Module, rows: Tensor) -> Iterator[None]:
    """The output head sees only these rows of the flat hidden states; one where there is none, to stay in the graph."""
    some = rows if rows.numel() else rows.new_zeros(1)
    seen: list[bool] = []

    def pick(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *rest = inputs
        seen.append(True)
        return (states.reshape(1, -1, states.shape[-1])[:, some], *rest)

    model: Any = network
    handle = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
    if len(seen) != 1:
        raise RunFailed(f"the output head of {type(network).__name__} ran {len(seen)} times in one forward")


def _scored(seqs: Seqs) -> Tensor:
    return (~seqs.first if seqs.scored is None else seqs.scored & ~seqs.first).nonzero().flatten()


def _scatter(values: Tensor, at: Tensor, seqs: Seqs) -> Tensor:
    """(N,), 0 elsewhere; joined to the graph."""
    return values.new_zeros(seqs.ids.shape).index_put((at,), values)


def _spread(values: Tensor, real: Tensor, hints: Hints) -> Tensor:
    return values.new_zeros(hints.weight.shape).index_put((real,), values)
