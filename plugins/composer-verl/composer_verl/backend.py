"""Runs a plan on verl: starts Ray, hands verl its configuration, logs, saves, evaluates and stops.

The worker process is verl's driver. `trainer.py` has one generation, `engine.py` the loss, `cluster.py` Ray.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError, RayTaskError

from composer_core.data.tool_checks import tool_schemas
from composer_core.data.tools import load_tools
from composer_core.errors import ComposerError, NonFinite, RunFailed, UsageError
from composer_core.loss.composite import CompositeLoss
from composer_core.protocols import TrainResult
from composer_core.run.context import RunContext
from composer_core.run.doctor import Finding
from composer_core.run.state import load_state, save_state
from composer_core.traces.tool_format import require_tool_format
from composer_verl import surface
from composer_verl.cluster import LOCAL, cluster
from composer_verl.config import machine_fields, prompt_fields
from composer_verl.conversation import prompt_ids
from composer_verl.diagnosis import findings
from composer_verl.metrics import summed_up
from composer_verl.rows import packed
from composer_verl.settings import VerlSettings
from composer_verl.trainer import PLACE, ComposerTrainer
from composer_verl.watch import gone


class VerlBackend:
    """`backend: {use: verl}`."""

    def __init__(self, settings: VerlSettings) -> None:
        self.settings = settings

    def check(self) -> list[str]:
        """Differences between the installed verl and the expected one."""
        return surface.problems()

    def diagnose(self) -> Iterator[Finding]:
        """See `composer_core.run.doctor.Diagnoses`."""
        return findings(_environment(cuda=torch.cuda.is_available()))

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to `train.steps`, or to the end of the generation after which `run.stop_reason()` gives a reason."""
        cuda = torch.cuda.is_available()
        config = config_of(run, cuda=cuda)
        options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        with _told_plainly(), _quiet(run.logs), cluster(options, logs=run.logs, environment=_environment(cuda=cuda)):
            _check_gpus(self.settings, cuda=cuda)
            with _queue(config):
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
            self._run.log_step(step, {**summed_up(self._unlogged), **(evaluated if closing else {})})
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


def config_of(run: RunContext, *, cuda: bool) -> DictConfig:
    """The plan's configuration with what this run and this machine add.

    Args:
        run: the run.
        cuda: whether this machine has GPUs.

    Raises:
        UsageError: a tool, or the model's chat template, is not as rollouts need it.
    """
    folder = run.model_folder()
    config = OmegaConf.create(dict(run.upstream))
    flash = importlib.util.find_spec("flash_attn") is not None
    fields = {
        **machine_fields(run.spec, cuda=cuda, flash_attention=flash),
        **prompt_fields(_longest_prompt(run, folder)),
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.composer.plan": packed(run.plan_file.read_bytes()),
        "trainer.default_local_dir": str(run.scratch),
    }
    for key, value in fields.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def _longest_prompt(run: RunContext, folder: Path) -> int:
    """Tokens that a prompt may have: those of the longest, or what verl was going to allow, whichever is more.

    An environment's own words come on top, so with one the spec's limit is what there is.
    """
    from composer_core.hf.models import load_tokenizer

    schemas = []
    tokenizer = load_tokenizer(folder, trust_remote_code=run.spec.model.trust_remote_code)
    if run.spec.rollout is not None:
        schemas = tool_schemas(load_tools(run.spec.rollout).all)
        require_tool_format(tokenizer, at=str(folder))
    rows = [*run.prompts(), *run.eval_prompts()]
    lengths = [len(prompt_ids(row["prompt"], schemas, tokenizer=tokenizer, options={})) for row in rows]
    return max(run.upstream["data"]["max_prompt_length"], *lengths)


def _environment(*, cuda: bool) -> dict[str, str]:
    """Of verl's processes, beside what they inherit from this one where Ray runs on this machine."""
    # some have no GPU of their own, and must not take the machine for one without
    platform = {"VERL_PLATFORM": "nvidia" if cuda else "cpu"}
    # a cross-entropy that works in place would change the logits under the channels (loss/tap.py)
    own = {"VERL_DISABLE_FLASH_ATTN_CE": "1", "TRANSFER_QUEUE_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **platform,
        **own,
        **{name: os.environ[name] for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ},
    }


def _check_gpus(settings: VerlSettings, *, cuda: bool) -> None:
    """A driver without a GPU takes the whole cluster for one without: verl finds its platform in this process."""
    if settings.ray != LOCAL and not cuda and ray.cluster_resources().get("GPU"):
        raise UsageError(
            "the Ray cluster has GPUs and the machine that drives the run has none",
            at="backend.ray",
            fix="start the run on a machine of the cluster that has one",
        )


@contextmanager
def _quiet(logs: Path) -> Iterator[None]:
    """What verl prints in this process goes to a file: the progress display has the console."""
    with (logs / "verl.log").open("a", encoding="utf-8") as file, redirect_stdout(file):
        yield


@contextmanager
def _queue(config: DictConfig) -> Iterator[None]:
    tq.init(config.transfer_queue)
    try:
        yield
    finally:
        tq.close()


@contextmanager
def _told_plainly() -> Iterator[None]:
    """An error of ours from one of verl's processes as what it was there; Ray's others in one sentence."""
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
        raise RunFailed(gone(error), fix="logs/ray/ says what its processes did last") from error
