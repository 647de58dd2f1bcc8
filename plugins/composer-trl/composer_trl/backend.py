"""Runs a plan on `ComposerGRPOTrainer`: builds its parts, listens to it, and saves what it leaves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from composer_core.errors import NonFinite, RunFailed, UsageError
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.composite import CompositeLoss
from composer_core.protocols import TrainResult
from composer_core.run.context import Checkpoint, RolloutSample, RunContext
from composer_core.run.control import agree
from composer_core.run.ranks import rank_count
from composer_core.run.state import load_state, save_state
from composer_core.spec.model import LoraSpec, RunSpec
from composer_core.spec.rollouts import NONE
from composer_trl import surface
from composer_trl.metrics import MetricNames
from composer_trl.objectives import is_native
from composer_trl.settings import TrlSettings
from composer_trl.tools import require_tool_template, rollout_arguments
from composer_trl.trainer import ComposerGRPOTrainer, Generation

if TYPE_CHECKING:
    from composer_trl.recorded import RecordedTrainer


class TrlBackend:
    """`backend: {use: trl}`."""

    def __init__(self, settings: TrlSettings) -> None:
        self.settings = settings

    def check(self) -> list[str]:
        """Differences between the installed trl and the expected one."""
        return surface.problems()

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to `train.steps`, or to the step after which `run.stop_reason()` gives one.

        The policy loss is TRL's own where TRL has the objective; the channels are the core's.
        """
        listener = RunListener(run)
        trainer = _recorded_trainer(run, loss, listener) if run.spec.rollouts == NONE else _trainer(run, loss, listener)
        listener.trainer = trainer
        resume = run.resume_from
        if resume is not None:
            trainer.go_to(load_state(resume.own, PLACE))
            trainer.load_composition(load_state(resume.folder, LOSS))
        try:
            trainer.train(resume_from_checkpoint=None if resume is None else str(_whole(resume, run.scratch)))
        except NonFinite as error:
            listener.stopped = error.problem
            listener.save_last_step()
        steps = trainer.state.global_step
        if not listener.stopped and steps != run.spec.train.steps:
            raise RunFailed(f"trl ended after {steps} of {run.spec.train.steps} steps without saying why")
        if not listener.stopped:
            _save(trainer, run)
        return TrainResult(steps=steps, stopped=listener.stopped)


def _recorded_trainer(run: RunContext, loss: CompositeLoss, listener: RunListener) -> RecordedTrainer:
    from composer_trl.recorded import recorded_trainer  # which needs this module

    return recorded_trainer(run, loss, listener)


