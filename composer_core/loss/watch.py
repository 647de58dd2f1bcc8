"""A view that remembers what it handed out to one loss: for that loss's gradient norm, and to find a bad token.

The norm is caught on its way in the run's own backward, where the loss's graph ends and the model's begins, so it
costs no pass of its own. It is known once that backward has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from composer_core.batch import Hints, Rollouts, Seqs
from composer_core.divergences import Divergence
from composer_core.protocols import Model, PolicyView


@runtime_checkable
class Anchored(Protocol):
    """A view that says what its divergences were computed from."""

    @property
    def anchors(self) -> Sequence[Tensor]:
        """For each divergence so far the student's rows (hidden states, logits or log-probs), of that call alone.

        The gradient by a divergence's values is only its weights; by these rows it says whether anything is learnt.
        """
        ...


@runtime_checkable
class Joins(Protocol):
    """A view that can read several groups of sequences in one forward."""

    def join(self, *seqs: Seqs) -> None:
        """Sequences that will all be asked for: the forward that any of them needs is that of them all."""
        ...


class Measure:
    """Squared norm of the gradient that one loss sends into its anchors."""

    def __init__(self, loss: Tensor, anchors: Sequence[Tensor]) -> None:
        self._scale: Tensor | None = None
        self._squares: list[Tensor] = []
        loss.register_hook(self._meet_loss)  # type: ignore[no-untyped-call]
        for anchor in anchors:
            anchor.register_hook(self._meet_anchor)  # type: ignore[no-untyped-call]

    @property
    def square(self) -> Tensor | None:
        """Of the loss itself, whatever the backend multiplied it with; None before the backward."""
        if self._scale is None:
            return None
        total = self._scale.new_zeros((), dtype=self._scale.dtype)
        for square in self._squares:
            total = total + square.to(total.device, total.dtype)
        scale = self._scale.square()
        return total / scale if bool(scale) else total

    def _meet_loss(self, gradient: Tensor) -> None:
        self._scale = gradient.detach()

    def _meet_anchor(self, gradient: Tensor) -> None:
        self._squares.append(gradient.detach().float().square().sum())


@dataclass(frozen=True)
class _Handed:
    what: str
    values: Tensor
    tokens: Seqs | None
    """Whose flat indices `at` holds; None: the rollouts'."""
    at: Tensor | None
    """Flat token index of each entry; None: the entries are the tokens themselves."""


class Watched:
    """Passes everything on to `view`."""

    def __init__(self, view: PolicyView) -> None:
        self._view = view
        self._handed: list[_Handed] = []
        self._anchors: list[Tensor] = []

    def join(self, *seqs: Seqs) -> None:
        """See `Joins`; nothing where the view cannot."""
        if isinstance(self._view, Joins):
            self._view.join(*seqs)

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`."""
        values = _own(self._view.logps(seqs, model=model, grad=grad, temperature=temperature))
        self._handed.append(_Handed(f"{model} log-prob", values, seqs, None))
        self._anchors.append(values)
        return values

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """See `protocols.PolicyView`."""
        anchored = self._view if isinstance(self._view, Anchored) else None
        before = 0 if anchored is None else len(anchored.anchors)
        values = _own(self._view.divergence(hints, spec, teacher=teacher))
        self._handed.append(_Handed("divergence", values, None, hints.student))
        self._anchors += [values] if anchored is None else anchored.anchors[before:]
        return values

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`."""
        values = _own(self._view.logits(seqs, at, model=model, grad=grad, temperature=temperature))
        self._handed.append(_Handed(f"{model} logits", values, seqs, at))
        self._anchors.append(values)
        return values

    def measure(self, loss: Tensor) -> Measure | None:
        """Watch the gradient of `loss`, a scalar, on its way; None where it has none, or nothing was handed out."""
        anchors = [anchor for anchor in self._anchors if anchor.requires_grad]
        return Measure(loss, anchors) if loss.requires_grad and anchors else None

    def fault(self, rollouts: Rollouts | None) -> str:
        """Which token was the first to get a value that is not finite; empty where all are."""
        for handed in self._handed:
            finite = handed.values.detach().isfinite()
            bad = (~(finite if finite.dim() == 1 else finite.all(-1))).nonzero()
            if len(bad):
                return _place(handed, int(bad[0]), rollouts)
        return ""


def _own(values: Tensor) -> Tensor:
    """An alias for this loss alone: a view may hand out one tensor twice, and a hook must not see both gradients."""
    return values.view_as(values) if values.requires_grad else values


def _place(handed: _Handed, entry: int, rollouts: Rollouts | None) -> str:
    index = entry if handed.at is None else int(handed.at[entry])
    seqs = handed.tokens or (None if rollouts is None else rollouts.seqs)
    if seqs is None:
        return f"the {handed.what} of token {index} is not finite"
    row = int(seqs.owner[index])
    uid = f" ({rollouts.uid[row]})" if rollouts is not None and rollouts.uid and seqs is rollouts.seqs else ""
    position, token = index - int(seqs.cu[row]), int(seqs.ids[index])
    return f"the {handed.what} of row {row}{uid}, token {position} (id {token}), is not finite"
