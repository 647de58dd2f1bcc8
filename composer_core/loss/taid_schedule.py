"""When TAID's t moves from the student towards the teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class TAIDScheduler:
    """t rises at least linearly from `t_start` to `t_end`, and faster while the loss falls. 2501.16937, algorithm 1.

    With the loss of a step L and that of the update before it L': m <- beta m + (1 - beta) (L' - L) / L',
    d = alpha sigmoid(m) (1 - t), t <- min(t_end, max(linear floor, t + d)). The loss is this step's, the new t acts at
    the next. Call it once per optimiser step, on every rank with the same all-reduced loss; with the default alpha the
    adaptive part is about 2.5e-4 (1 - t) per update, hardly more than the floor in runs under some thousand steps.

    `disable_adaptive` leaves the floor alone, a function of the step only: loosely coupled replicas, whose losses
    differ, must use it.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        num_train_steps: int,
        *,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,
    ) -> None:
        if num_train_steps < 1:
            raise ValueError(f"num_train_steps must be >= 1, got {num_train_steps}")
        if not (0 <= t_start < 1 and 0 < t_end <= 1 and t_start <= t_end):
            raise ValueError(f"0 <= t_start <= t_end <= 1 must hold with t_start < 1, got {t_start} and {t_end}")
        if not (0 <= alpha <= 1 and 0 <= beta <= 1):
            raise ValueError(f"alpha and beta must be in [0, 1], got {alpha} and {beta}")
        self._num_train_steps = num_train_steps
        self._t_start, self._t_end = t_start, t_end
        self._alpha, self._beta = alpha, beta
        self._disable_adaptive = disable_adaptive
        self._t = t_start
        self._previous: float | None = None
        self._momentum = 0.0
        self.skipped = 0
        """Updates whose loss was not finite; they moved no momentum."""

    @property
    def t(self) -> float:
        """The teacher's share of the target at the coming step."""
        return self._t

    @property
    def momentum(self) -> float:
        """Running mean of the loss's relative fall."""
        return self._momentum

    def update_t(self, loss: float | Tensor, global_step: int) -> float | None:
        """Take in this step's loss; returns d, or None when there was no finite loss before it to compare with."""
        delta = self._learn(float(loss))
        floor = self._floor(global_step)
        if self._disable_adaptive:
            self._t = floor
        elif delta is not None:
            self._t = min(self._t_end, max(floor, self._t + delta))
        return delta

    def _learn(self, loss: float) -> float | None:
        if not math.isfinite(loss):  # one NaN in the momentum would stay there for ever
            self.skipped += 1
            return None
        previous, self._previous = self._previous, loss
        if previous is None:
            return None
        fall = (previous - loss) / (previous + 1e-15)
        self._momentum = self._beta * self._momentum + (1 - self._beta) * fall
        return self._alpha * _sigmoid(self._momentum) * (1 - self._t)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"t": self._t, "previous": self._previous, "momentum": self._momentum, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._t, self._momentum = float(state["t"]), float(state["momentum"])
        self._previous = None if state["previous"] is None else float(state["previous"])
        self.skipped = int(state["skipped"])

    def _floor(self, global_step: int) -> float:
        progress = min(max(global_step / self._num_train_steps, 0.0), 1.0)
        return self._t_start + (self._t_end - self._t_start) * progress


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
