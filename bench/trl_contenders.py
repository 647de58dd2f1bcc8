"""Who is compared in `bench/trl.py`, and on what.

    composer  ComposerGRPOTrainer with the spec's channels, in a run that writes metrics and samples
    stock     trl.GRPOTrainer
    bare      stock, and in each step one forward without gradient over the hinted sequences and one forward with
              gradient over the pairs: backbone, then logits at the scored positions, and no loss on them
    sdpo      trl.experimental.sdpo.SDPOTrainer, whose teacher reads the same hints at the same place

All get the GRPOConfig that Composer derives from the spec, as far as they know its fields, the same prompts, and
learning rate 0: the work of a step is the same, and all of them sample the same completions in every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from trl import GRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from composer_core.batch import Seqs
from composer_core.channels.rows import ints
from composer_core.data.rewards import build_rewards
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.heads import take_apart
from composer_core.plugins.registry import Registry
from composer_core.protocols import Need
from composer_core.run.control import Control, StopSignals
from composer_core.run.directory import create_run
from composer_core.run.feeding import feed
from composer_core.run.progress import Silent
from composer_core.run.session import RunSession
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.teachers.pairs import Pair, save_pairs
from composer_trl.backend import RunListener, config_of, lora_config, rows_dataset
from composer_trl.objectives import is_native
from composer_trl.trainer import ComposerGRPOTrainer

HINT = "hint"
"""Column of the prompts."""
GAP = "\n\n"
"""Between a prompt and its hint."""
SIDES = ("chosen", "rejected")
EXAMPLES = Path(__file__).parents[1] / "examples"


# -- what they train on ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model with prompts, hints and pairs for it."""

    spec: Path
    numbers: tuple[str, ...]
    """Overrides of the spec."""
    pairs: Path

    def alone(self, *more: str) -> Setting:
        """The objective and no channel."""
        return Setting(self.spec, (*self.numbers, *more))

    def hinted(self, teacher: str, *more: str) -> Setting:
        """The objective and `sdpo`."""
        return self.alone(f"loss.channels=[{_sdpo(teacher)}]", *more)

    def all_channels(self, teacher: str, pairs: int, *more: str) -> Setting:
        """The objective, `sdpo` and `replay` with so many pairs in a step."""
        replay = f"{{use: replay, weight: 0.1, pairs_per_step: {pairs}}}"
        given = f"data.pairs={{path: {self.pairs}}}"
        return self.alone(f"loss.channels=[{_sdpo(teacher)}, {replay}]", given, *more)


@dataclass(frozen=True)
class Setting:
    """A spec with overrides."""

    spec: Path
    overrides: tuple[str, ...]

    def to(self, *, steps: int) -> Setting:
        """For so many steps."""
        return replace(self, overrides=(*self.overrides, f"train.steps={steps}"))


def tiny(folder: Path) -> Task:
    """The built-in model, 64 completions of 16 tokens."""
    rows = [
        {
            "prompt": f"n{i % 10}",
            HINT: "Hint: answer in digits, 0123456789.",
            SIDES[0]: f"{i % 10}" * 16,
            SIDES[1]: "a" * 16,
        }
        for i in range(64)
    ]
    return _task(folder / "tiny", EXAMPLES / "quickstart.yaml", rows, "column: prompt")


