"""What a backend holds while it trains: `RunContext` over a run directory.

Every process of a worker makes one; only the main one (RANK 0) writes, and the others' calls do nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from composer_core.protocols import Objective
from composer_core.run.context import NamedReward, RolloutSample
from composer_core.run.control import StopSignals
from composer_core.run.directory import RunDirectory
from composer_core.run.metrics import MetricsLog, RolloutLog
from composer_core.run.progress import Display
from composer_core.spec.model import RunSpec


class RunSession:
    """Implements `context.RunContext`; the worker makes it, and closes it at the end."""

    def __init__(
        self,
        directory: RunDirectory,
        spec: RunSpec,
        *,
        upstream: Mapping[str, Any],
        rewards: Sequence[NamedReward],
        objective: Objective,
        signals: StopSignals,
        display: Display,
    ) -> None:
        self.spec = spec
        self.upstream = upstream
        self.rewards = rewards
        self.objective = objective
        self.is_main = rank() == 0
        self._directory = directory
        self._signals = signals
        self._display = display
        self._scratch = directory.path / "scratch" / f"rank{rank()}"
        self._metrics = MetricsLog(directory.metrics) if self.is_main else None
        self._rollouts = RolloutLog(directory.rollouts) if self.is_main else None

    @property
    def scratch(self) -> Path:
        """A folder of this process for upstream's temporary files; removed at the end."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch

    def model_folder(self) -> Path:
        """The policy as a local Hugging Face folder."""
        from composer_core.hf.models import model_folder  # imports transformers

        return model_folder(self.spec.model, seed=self.spec.seed)

    def prompts(self) -> list[dict[str, Any]]:
        """Rows with a `prompt` and all other columns."""
        from composer_core.data.prompts import load_prompts
        from composer_core.data.rewards import columns_needed

        return load_prompts(self.spec.data.prompts, columns_needed=columns_needed(self.rewards))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl and the progress display. Steps count from 1."""
        if self._metrics is not None:
            self._metrics.log(step, metrics)
            self._display.step(step, metrics)

    def log_rollouts(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Lines of rollouts.jsonl."""
        if self._rollouts is not None:
            self._rollouts.log(step, samples)

    def event(self, kind: str, **facts: Any) -> None:
        """One line of events.jsonl."""
        if self.is_main:
            self._directory.event(kind, **facts)

    def stop_reason(self) -> str | None:
        """Why the run should end after this step, or None."""
        return self._signals.reason

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to fill; it becomes `checkpoints/step_N`. Other processes than the main one get a throwaway."""
        if not self.is_main:
            yield self._throwaway(f"step_{step}")
            return
        with self._directory.checkpoint(step, keep=self.spec.checkpoint.keep) as folder:
            yield folder
        self.event("checkpoint", step=step)

    @contextmanager
    def trained_model(self) -> Iterator[Path]:
        """A folder to fill; it becomes `model/`. Other processes than the main one get a throwaway."""
        if not self.is_main:
            yield self._throwaway("model")
            return
        with self._directory.trained_model() as folder:
            yield folder
        self.event("model")

    def close(self) -> None:
        """Close the files and the display, remove the scratch folder."""
        self._display.close()
        for log in (self._metrics, self._rollouts):
            if log is not None:
                log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        with suppress(OSError):  # other processes' folders may still stand in it; the last one out removes it
            self._scratch.parent.rmdir()

    def _throwaway(self, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        return folder


def rank() -> int:
    """The number of this process among those of the worker; 0 writes."""
    return int(os.environ.get("RANK", "0"))
