"""Where the toy trainer stands between two optimiser steps, and how a checkpoint keeps it.

Weights and optimiser are in `toy_files.py`; here are the rollouts that more optimiser steps are still to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composer_core.batch import Rollouts, Seqs
from composer_core.run.context import RolloutSample
from composer_core.testing.accumulate import Window


@dataclass(frozen=True)
class Generation:
    """One set of rollouts, ready for `iterations` optimiser steps."""

    window: Window
    samples: list[RolloutSample]
    metrics: dict[str, float]


def state_of(generation: Generation) -> dict[str, Any]:
    """As `run.state.save_state` takes it."""
    window = generation.window
    rollouts = {**vars(window.rollouts), "seqs": vars(window.rollouts.seqs)}
    return {
        "window": {**vars(window), "rollouts": rollouts, "splits": [list(split) for split in window.splits]},
        "samples": [asdict(sample) for sample in generation.samples],
        "metrics": generation.metrics,
    }


def generation_of(state: Mapping[str, Any]) -> Generation:
    """What `state_of` was given."""
    window = state["window"]
    rollouts = window["rollouts"]
    seqs, uid = Seqs(**rollouts["seqs"]), tuple(rollouts["uid"])
    return Generation(
        window=Window(**{**window, "rollouts": Rollouts(**{**rollouts, "seqs": seqs, "uid": uid})}),
        samples=[RolloutSample(**sample) for sample in state["samples"]],
        metrics=dict(state["metrics"]),
    )
