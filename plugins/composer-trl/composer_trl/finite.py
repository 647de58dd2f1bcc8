"""Ending a run before a step that is not finite is applied: the same on every process, at one boundary."""

from __future__ import annotations

import math
from typing import Any

from composer_core.errors import NonFinite
from composer_core.run.collectives import world_size
from composer_core.run.control import agree


class FiniteSteps:
    """For a `transformers.Trainer`, in front of it among the bases."""

    _fault: str | None = None
    """Why this process cannot apply the step that it is in; the first reason counts."""

    def _found(self, fault: str) -> None:
        self._fault = self._fault or fault

    def _raise_together(self, *, last: bool) -> None:
        """After the backward of a micro-batch; `last` of its optimiser step.

        Raises:
            NonFinite: some process found a fault; on every process.
        """
        if last or world_size() == 1:  # several must not leave each other in the middle of a step
            fault, self._fault = agree(self._fault), None
            if fault is not None:
                raise NonFinite(fault)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        if not math.isfinite(float(norm)):  # the same on every process by now
            step = self.state.global_step + 1  # type: ignore[attr-defined]
            raise NonFinite(f"the gradient norm is {float(norm)} at step {step}")
        return norm
