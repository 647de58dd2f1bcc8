"""What a backend holds while it trains: `RunContext` over a run directory.

Every process of a worker makes one. Only the main one (RANK 0) writes; the others' calls do nothing, except that each
has a part of its own in a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import RunFailed, UsageError
from composer_core.protocols import Objective
from composer_core.run.context import Checkpoint, NamedReward, RolloutSample, rank_folder
from composer_core.run.control import Control, agree
from composer_core.run.directory import RunDirectory
from composer_core.run.explain import Explainer
from composer_core.run.metrics import MetricsLog, RolloutLog
from composer_core.run.progress import Display, Silent
from composer_core.run.ranks import rank, rank_count
from composer_core.run.resume import prompts_of
from composer_core.run.sinks import Sink
from composer_core.spec.model import PromptsSpec, RunSpec
from composer_core.spec.rollouts import NONE

if TYPE_CHECKING:
    from composer_core.run.recorded import RecordedRow


class RunSession:
    """Implements `context.RunContext`; the worker makes it, and closes it at the end."""

    def __init__(
        self,
        directory: RunDirectory,
        spec: RunSpec,
        *,
        upstream: Mapping[str, Any],
        rewards: Sequence[NamedReward],
        objective: Objective | None,
        control: Control,
        display: Display,
        channels: Sequence[str] = (),
        sinks: Sequence[Sink] = (),
        resume_from: Checkpoint | None = None,
    ) -> None:
        self.spec = spec
        self.upstream = upstream
        self.rewards = rewards
        self.objective = objective
        self.is_main = rank() == 0
        self.resume_from = resume_from
        self._directory = directory
        self._control = control
        self._display = display
        self._sinks = list(sinks)
        self._explainer = Explainer(channels)
        self._prompts = ""
        self._logged = False
        self._scratch = directory.scratch / f"rank{rank()}"
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed worker's
        self._metrics = MetricsLog(directory.metrics) if self.is_main else None
        self._rollouts = RolloutLog(directory.rollouts) if self.is_main else None

    @property
    def scratch(self) -> Path:
        """A folder of this process for upstream's temporary files; removed at the end."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch

    @property
    def plan_file(self) -> Path:
        """`plan.json` of the run."""
        return self._directory.plan

    @property
    def logs(self) -> Path:
        """`logs/` of the run."""
        return self._directory.logs

    def model_folder(self) -> Path:
        """The policy as a local Hugging Face folder."""
        from composer_core.hf.models import model_folder  # imports transformers

        return model_folder(self.spec.model, seed=self.spec.seed)

    def prompts(self) -> list[dict[str, Any]]:
        """Rows with a `prompt` and all other columns.

        Raises:
            UsageError: they are not those that the checkpoint was made with.
        """
        if self.spec.data.prompts is None:
            return []
        rows = self._rows(self.spec.data.prompts)
        fingerprint = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
        self._begin_with(fingerprint, "prompts", at="data.prompts")
        return rows

    def eval_prompts(self) -> list[dict[str, Any]]:
        """Held-out rows; empty where the spec has no `data.eval`."""
        return [] if self.spec.data.eval is None else self._rows(self.spec.data.eval)

    @property
    def recorded_file(self) -> Path:
        """`recorded.jsonl` of the run."""
        return self._directory.recorded

    def recorded(self) -> Sequence[RecordedRow]:
        """Rows of recorded traces; empty where the spec has none.

        Raises:
            UsageError: they are not those that the checkpoint was made with.
        """
        if self.spec.rollouts != NONE or self.spec.data.traces is None:
            return []
        from composer_core.run.recorded import RecordedRows

        rows = RecordedRows(self.recorded_file)
        self._begin_with(rows.fingerprint, "rows of recorded traces", at=str(self.recorded_file))
        return rows

    def _begin_with(self, fingerprint: str, what: str, *, at: str) -> None:
        """Note what the run began with, for its checkpoints, and refuse anything else in a resumed one."""
        self._prompts = fingerprint
        before = prompts_of(self.resume_from) if self.resume_from is not None else ""
        if before and before != fingerprint:
            raise UsageError(
                f"these are not the {what} that the run began with: its place among them means nothing now",
                at=at,
                fix="put them back as they were, or start a new run",
            )

    def _rows(self, source: PromptsSpec) -> list[dict[str, Any]]:
        from composer_core.data.prompts import load_prompts
        from composer_core.data.rewards import columns_needed

        return load_prompts(source, columns_needed=columns_needed(self.rewards))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, the sinks, the tripwires and the progress display. Steps count from 1."""
        self._check_first(step)
        if self._metrics is None:
            return
        self._metrics.log(step, metrics)
        self._control.observe(step, metrics)
        for sink in list(self._sinks):
            try:
                sink.log(step, metrics)
            except Exception as error:  # somebody else's client, whatever its type; the run is worth more than a plot
                self._sinks.remove(sink)
                self._warn(f"sink {sink.name} is switched off at step {step}: {type(error).__name__}: {error}")
        self._show(step, metrics)
        for sentence in self._explainer.step(step, metrics):
            self.note(sentence)

    def note(self, text: str) -> None:
        """Say something about the run that is no warning: on the terminal and in events.jsonl."""
        self.event("note", text=text)
        with suppress(OSError):  # as in `_show`
            if self.is_main:
                self._display.note(text)

    def _check_first(self, step: int) -> None:
        """A backend that takes no notice of the checkpoint would begin at 1 again, or with another step."""
        if self._logged or self.resume_from is None:
            return
        self._logged = True
        before = self.resume_from.step
        if not before < step <= before + self.spec.train.log_every:
            name = self.spec.backend.use
            raise RunFailed(f"backend {name!r} resumed after step {before}, but logs step {step} first")

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._display.step(step, metrics)
        except OSError as error:  # the terminal or pipe is gone, which is no reason to stop
            self._display = Silent()
            self._warn(f"no progress is shown from step {step} on: {error}")

    def _warn(self, reason: str) -> None:
        self.event("warning", reason=reason)

    def log_rollouts(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Lines of rollouts.jsonl."""
        if self._rollouts is not None:
            self._rollouts.log(step, samples)

    def event(self, kind: str, **facts: Any) -> None:
        """One line of events.jsonl."""
        if self.is_main:
            self._directory.event(kind, **facts)

    def stop_reason(self) -> str | None:
        """Why this process wants the run to end after this step, or None."""
        return self._control.reason()

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to fill; it becomes `checkpoints/step_N`, that of another rank than 0 `rank<r>/` in it.

        A collective: no rank leaves this before the checkpoint is complete, and it holds what all of them wrote.

        Raises:
            RunFailed: this is rank 0, and does not see what another rank wrote.
        """
        if not self.is_main:
            yield self._throwaway(f"step_{step}")
            agree(None)  # rank 0 may take it,
            agree(None)  # and has: it would be gone with this process
            return
        facts = {"prompts": self._prompts}
        with self._directory.checkpoint(step, keep=self.spec.checkpoint.keep, **facts) as folder:
            yield folder
            agree(None)
            self._take_parts(folder, step)
        agree(None)
        self.event("checkpoint", step=step)

    def _take_parts(self, folder: Path, step: int) -> None:
        for number in range(1, rank_count()):
            part = self._directory.scratch / f"rank{number}" / f"step_{step}"
            if not part.is_dir():
                raise RunFailed(
                    f"rank {number} left no folder for checkpoint {step}", fix="a run directory that all ranks share"
                )
            os.replace(part, rank_folder(folder, number))

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
        """Close the files, the sinks and the display, remove the scratch folder."""
        with suppress(OSError):  # as in `_show`: nobody is there to see it
            self._display.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # as in `log_step`
                self._warn(f"sink {sink.name} did not close: {type(error).__name__}: {error}")
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
