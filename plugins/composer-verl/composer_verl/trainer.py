"""verl's synchronous trainer in the run's own process: its generation, queue and workers, with our loop around them.

    prepare_step              the next prompts go to the agent loops
    _compute_reward_colocate  rollouts come back: put in order, scored by the run's rewards
    _compute_advantage        the objective compares them; the channels prepare their rows
    _update_actor             the optimiser steps on the workers

What verl calls a step is one generation, with `train.iterations` optimiser steps; those are what a run counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from composer_core.data.tools import load_tools
from composer_core.errors import NonFinite, RunFailed
from composer_core.loss.composite import CompositeLoss
from composer_core.run.context import RunContext
from composer_core.run.metrics import eval_metrics
from composer_core.run.prompts import Prompts
from composer_core.run.state import capture_rng, load_state, restore_rng
from composer_verl.generation import (
    READ,
    Generation,
    advantages_of,
    place_of,
    prompt_columns,
    records_of,
    score,
)
from composer_verl.metrics import translate
from composer_verl.records import Copies, rollout_texts
from composer_verl.rows import FIELD, Sample, encode
from composer_verl.settings import AHEAD, CORE, VerlSettings
from composer_verl.shares import objective_of
from composer_verl.watch import Watch
from composer_verl.worker import ComposerWorker

PLACE = "verl"
"""State of the driver in a checkpoint, beside the ranks'."""
TRAIN, HELD_OUT = "train", "val"
"""Partitions of verl's queue."""
_POLL_SECONDS = 0.1
"""Between two looks at which rollouts have ended; verl's 2 s are longer than a step of a small model."""