def smollm2(folder: Path) -> Task:
    """SmolLM2-135M with LoRA, one prompt a step; hints are the problem's solution."""
    lines = (EXAMPLES / "data" / "gsm8k-sample.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    refusal = "I do not know how to solve this problem, and so I would rather not answer it. " * 2
    rows = [
        {"prompt": row["question"], HINT: row["answer"][:200], SIDES[0]: row["answer"][:120], SIDES[1]: refusal[:120]}
        for row in map(json.loads, lines)
    ]
    return _task(
        folder / "smollm2",
        EXAMPLES / "smollm2-math.yaml",
        rows,
        'column: prompt, system: "Solve the problem in a few short steps."',
        "data.rewards=[{use: length, target: 200, tolerance: 400}]",
        "train.prompts_per_step=1",
        "train.max_completion_tokens=32",
        "backend.options={generation_kwargs: {min_new_tokens: 32}}",
    )


def _task(folder: Path, spec: Path, rows: Sequence[Mapping[str, str]], told: str, *numbers: str) -> Task:
    """Write prompts and pairs; the pairs' reference log-probs are stored ones, whatever their values."""
    folder.mkdir()
    prompts, pairs = folder / "prompts.jsonl", folder / "pairs.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"], HINT: row[HINT]}) + "\n" for row in rows))
    ref = {"model": "bench", **dict.fromkeys(SIDES, -30.0)}
    save_pairs([Pair(f"s{i}", *_chats(row), 2, ["a", "b"], ref) for i, row in enumerate(rows)], pairs)
    from_file = f"data.prompts={{path: {prompts}, {told}}}"
    return Task(spec, ("checkpoint.every=null", "loss.objective={use: dr-grpo}", from_file, *numbers), pairs)


def _chats(row: Mapping[str, str]) -> tuple[Any, Any, Any]:
    chosen, rejected = ({"role": "assistant", "content": row[side]} for side in SIDES)
    return [{"role": "user", "content": row["prompt"]}], chosen, rejected


def _sdpo(teacher: str) -> str:
    return f"{{use: sdpo, weight: 0.1, on: all, teacher: {teacher}, hints: {{column: {HINT}, at: prompt-end}}}}"


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of a spec, open."""

    session: RunSession
    loss: CompositeLoss


@contextmanager
def open_run(setting: Setting, root: Path) -> Iterator[Run]:
    """As the worker opens one, without a display."""
    registry = Registry.discover()
    loaded = load_spec(setting.spec, registry, overrides=setting.overrides)
    plan, spec = make_plan(loaded, registry), loaded.spec

    def build(block: Any) -> Any:
        return registry.get(block.kind, block.use)[1].load()(block.settings)

    needs = {channel.name: frozenset(Need(need) for need in channel.needs) for channel in plan.channels}
    channels = [ActiveChannel(b.name, b.weight, build(b), needs[b.name]) for b in spec.loss.channels]
    loss = CompositeLoss(channels, build(spec.loss.objective))
    directory = create_run(root, spec.name)
    # its signal handlers are not installed: Ctrl-C ends a bench, not one of its trainers
    control = Control(StopSignals(), stop_file=directory.stop_file, hours=spec.limits.hours, tripwires=[])
    session = RunSession(
        directory,
        spec,
        upstream=plan.upstream,
        rewards=build_rewards(spec, registry),
        objective=loss.objective,
        control=control,
        display=Silent(),
        channels=[active.name for active in loss.active],
    )
    with closing(session):
        feed(loss, session, registry)
        yield Run(session, loss)


# -- contenders --------------------------------------------------------------------------------------------------------


def composer(run: Run) -> Trainer:
    """Ours."""
    session = run.session
    listener = RunListener(session)
    trainer = ComposerGRPOTrainer(
        **_common(session),
        callbacks=[listener],
        loss=run.loss,
        native=is_native(session.spec.loss.objective),
        own_head=True,
        on_generation=listener.on_generation,
    )
    listener.trainer = trainer
    return trainer


def stock(run: Run) -> Trainer:
    """TRL's."""
    return GRPOTrainer(**_common(run.session))


def bare(run: Run) -> Trainer:
    """TRL's with the forwards that the channels need, and nothing else."""
    trainer = _Bare(**_common(run.session))
    trainer._hints = {}
    trainer.replay = next(active.channel for active in run.loss.active if active.name == "replay")
    return trainer


