"""Which network reads, and under what conditions: what views of a policy have in common.

Forwards themselves are each view's own (`views.py`, and those of trainers that wrap their models).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from composer_core.batch import Hints, Seqs
from composer_core.errors import RunFailed
from composer_core.loss.teachers import Teacher
from composer_core.protocols import Model


class Models:
    """The networks behind a view's names."""

    def __init__(
        self,
        policy: nn.Module,
        *,
        teacher: nn.Module | Teacher | None = None,
        reference: nn.Module | Teacher | None = None,
    ) -> None:
        self._models: dict[Model, nn.Module | Teacher | None] = {
            "policy": policy,
            "teacher": teacher,
            "reference": reference,
        }

    def network(self, model: Model) -> nn.Module:
        """The one that is called.

        Raises:
            RunFailed: there is none of this name.
        """
        found = self._models[model]
        if found is None:
            raise RunFailed(f"a loss asks for the {model} model, and this trainer was given none")
        return found.network if isinstance(found, Teacher) else found

    @contextmanager
    def reading(self, model: Model, *, grad: bool) -> Iterator[None]:
        """Around its forwards. Without gradient: no dropout either, and a teacher's own conditions."""
        found = self._models[model]
        with found.reading() if isinstance(found, Teacher) else nullcontext():
            if grad:
                yield
            else:
                with torch.no_grad(), _evaluating(self.network(model)):
                    yield


def packed_together(parts: Sequence[Seqs]) -> Seqs:
    """All their sequences, one behind the other; what is scored is left out."""
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([seqs.lengths for seqs in parts])
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Seqs(ids=torch.cat([seqs.ids for seqs in parts]), cu=cu)


def given(rollouts: Seqs | None) -> Seqs:
    """Those that hints point at.

    Raises:
        RunFailed: there are none.
    """
    if rollouts is None:
        raise RunFailed("a divergence needs rollouts, and this view has none: hints point at their tokens")
    return rollouts


def check_same_tokens(hints: Hints, rollouts: Seqs) -> None:
    """Refuse hints that pair different tokens, or one that nothing predicts; filler may.

    Raises:
        RunFailed: with the first of them.
    """
    real = hints.weight != 0
    differs = (rollouts.ids[hints.student] != hints.seqs.ids[hints.teacher]) & real
    unpredicted = (rollouts.first[hints.student] | hints.seqs.first[hints.teacher]) & real
    for wrong, what in ((differs, "student and teacher have different tokens"), (unpredicted, "nothing predicts it")):
        if wrong.any():
            k = int(wrong.nonzero()[0])
            raise RunFailed(
                f"hint token {k} pairs rollout token {int(hints.student[k])} with teacher token "
                f"{int(hints.teacher[k])}: {what}",
                fix="the channel's collate must point both at one and the same token, not the first of its sequence",
            )


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """No dropout inside; every submodule gets its own mode back, also one that was frozen in eval before."""
    training = [module for module in network.modules() if module.training]
    for module in training:  # not network.eval(), which would walk over all of them once more
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