def _trainer(run: RunContext, loss: CompositeLoss, listener: RunListener) -> ComposerGRPOTrainer:
    folder, model = run.model_folder(), run.spec.model
    held_out, objective = run.eval_prompts(), run.spec.loss.objective
    tokenizer, arguments = load_tokenizer(folder), rollout_arguments(run.spec)
    if arguments:
        require_tool_template(tokenizer, at=str(folder))
    trainer = ComposerGRPOTrainer(
        load_policy(folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code),
        [reward.score for reward in run.rewards],
        config_of(run),
        train_dataset=rows_dataset(_checked(run.prompts(), run.spec)),
        eval_dataset=rows_dataset(held_out) if held_out else None,
        processing_class=tokenizer,
        peft_config=lora_config(model.lora),
        callbacks=[listener],
        loss=loss,
        native=objective is not None and is_native(objective),
        own_head=True,
        on_generation=listener.on_generation,
        on_evaluation=listener.on_evaluation,
        **arguments,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _whole(resume: Checkpoint, scratch: Path) -> Path:
    """A checkpoint as upstream wants it: with the random generators of this process beside the weights."""
    if resume.own == resume.folder:
        return resume.folder
    whole = scratch / "resume"
    whole.mkdir()
    for name, item in {item.name: item for part in (resume.folder, resume.own) for item in part.iterdir()}.items():
        (whole / name).symlink_to(item)
    return whole


PLACE, LOSS = "trl", "loss"
"""States in a checkpoint beside trl's own files."""


class RunListener(TrainerCallback):  # type: ignore[misc]
    """Carries what happens in the trainer into the run: metrics, samples, checkpoints, and a wish to stop back.

    A step that is saved, evaluated, or the last one is logged too, whatever `train.log_every` says: so trl holds no
    half-full averages at a checkpoint, and evaluations stand in their step's line.
    """

    trainer: ComposerGRPOTrainer | RecordedTrainer
    """Set once it is there: it takes its callbacks when it is made."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.stopped = ""
        self._names = MetricNames()
        self._line: dict[str, float] = {}
        self._place: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed trainer brings the intervals of its checkpoint; those of this run hold."""
        state.compute_steps(args, state.max_steps)
        self._names.tokens = state.num_input_tokens_seen
        self._place = self.trainer.place()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the place, and stop at this step boundary where there is a reason to."""
        self._place = self.trainer.place()
        last = state.global_step == args.max_steps
        control.should_evaluate = control.should_evaluate or (last and self.run.spec.data.eval is not None)
        self._ask(args, state, control)
        control.should_log = control.should_log or control.should_save or control.should_evaluate or last

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        """One step's metrics; the closing summary of the whole run has no loss and is left out."""
        if "loss" not in logs:
            return
        self._line = self._names.translate(logs)
        if not control.should_evaluate:
            self._log(args, state, control)

    def on_evaluation(self, control: Any, metrics: Mapping[str, float]) -> None:
        """Complete the line of the step that was evaluated."""
        self._line |= metrics
        self._log(self.trainer.args, self.trainer.state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish what the trainer wrote into its scratch folder as a complete checkpoint; of another process than the
        main one that is its random generators.
        """
        written = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with self.run.checkpoint(state.global_step) as folder:
            for item in written.iterdir():
                os.replace(item, folder / item.name)
            _drop_pickled_arguments(folder)
            save_state(folder, PLACE, self._place)
            if self.run.is_main:
                save_state(folder, LOSS, self.trainer.composition_state())
        written.rmdir()

    def save_last_step(self) -> None:
        """After a step that was not applied: a checkpoint of the one before, where there was one."""
        if self.trainer.state.global_step:
            self.trainer.save_at(self._place)
            self.on_save(self.trainer.args, self.trainer.state, self.trainer.control)

    def _log(self, args: Any, state: Any, control: Any) -> None:
        if self.run.is_main:
            self.run.log_step(state.global_step, self._line)
        self._ask(args, state, control)  # what was logged may be a reason

    def _ask(self, args: Any, state: Any, control: Any) -> None:
        reason = agree(self.run.stop_reason())
        if reason is not None and state.global_step < args.max_steps:
            self.stopped = reason
            control.should_training_stop = control.should_save = True

    def on_generation(self, generation: Generation) -> None:
        """Keep some completions for reading, spread over the prompts, on steps that are logged."""
        train = self.run.spec.train
        if not self.run.is_main or not train.sample_rollouts or generation.step % train.log_every:
            return
        kept = _spread(len(generation.completions), train.sample_rollouts)
        self.run.log_rollouts(generation.step, [_sample(generation, index) for index in kept])


def rows_dataset(rows: list[dict[str, Any]]) -> Dataset:
    """Rows as a `datasets.Dataset` that gives them back exactly.

    Arrow would force one type per column and add empty keys to nested objects (a chat message would gain
    `tool_calls: None`), so each row is kept as JSON. All rows get all columns: TRL asks every row for the first's.
    """
    columns = dict.fromkeys(name for row in rows for name in row)
    texts = [json.dumps({name: row.get(name) for name in columns}) for row in rows]

    def decode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        decoded = [json.loads(text) for text in batch["row"]]
        return {name: [row[name] for row in decoded] for name in columns}

    return Dataset.from_dict({"row": texts}).with_transform(decode)


def config_of(run: RunContext, kind: type[Any] = GRPOConfig) -> Any:
    """The plan's configuration with this run's paths, a GRPOConfig or another kind of TrainingArguments.

    Raises:
        UsageError: upstream's own checks refuse it.
    """
    own: dict[str, Any] = {"output_dir": str(run.scratch), "disable_tqdm": True}
    # unless told, accelerate takes ranks without a GPU for processes on their own, and transformers refuses bfloat16
    low = bool(run.upstream.get("bf16")) and not is_torch_bf16_gpu_available()
    if (rank_count() > 1 or low) and not torch.cuda.is_available():
        own["use_cpu"] = True
        # else it calls the device of a rank cpu:0, to which torch.load cannot bring an optimiser's state
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    try:
        return kind(**{**own, **run.upstream})
    except (ValueError, TypeError) as error:
        raise UsageError(f"trl refuses this configuration: {error}", at="backend.options") from error


_SPECIAL_COLUMNS = frozenset({"completion", "image", "images", "environment"})
"""TRL keeps the first from the rewards and reads inputs of its own out of the others."""


def _checked(rows: list[dict[str, Any]], spec: RunSpec) -> list[dict[str, Any]]:
    """Refuse what TRL would take in silence: an incomplete step, which its sampler drops, and columns it interprets."""
    needed = spec.train.prompts_per_step
    if len(rows) < needed:
        raise UsageError(
            f"{len(rows)} prompts, but one step takes {needed}", at="data.prompts", fix="lower train.prompts_per_step"
        )
    special = sorted(_SPECIAL_COLUMNS & {name for row in rows for name in row})
    if special:
        raise UsageError(
            f"trl has a meaning of its own for the column {special[0]!r}", at="data.prompts", fix="rename it"
        )
    return rows


def lora_config(lora: LoraSpec | None) -> Any:
    """`peft.LoraConfig` for the spec's adapters, None for full fine-tuning."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )


def _save(trainer: ComposerGRPOTrainer | RecordedTrainer, run: RunContext) -> None:
    lora = run.spec.model.lora
    with run.trained_model() as folder:
        if lora is not None and lora.merge:
            merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
            merged.save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
        else:
            trainer.save_model(str(folder))
            _drop_pickled_arguments(folder)


def _drop_pickled_arguments(folder: Path) -> None:
    """Trainer leaves its arguments as a pickle, which nothing of ours reads and nobody should have to trust."""
    (folder / "training_args.bin").unlink(missing_ok=True)


def _spread(total: int, wanted: int) -> list[int]:
    count = min(total, wanted)
    return [index * total // count for index in range(count)]


def _sample(generation: Generation, index: int) -> RolloutSample:
    rewards = {name: _finite(values[index]) for name, values in generation.rewards.items()}
    return RolloutSample(
        prompt=generation.prompts[index],
        completion=_text(generation.completions[index]),
        rewards=rewards,
        advantage=_finite(generation.advantages[index]),
    )


def _text(completion: str | Iterable[Mapping[str, Any]]) -> str:
    """A completion for reading: its messages' texts, and the calls of those that made any."""
    if isinstance(completion, str):
        return completion
    lines: list[str] = []
    for message in completion:
        lines += [str(message["content"])] if message.get("content") else []
        lines += [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join(lines)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
