"""Runs a plan on verl: starts Ray, hands verl its configuration, logs, saves, evaluates and stops.

The worker process is verl's driver. `trainer.py` has one generation, `engine.py` the loss, `cluster.py` Ray.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError, RayTaskError

from composer_core.errors import ComposerError, NonFinite, RunFailed
from composer_core.loss.composite import CompositeLoss
from composer_core.protocols import TrainResult
from composer_core.run.context import RunContext
from composer_core.run.state import load_state, save_state
from composer_verl import surface
from composer_verl.cluster import cluster
from composer_verl.config import machine_fields
from composer_verl.settings import VerlSettings
from composer_verl.trainer import ComposerTrainer

PLACE = "verl"
"""State of the driver in a checkpoint, beside the ranks'."""


class VerlBackend:
    """`backend: {use: verl}`."""

    def __init__(self, settings: VerlSettings) -> None:
        self.settings = settings

    def check(self) -> list[str]:
        """Differences between the installed verl and the expected one."""
        return surface.problems()

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to `train.steps`, or to the end of the generation after which `run.stop_reason()` gives a reason."""
        config = config_of(run)
        options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        with _told_plainly(), cluster(options, logs=run.logs, environment=_environment()), _queue(config):
            trainer = ComposerTrainer(config, run, loss, self.settings)
            trainer.start()
            return _Training(trainer, run).run_steps()


class _Training:
    """The loop over generations."""

    def __init__(self, trainer: ComposerTrainer, run: RunContext) -> None:
        self._trainer, self._run, self._spec = trainer, run, run.spec
        self._unlogged: list[Mapping[str, float]] = []
        if run.resume_from is not None:
            trainer.go_to(load_state(run.resume_from.folder, PLACE))
        self._place = trainer.place()

    def run_steps(self) -> TrainResult:
        trainer, last = self._trainer, self._spec.train.steps
        reason: str | None = None
        while trainer.steps < last and reason is None:
            before = trainer.steps
            try:
                lines = trainer.one_generation()
            except NonFinite as error:
                self._save_before(before)
                return TrainResult(steps=trainer.steps, stopped=error.problem)
            self._place = trainer.place()
            self._log(before, lines, self._evaluated(before))
            if trainer.steps < last:
                reason = self._run.stop_reason()
            if reason is not None or self._due(before, self._spec.checkpoint.every):
                self._save(trainer.steps)
        if reason is None:
            with self._run.trained_model() as folder:
                trainer.export(folder)
        return TrainResult(steps=trainer.steps, stopped=reason or "")

    def _due(self, before: int, every: int | None) -> bool:
        """Whether a multiple of `every`, or the last step, lies in the generation that began after step `before`."""
        now = self._trainer.steps
        return every is not None and (now // every > before // every or now == self._spec.train.steps)

    def _evaluated(self, before: int) -> Mapping[str, float]:
        held_out = self._spec.data.eval
        return self._trainer.evaluate() if held_out is not None and self._due(before, held_out.every) else {}

    def _log(self, before: int, lines: list[dict[str, float]], evaluated: Mapping[str, float]) -> None:
        """Each step that is due, with the means since the last one; evaluations stand in their generation's last."""
        for step, line in enumerate(lines, start=before + 1):
            self._unlogged.append(line)
            closing = step == before + len(lines) and (evaluated or step == self._spec.train.steps)
            if step % self._spec.train.log_every and not closing:
                continue
            self._run.log_step(step, {**_means(self._unlogged), **(evaluated if closing else {})})
            self._unlogged.clear()

    def _save(self, step: int) -> None:
        with self._run.checkpoint(step) as folder:
            self._trainer.save(folder)
            save_state(folder, PLACE, self._place)

    def _save_before(self, before: int) -> None:
        """After a step that was not applied: the ones before it, if they end a generation. Else a resumed run would
        need rollouts that nobody keeps, and the last checkpoint stays the newest.
        """
        if before and self._trainer.steps == before:
            self._save(before)


def config_of(run: RunContext) -> DictConfig:
    """The plan's configuration with what this run and this machine add."""
    config = OmegaConf.create(dict(run.upstream))
    flash = importlib.util.find_spec("flash_attn") is not None
    fields = {
        **machine_fields(run.spec, cuda=torch.cuda.is_available(), flash_attention=flash),
        "actor_rollout_ref.model.path": str(run.model_folder()),
        "actor_rollout_ref.composer.plan": run.plan_file.read_text(encoding="utf-8"),
        "trainer.default_local_dir": str(run.scratch),
    }
    for key, value in fields.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def _environment() -> dict[str, str]:
    """Of verl's processes, beside what they inherit from this one where Ray runs on this machine."""
    # a cross-entropy that works in place would change the logits under the channels (loss/tap.py)
    own = {"VERL_DISABLE_FLASH_ATTN_CE": "1", "TRANSFER_QUEUE_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **own,
        **{name: os.environ[name] for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ},
    }


@contextmanager
def _queue(config: DictConfig) -> Iterator[None]:
    tq.init(config.transfer_queue)
    try:
        yield
    finally:
        tq.close()


@contextmanager
def _told_plainly() -> Iterator[None]:
    """An error of ours that was raised in one of verl's processes as what it was there; Ray's others in one sentence."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ComposerError):
            raise type(cause)(cause.problem, at=cause.at, fix=cause.fix) from None
        raise RunFailed(
            f"one of verl's processes failed: {type(cause).__name__}: {cause}", fix="its traceback is in logs/ray/"
        ) from error
    except RayError as error:
        raise RunFailed(f"one of verl's processes is gone: {error}", fix="logs/ray/ says what it did last") from error


def _means(lines: list[Mapping[str, float]]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in line.items():
            values[name].append(value)
    return {name: statistics.fmean(own) for name, own in values.items()}
