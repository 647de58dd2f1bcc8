"""The order in which a trainer takes the run's prompts, where it has no sampler of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Prompts:
    """Data rows without end, in a new order each time round, the same on every rank."""

    def __init__(self, rows: list[dict[str, Any]], *, seed: int) -> None:
        self._rows = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def take(self, n: int) -> list[dict[str, Any]]:
        """The next `n` rows."""
        while len(self._order) < n:
            self._order += torch.randperm(len(self._rows), generator=self._generator).tolist()
        taken, self._order = self._order[:n], self._order[n:]
        return [self._rows[i] for i in taken]

    def state_dict(self) -> dict[str, Any]:
        """The place among them."""
        return {"generator": self._generator.get_state(), "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        self._generator.set_state(state["generator"])
        self._order = list(state["order"])