def sdpo(run: Run) -> Trainer:
    """The peer's: live teacher, full vocabulary, half policy loss and half distillation."""
    session = run.session
    given = {key: value for key, value in session.upstream.items() if key in SDPOConfig.__dataclass_fields__}
    config = SDPOConfig(
        **given | {"learning_rate": 0.0},
        output_dir=str(session.scratch),
        disable_tqdm=True,
        distillation_weight=0.5,
        distillation_alpha=0.5,
        distillation_mode="full_logits",
        teacher_model_kind="live",
        success_reward_threshold=0.0,
        use_successful_as_teacher=False,
        include_environment_feedback=True,
        reprompt_template="{prompt}{solution}{feedback}",
        feedback_template=GAP + "{feedback_raw}",
        max_prompt_length=None,
    )
    rows = [{**row, "privileged_context": row[HINT]} for row in session.prompts()]
    return SDPOTrainer(**_common(session) | {"args": config, "train_dataset": rows_dataset(rows)})


def without_sampling(trainer: Trainer) -> Trainer:
    """The same trainer with completions of random tokens, as long as they may be."""
    length = trainer.args.max_completion_length

    def generate(input_ids, **_):
        return torch.cat([input_ids, torch.randint(1000, 40000, (len(input_ids), length))], dim=1)

    trainer.model.generate = generate
    return trainer


def _common(session: RunSession) -> dict[str, Any]:
    folder, spec = session.model_folder(), session.spec
    config = config_of(session)
    config.learning_rate = 0.0
    return {
        "model": load_policy(folder, dtype=spec.model.dtype),
        "reward_funcs": [reward.score for reward in session.rewards],
        "args": config,
        "train_dataset": rows_dataset(session.prompts()),
        "processing_class": load_tokenizer(folder),
        "peft_config": lora_config(spec.model.lora),
    }


class _Bare(GRPOTrainer):
    """`replay` gives the pairs of a step."""

    replay: Any
    _hints: dict[str, list[int]]

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        hints = [self._hint(row[HINT]) for row in inputs]
        width = max(len(ids) for ids in hints)
        batch["hint_ids"] = torch.tensor([[0] * (width - len(ids)) + ids for ids in hints])
        batch["hint_mask"] = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in hints])
        return batch

    def _compute_loss(self, model, inputs):
        policy = super()._compute_loss(model, inputs)
        parts = take_apart(self.accelerator.unwrap_model(model))
        # before the completion, where the mask of what is scored does not move
        ids, mask = (
            torch.cat([inputs[f"hint_{what}"], inputs[f"prompt_{what}"], inputs[f"completion_{what}"]], dim=1)
            for what in ("ids", "mask")
        )
        scored = torch.zeros_like(mask)
        scored[:, -inputs["completion_mask"].shape[1] :] = inputs["completion_mask"]
        with torch.no_grad(), self._without_adapters():
            _logits(parts, ids, mask, scored)
        return policy + 0 * _logits(parts, *self._pairs(self.state.global_step + 1)).mean()

    def _hint(self, text: str) -> list[int]:
        if text not in self._hints:
            self._hints[text] = self._tokenizer.encode(GAP + text, add_special_tokens=False)
        return self._hints[text]

    def _without_adapters(self):
        model = self.accelerator.unwrap_model(self.model)
        return model.disable_adapter() if hasattr(model, "peft_config") else nullcontext()

    def _pairs(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        sides = [(ints(row, "prompt"), ints(row, side)) for row in self.replay.draw(step, 0, 1) for side in SIDES]
        ids, mask = Seqs.from_lists([prompt + answer for prompt, answer in sides]).padded()
        scored = torch.zeros_like(mask)
        for i, (prompt, answer) in enumerate(sides):
            scored[i, len(prompt) : len(prompt) + len(answer)] = True
        return ids, mask.long(), scored


def _logits(parts: Any, ids: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
    states = parts.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.nn.functional.linear(states[:, :-1][scored[:, 1:].bool()], parts.head.weight)
