"""One golden case as the table sees it, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Inputs are leaves that require grad where a gradient is stored for them."""

    id: str
    family: str
    source: str
    function: str
    args: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    """By the input's name."""
    rtol: float
    atol: float
    note: str


@dataclass(frozen=True)
class Answer:
    """What a case gives here."""

    outputs: Mapping[str, Tensor]
    """`loss` carries the gradient."""
    oracle: bool = False
    """Computed by a reference in the tests, because the package does not ship the form."""
    instead: Mapping[str, Tensor] = field(default_factory=dict)
    """Outputs that must be these and not the stored ones, by a decision that the case's note or the dossier records;
    NaN here means "as stored"."""
    instead_grads: Mapping[str, Tensor] = field(default_factory=dict)


Compute = Callable[[Case], Answer]


def nan_means_zero(case: Case) -> dict[str, Any]:
    """For cases whose note says that upstream divides 0 by 0: the value and the gradient are 0 there."""
    return {
        "instead": {name: torch.where(value.isnan(), 0.0, torch.nan) for name, value in case.outputs.items()},
        "instead_grads": {name: torch.where(value.isnan(), 0.0, torch.nan) for name, value in case.grads.items()},
    }
