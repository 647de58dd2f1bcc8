"""Composer's core: hook specs, loss maths, run spec and command line. Backends and executors are plugins.

The names in `PUBLIC` can be imported from here, and are looked up when they are: `import composer_core` alone imports
neither torch nor any other of their modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_core.loss.compat import entropy_aware_opd_loss as entropy_aware_opd_loss
    from composer_core.loss.compat import generalized_jsd_loss as generalized_jsd_loss
    from composer_core.loss.compose import LossComponents as LossComponents
    from composer_core.loss.compose import compose_loss as compose_loss
    from composer_core.loss.example_batch import build_batch as build_batch
    from composer_core.loss.preference import avg_sequence_logprob as avg_sequence_logprob
    from composer_core.loss.preference import simpo_loss as simpo_loss
    from composer_core.loss.taid_schedule import TAIDScheduler as TAIDScheduler
    from composer_core.loss.targets import taid_loss as taid_loss
    from composer_core.loss.targets import teacher_entropy as teacher_entropy
    from composer_core.teachers.pairs import extract_dpo_pairs as extract_dpo_pairs
    from composer_core.teachers.pairs import save_pairs as save_pairs
    from composer_core.teachers.replay import replay_and_normalize as replay_and_normalize
    from composer_core.teachers.replay import replay_trace as replay_trace
    from composer_core.traces.ingest import ClaudeCodeIngester as ClaudeCodeIngester
    from composer_core.traces.ingest import IngestionStats as IngestionStats
    from composer_core.traces.model import TraceState as TraceState

__version__ = "0.1.0"

PUBLIC: Mapping[str, str] = {
    "ClaudeCodeIngester": "composer_core.traces.ingest",
    "IngestionStats": "composer_core.traces.ingest",
    "LossComponents": "composer_core.loss.compose",
    "TAIDScheduler": "composer_core.loss.taid_schedule",
    "TraceState": "composer_core.traces.model",
    "avg_sequence_logprob": "composer_core.loss.preference",
    "build_batch": "composer_core.loss.example_batch",
    "compose_loss": "composer_core.loss.compose",
    "entropy_aware_opd_loss": "composer_core.loss.compat",
    "extract_dpo_pairs": "composer_core.teachers.pairs",
    "generalized_jsd_loss": "composer_core.loss.compat",
    "replay_and_normalize": "composer_core.teachers.replay",
    "replay_trace": "composer_core.teachers.replay",
    "save_pairs": "composer_core.teachers.pairs",
    "simpo_loss": "composer_core.loss.preference",
    "taid_loss": "composer_core.loss.targets",
    "teacher_entropy": "composer_core.loss.targets",
}
"""Public name -> the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
