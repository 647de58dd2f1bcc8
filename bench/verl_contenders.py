"""Who is compared in `bench/verl.py`: verl's FSDP2 engine in this process, a group of one over gloo.

    composer  ComposerEngine with the channels of a spec
    stock     verl's own FSDPEngineWithLMHead with ppo_loss
    bare      stock, and in each step one forward without gradient over the hinted sequences and one forward with
              gradient over the pairs, logits at the scored positions only, and no loss on them

All get the configuration that Composer derives from the spec, made into engines the way verl's worker does it, the same
weights and batches (`verl_tasks.py`), and learning rate next to 0, so that every step is the same work. Rows of
channels are prepared before the clock starts, as verl's driver does in a process of its own; reading them is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl_tasks import Task

import composer_verl.external  # noqa: F401  # before an engine is made: verl and trl do not fit together without it
from composer_core.channels.rows import ints
from composer_core.plugins.registry import Registry
from composer_core.protocols import Row
from composer_core.run.rebuild import rebuild
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.teachers.pairs import Pair, save_pairs
from composer_verl.engine import ComposerEngine
from composer_verl.rows import FIELD, Sample, encode
from composer_verl.worker import composed

SPEC = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
CHANNELS = {
    "full": "{use: sdpo, weight: 0.1, on: all, teacher: TEACHER, support: full}",
    "topk": "{use: sdpo, weight: 0.1, on: all, teacher: TEACHER, support: topk}",
    "replay": "{use: replay, weight: 0.1}",
}
"""What a spec says of each; the divergence is jsd, top-k keeps 100, the pairs' reference is a stored one."""


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
        channels: of `CHANNELS`, for a `ComposerEngine`.
        teacher: of `sdpo`.
    """

    def __init__(
        self, base: type[Any], task: Task, channels: Sequence[str] = (), *, teacher: str = "self-frozen"
    ) -> None:
        plan = _plan(task, [CHANNELS[name].replace("TEACHER", teacher) for name in channels])
        self._task, self._names = task, ["replay" if name == "replay" else "sdpo" for name in channels]
        self._engine, actor = _engine(base, plan)
        self._loss = partial(ppo_loss, config=actor)
        if isinstance(self._engine, ComposerEngine):
            if (wanted := composed(rebuild(plan), self._engine)) is not None:
                self._engine.compose(wanted)
            self._loss = self._engine.loss_function(actor)
        elif isinstance(self._engine, Bare):
            self._engine.task = task
        self._data, self._steps = _rollouts(task, self._engine), 0

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
    """An engine and its actor's configuration, as verl's worker makes them."""
    upstream = plan["upstream"]["actor_rollout_ref"]
    actor = omega_conf_to_dataclass(OmegaConf.create(upstream["actor"]))
    engine = base(
        model_config=omega_conf_to_dataclass(OmegaConf.create(upstream["model"])),
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine, actor


def _rollouts(task: Task, engine: Any) -> TensorDict:
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
        micro_batch_size_per_gpu=len(ids),
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
