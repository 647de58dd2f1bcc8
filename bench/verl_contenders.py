"""Who is compared in `bench/verl.py`, and on what: verl's FSDP2 engine in this process, a group of one over gloo.

    composer  ComposerEngine with the channels of a spec
    stock     verl's own FSDPEngineWithLMHead with ppo_loss
    bare      stock, and in each step one forward without gradient over the hinted sequences and one forward with
              gradient over the pairs, logits at the scored positions only, and no loss on them

All get the configuration that Composer derives from the spec, made into engines the way verl's worker does it, the same
weights and the same batches, and learning rate next to 0: the work of a step is the same in every one. Rows of channels
are prepared before the clock starts, as verl's driver does in a process of its own; reading them is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import composer_verl.external  # before an engine is made: verl and trl do not fit together without it
import torch
import torch.distributed as dist
from composer_verl.engine import ComposerEngine
from composer_verl.rows import FIELD, Sample, encode
from composer_verl.worker import composed
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from composer_core.batch import Seqs
from composer_core.channels.rows import Segment, ints, pack, pair_row
from composer_core.hf.tiny import make_tiny, tiny_tokenizer
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText, Row
from composer_core.run.rebuild import rebuild
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.teachers.pairs import Pair, save_pairs

SPEC = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
FIRST_ID = 8
"""The tiny tokenizer's tokens below it are special."""
CHANNELS = {
    "full": "{use: sdpo, weight: 0.1, on: all, teacher: %s, support: full}",
    "topk": "{use: sdpo, weight: 0.1, on: all, teacher: %s, support: topk}",
    "replay": "{use: replay, weight: 0.1}",
}
"""What a spec says of each; the divergence is jsd, top-k keeps 100, the pairs' reference is a stored one."""

assert composer_verl.external  # imported for what it does


# -- what they train on ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model's folder, and how long what it reads is, in tokens."""

    folder: Path
    vocabulary: int
    prompts: int
    group: int
    """Rollouts of each prompt; all are of one micro-batch."""
    prompt: int
    response: int
    hint: int
    pairs: int
    answer: int
    """Of each side of a pair, behind a prompt."""

    @property
    def tokens(self) -> int:
        """N, of all rollouts."""
        return self.prompts * self.group * (self.prompt + self.response)

    @property
    def hinted(self) -> int:
        """K: every token of every response."""
        return self.prompts * self.group * self.response

    @cached_property
    def batch(self) -> Batch:
        """The same whenever it is asked for."""
        return _batch(self)


@dataclass(frozen=True)
class Batch:
    """What was sampled, and what channels hold of it."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    hinted: Sequence[Row]
    pairs: Sequence[Row]


def tiny(folder: Path) -> Task:
    """The built-in model, 64 completions of 16 tokens, 8 pairs."""
    make_tiny(folder / "tiny", seed=0)
    return Task(
        folder / "tiny",
        len(tiny_tokenizer()),
        prompts=4,
        group=16,
        prompt=5,
        response=16,
        hint=36,
        pairs=8,
        answer=16,
    )


def small(folder: Path) -> Task:
    """Qwen3 with 36 million random weights, 4 completions of 128 tokens, 2 pairs."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    made = _qwen3(folder / "small", vocabulary=32_000, **sizes)
    return Task(made, 32_000, prompts=1, group=4, prompt=32, response=128, hint=32, pairs=2, answer=96)