class ComposerTrainer(PPOTrainerSync):  # type: ignore[misc]
    """See the module.

    Args:
        config: verl's, complete.
        run: the run.
        loss: channels and objective of this process, which prepares their rows.
        settings: of the backend.
    """

    def __init__(self, config: DictConfig, run: RunContext, loss: CompositeLoss, settings: VerlSettings) -> None:
        self._run, self._loss, self._settings = run, loss, settings
        self._train = run.spec.train
        self._prompts = Prompts(run.prompts(), seed=run.spec.seed)
        self._held_out = run.eval_prompts()
        self._copies = _copies(run)
        self._generation: Generation | None = None
        self.curr_step_profile = False
        self.steps = 0
        """Optimiser steps that were applied."""
        super().__init__(config)

    # -- what verl sets up -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Workers, rollout servers and agent loops; the first weights reach the servers."""
        self.init()
        # none of verl's reward workers: rewards are called in this process, where verl would ask a model of its own
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
        self.agent_loop_manager = AgentLoopManagerTQ.create(
            config=self.config, llm_client=self.get_llm_client(), teacher_client=None, reward_loop_worker_handles=None
        )
        servers = [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]
        loops = self.agent_loop_manager.agent_loop_workers
        self._watch = Watch([*loops, *servers, *self.actor_rollout_wg.workers])

    def _init_dataloader(self) -> None:
        """None: the prompts come from the run, in an order that a checkpoint holds without a pickle."""
        self.total_training_steps = self.steps_per_epoch = self._train.steps // self._train.iterations
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping = {role: ray.remote(ComposerWorker) for role in self.role_worker_mapping}

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = _POLL_SECONDS
        wait = buffer._wait_for_next_poll

        def watchful_wait(*args: Any) -> Any:
            self._watch.look()
            return wait(*args)

        # verl 0.9 has no other place for it: without, a run whose processes are gone would poll for ever
        buffer._wait_for_next_poll = watchful_wait
        return buffer

    def _load_checkpoint(self) -> None:
        """Weights go to the rollout servers right after this, so what is resumed must be there."""
        self.global_steps = 0
        if self._run.resume_from is not None:
            # the servers are told how old the weights are
            self.global_steps = load_state(self._run.resume_from.folder, PLACE)["generations"]
            self.actor_rollout_wg.composer_load(str(self._run.resume_from.folder))

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """What verl would do in silence where a rollout failed."""
        raise RunFailed(f"the rollouts of {num_prompts} prompts failed", fix="logs/ray/ says what happened")

    # -- one generation ----------------------------------------------------------------------------------------------

    def one_generation(self) -> list[dict[str, float]]:
        """Rollouts, and the optimiser steps on them; the metrics of each.

        Raises:
            NonFinite: a loss or the gradient; that step and those behind it were not applied, those before it were.
            RunFailed: a rollout is missing.
        """
        started = time.perf_counter()
        self.global_steps += 1
        self.timing_raw: dict[str, float] = {}
        upstream: dict[str, Any] = {}
        with marked_timer("step", self.timing_raw):
            batch = self.step(upstream, self.timing_raw)
            (report, *_) = self.actor_rollout_wg.composer_report()
            self.steps += len(report["steps"])
            if report["fault"] is not None:
                raise NonFinite(report["fault"])
            self.on_step_end()  # the new weights reach the servers
        self._compute_metrics(batch, upstream, self.timing_raw, global_steps=self.global_steps, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        seconds = time.perf_counter() - started
        shared = {**self._taken().metrics, **translate(upstream, seconds=seconds, steps=len(report["steps"]))}
        return [{**shared, **own} for own in report["steps"]]

    def prepare_step(self) -> dict[str, Any]:
        """Hand the next prompts to the agent loops."""
        rows = self._prompts.take(self._train.prompts_per_step)
        self._submit_batch_to_rollout(self._batch(rows, name="", first=0))
        return {}

    def _batch(self, rows: Sequence[dict[str, Any]], *, name: str, first: int) -> TensorDict:
        uids = [f"{name}{self.global_steps}-{index}" for index in range(len(rows))]
        batch: TensorDict = tu.get_tensordict(prompt_columns([json.dumps(row) for row in rows], uids, first=first))
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict[str, Any] | None = None) -> KVBatchMeta:
        """Score the rollouts, in an order that does not depend on who was ready first."""
        generation = self._score(batch, expected=self._train.sequences_per_step)
        self._generation = generation
        masks = [torch.tensor(record.response_mask) for record in generation.records]
        fields = {"rm_scores": _jagged([_at_end(m, r) for m, r in zip(masks, generation.known, strict=True)])}
        if not generation.all_dropped:  # a batch without any token would be divided by 0: its advantages are 0 instead
            kept = _jagged([mask * (not gone) for mask, gone in zip(masks, generation.dropped, strict=True)])
            fields |= {"response_mask": kept, "loss_mask": kept}
        return _put(batch, fields)

    def _score(self, batch: KVBatchMeta, *, expected: int) -> Generation:
        batch.reorder(sorted(range(len(batch)), key=lambda i: place_of(batch.keys[i])))
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(READ))
        records = records_of(batch.keys, data, expected=expected)
        drops = bool(getattr(objective_of(self._run.spec).settings, "drop_truncated", False))
        return score(batch.keys, records, self._run.rewards, self._copies, drop_truncated=drops)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The objective's advantages, one for each token, and the rows of all channels."""
        if self._settings.advantages != CORE:
            batch = super()._compute_advantage(batch, metrics)
        fields = ["response_mask", "old_log_probs", *(["ref_log_prob"] if self.use_reference_policy else [])]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        order = [
            None if tag.get("is_padding") else self._index(key) for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
        put: dict[str, Any] = {FIELD: encode(self._samples(order))}
        if self._settings.advantages == CORE or self._taken().all_dropped:
            put["advantages"] = put["returns"] = self._advantages({name: data[name] for name in fields}, order)
        return self._taught(_put(batch, put))

    def _taught(self, batch: KVBatchMeta) -> KVBatchMeta:
        """With what teachers that read ahead find for its rows."""
        if self._settings.topk == AHEAD:
            found = self.actor_rollout_wg.composer_teach(batch)
            batch.fields = sorted({*batch.fields, *found.fields})
        return batch

    def _index(self, key: str) -> int:
        """Of a rollout in the generation, from its key."""
        prompt, member = place_of(key)
        return prompt * self._train.group_size + member

    def _advantages(self, data: Mapping[str, Tensor], order: Sequence[int | None]) -> Tensor:
        """(S, tokens) jagged, in the batch's order."""
        generation = self._taken()
        own = [row for row, index in enumerate(order) if index is not None]
        rows = sorted(own, key=lambda row: order[row])  # the generation's order
        parts = {name: _jagged([values.unbind()[row] for row in rows]) for name, values in data.items()}
        given = advantages_of(
            self._loss.objective,
            generation,
            parts["response_mask"],
            old=parts["old_log_probs"],
            reference=parts.get("ref_log_prob"),
        )
        if generation.all_dropped:
            given = torch.zeros_like(given)
        self._tell(generation, given)
        mask = data["response_mask"].unbind()
        shown = [0.0 if index is None else float(given[index]) for index in order]
        return _jagged([one.float() * value for one, value in zip(mask, shown, strict=True)])

    def _samples(self, order: Sequence[int | None]) -> list[Sample]:
        """What each sequence of the batch carries for the channels; a filler of verl's carries nothing."""
        generation = self._taken()
        texts = [
            replace(text, completion_ids=[], action=[]) if gone else text
            for text, gone in zip(
                rollout_texts(generation.records, generation.known, tokenizer=self.tokenizer),
                generation.dropped,
                strict=True,
            )
        ]
        prepared = self._loss.prepare_all(texts)
        drawn = self._drawn(len(texts))
        return [
            Sample()
            if index is None
            else Sample(
                texts[index].uid, generation.groups[index], generation.known[index], prepared[index], drawn[index]
            )
            for index in order
        ]

    def _drawn(self, count: int) -> list[dict[str, dict[str, list[Any]]]]:
        """What channels draw for the coming optimiser steps, spread over `count` rollouts and so over ranks."""
        spread: list[dict[str, dict[str, list[Any]]]] = [{} for _ in range(count)]
        for step in range(self.steps + 1, self.steps + 1 + self._train.iterations):
            for name, rows in self._loss.draw(step, 0, 1).items():
                for own in spread:
                    own.setdefault(str(step), {})[name] = []
                for number, row in enumerate(rows):
                    spread[number * count // len(rows)][str(step)][name].append(row)
        return spread

    def _tell(self, generation: Generation, advantages: Tensor) -> None:
        step, wanted = self.steps + 1, self._train.sample_rollouts
        if wanted and -(-step // self._train.log_every) * self._train.log_every < step + self._train.iterations:
            self._run.log_rollouts(step, generation.samples(advantages, count=wanted))

    def _taken(self) -> Generation:
        if self._generation is None:
            raise RunFailed("verl compares rollouts that were never scored: another verl than expected")
        return self._generation

    # -- beside training ---------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Rewards on held-out prompts with the weights of now, under `eval/`; training notices nothing of it."""
        held_out = self._run.spec.data.eval
        assert held_out is not None
        before = capture_rng()  # of rewards that draw
        # numbered from behind: no rollout of training has the same seed
        batch = self._batch(self._held_out, name=f"{HELD_OUT}-", first=-len(self._held_out))
        tu.assign_non_tensor_data(batch, "validate", True)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in self._held_out]
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id=HELD_OUT, tags=tags)
        self.agent_loop_manager.generate_sequences(batch)
        rollouts, _ = self.replay_buffer.sample(
            global_steps=self.global_steps, partition_id=HELD_OUT, batch_size=len(self._held_out)
        )
        tried = self._score(rollouts, expected=len(self._held_out) * held_out.group_size)
        tq.kv_clear(keys=rollouts.keys, partition_id=HELD_OUT)
        restore_rng(before)
        return eval_metrics(tried.scores, tried.rewards.tolist())

    def place(self) -> dict[str, Any]:
        """Where this process stands between two generations; as `run.state.save_state` takes it."""
        return {
            "steps": self.steps,
            "generations": self.global_steps,
            "prompts": self._prompts.state_dict(),
            "rng": capture_rng(),
        }

    def go_to(self, place: dict[str, Any]) -> None:
        """Stand where `place` was taken."""
        self.steps, self.global_steps = place["steps"], place["generations"]
        self._prompts.load_state_dict(place["prompts"])
        restore_rng(place["rng"])

    def save(self, folder: Path) -> None:
        """Have each rank write its part of a checkpoint."""
        self.actor_rollout_wg.composer_save(str(folder))

    def export(self, folder: Path) -> None:
        """Have the policy written as a Hugging Face folder."""
        model = self._run.spec.model
        merge = model.lora is not None and model.lora.merge
        self.actor_rollout_wg.composer_export(str(folder), model.dtype, merge)


def _copies(run: RunContext) -> Copies | None:
    """For rewards that look at a rollout's environment."""
    rollout = run.spec.rollout
    if rollout is None or rollout.environment is None:
        return None
    environments = load_tools(rollout).environments
    return None if environments is None else Copies(environments)


def _put(batch: KVBatchMeta, fields: dict[str, Any]) -> KVBatchMeta:
    """The batch with these fields beside its own, in the queue."""
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, len(batch)))


def _jagged(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def _at_end(mask: Tensor, reward: float | None) -> Tensor:
    """A reward as verl wants it: at the last token, 0 at the others."""
    scores = torch.zeros(len(mask))
    scores[-1] = 0.0 if reward is None or math.isnan(reward) else reward
    return scores