def wide(folder: Path) -> Task:
    """Nearly nothing but a vocabulary of 32,000: a tensor (N, V) is 131 MB, all weights are 8."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = _qwen3(folder / "wide", vocabulary=32_000, **sizes)
    return Task(made, 32_000, prompts=2, group=4, prompt=8, response=120, hint=8, pairs=2, answer=24)


def _qwen3(folder: Path, *, vocabulary: int, **sizes: int) -> Path:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _batch(task: Task) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(FIRST_ID, task.vocabulary, (length,), generator=generator).tolist()

    hint, prompts = text(task.hint), [own for _ in range(task.prompts) for own in [text(task.prompt)] * task.group]
    responses = [text(task.response) for _ in prompts]
    pairs = [
        pair_row(text(task.prompt), text(task.answer), text(task.answer), reference=(-30.0, -30.0))
        for _ in range(task.pairs)
    ]
    return Batch(prompts, responses, [_hinted(p, r, hint) for p, r in zip(prompts, responses, strict=True)], pairs)


def _hinted(prompt: Sequence[int], response: Sequence[int], hint: Sequence[int]) -> Row:
    student = range(len(prompt), len(prompt) + len(response))
    segment = Segment([*prompt, *hint, *response], student, [at + len(hint) for at in student])
    row = pack([segment], RolloutText("", prompt, response, [True] * len(response), 0.0))
    assert row is not None
    return row


# -- contenders --------------------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Contender:
    """An engine that takes one optimiser step after the other, on the same rollouts.

    Args:
        base: the class of the engine.
        task: what it trains on.
        channels: of `CHANNELS`; whoever is no `ComposerEngine` only gets their rows.
        teacher: of `sdpo`.
    """

    def __init__(
        self, base: type[Any], task: Task, channels: Sequence[str] = (), *, teacher: str = "self-frozen"
    ) -> None:
        plan = _plan(task, [CHANNELS[name].replace("%s", teacher) for name in channels])
        self._task, self._config, self._engine = task, *_engine(base, plan)
        self._names = ["replay" if name == "replay" else "sdpo" for name in channels]
        self._loss = partial(ppo_loss, config=self._config)
        if isinstance(self._engine, ComposerEngine):
            wanted = composed(rebuild(plan), self._engine)
            if wanted is not None:
                self._engine.compose(wanted)
            self._loss = self._engine.loss_function(self._config)
        if isinstance(self._engine, Bare):
            self._engine.task = task
        self._steps = 0
        self._data = _rollouts(task, self._engine, micro_batch=task.prompts * task.group)

    def get_ready(self) -> None:
        """What happens elsewhere in a run: the batch of the next step arrives."""
        self._steps += 1
        self._data[FIELD] = encode(_samples(self._task, self._names, step=self._steps))
        self._engine.optimizer_zero_grad()

    def step(self) -> None:
        """One optimiser step."""
        with self._engine.train_mode():
            self._engine.train_batch(self._data.copy(), self._loss)

    def check(self) -> None:
        """That the steps since the last call were taken with all their channels."""
        if not isinstance(self._engine, ComposerEngine):
            return
        report = self._engine.report()
        assert report["fault"] is None
        assert all(f"loss/{name}" in step for step in report["steps"] for name in self._names)


class Bare(FSDPEngineWithLMHead):
    """See the module."""

    task: Task

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if forward_only:
            return loss, output
        batch, task = self.task.batch, self.task
        hinted = [ints(row, "teacher_ids") for row in batch.hinted]
        sides = [ints(row, "prompt") + ints(row, side) for row in batch.pairs for side in ("chosen", "rejected")]
        with torch.no_grad():
            self._logits(hinted, last=task.response)
        return loss + 0 * self._logits(sides, last=task.answer).mean(), output

    def _logits(self, sequences: Sequence[Sequence[int]], *, last: int) -> Tensor:
        """Those that predict the last tokens; the sequences are of one length, so that none is padded."""
        ids = torch.tensor(sequences)
        handle = self.module.get_output_embeddings().register_forward_pre_hook(
            lambda _, states: (states[0][:, -last - 1 : -1],)
        )
        try:
            found: Tensor = self.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        finally:
            handle.remove()
        return found


def _plan(task: Task, channels: Sequence[str]) -> Mapping[str, Any]:
    pairs = task.folder.parent / "pairs.jsonl"
    said = {"role": "assistant", "content": "a"}
    reference = {"model": "bench", "chosen": -30.0, "rejected": -30.0}
    save_pairs([Pair("s", [{"role": "user", "content": "q"}], said, said, 2, ["a", "b"], reference)], pairs)
    overrides = [
        f"model={{path: {task.folder}}}",
        "backend={use: verl}",
        f"loss.channels=[{', '.join(channels)}]",
        f"train.prompts_per_step={task.prompts}",
        f"train.group_size={task.group}",
        f"train.micro_batch={task.prompts * task.group}",
        f"train.max_completion_tokens={task.response}",
        "train.learning_rate=1e-12",
        *([f"data.pairs={{path: {pairs}}}"] if any("replay" in channel for channel in channels) else []),
    ]
    registry = Registry.discover()
    return make_plan(load_spec(SPEC, registry, overrides=overrides), registry).to_json()


def _engine(base: type[Any], plan: Mapping[str, Any]) -> tuple[Any, Any]:
    """The actor's configuration and its engine, as verl's worker makes them."""
    model = {**plan["upstream"]["actor_rollout_ref"]["model"], "external_lib": None}
    model_config: HFModelConfig = omega_conf_to_dataclass(OmegaConf.create(model))
    actor = omega_conf_to_dataclass(OmegaConf.create(plan["upstream"]["actor_rollout_ref"]["actor"]))
    engine = base(
        model_config=model_config,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return actor, engine


def _rollouts(task: Task, engine: Any, *, micro_batch: int) -> TensorDict:
    """The batch as verl's workers get it, on policy, advantages between -1 and 1."""
    batch = task.batch
    ids = [torch.tensor([*prompt, *response]) for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
    mask = _nested([torch.ones(len(response), dtype=torch.int64) for response in batch.responses])
    generator = torch.Generator().manual_seed(1)
    advantages = 2 * torch.rand(len(ids), generator=generator) - 1
    fields = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(own)) for own in ids]),
        "prompts": _nested([torch.tensor(prompt) for prompt in batch.prompts]),
        "responses": _nested([torch.tensor(response) for response in batch.responses]),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": _nested([own.expand(task.response).clone() for own in advantages]),
    }
    data = TensorDict(fields, batch_size=len(ids))
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro_batch,
        global_batch_size=len(ids),
        calculate_entropy=False,
        compute_loss=False,
    )
    with engine.eval_mode():
        logps = engine.infer_batch(data)["model_output"]["log_probs"]
    data["old_log_probs"] = _nested([own[-task.response - 1 : -1] for own in logps.unbind()])
    return data


def _samples(task: Task, names: Sequence[str], *, step: int) -> list[Sample]:
    batch = task.batch
    drawn: list[list[Row]] = [list(batch.pairs[i :: len(batch.prompts)]) for i in range(len(batch.prompts))]
    return [
        Sample(
            str(i),
            i // task.group,
            0.0,
            {"sdpo": batch.hinted[i]} if "sdpo" in names else {},
            {str(step): {"replay": drawn[i]}} if "replay" in names else {},
        )
        for i in range(len(batch.prompts))
    ]


def _nested(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
