"""verl's synchronous trainer in the run's own process: its generation, queue and workers, our loop around them.

    prepare_step              the next prompts go to the agent loops
    _compute_reward_colocate  rollouts come back: put in order, scored by the run's rewards
    _compute_advantage        the objective compares them; the channels prepare their rows
    _update_actor             the optimiser steps on the workers; what they report

What verl calls a step is one generation, with `train.iterations` optimiser steps, and those are what a run counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_to_nested

from composer_core.errors import NonFinite, RunFailed
from composer_core.loss.composite import CompositeLoss
from composer_core.run.context import RunContext
from composer_core.run.prompts import Prompts
from composer_verl.generation import Generation, read_generation
from composer_verl.rows import FIELD, Sample, encode
from composer_verl.worker import ComposerWorker


class ComposerTrainer(PPOTrainerSync):  # type: ignore[misc]
    """See the module.

    Args:
        config: verl's, complete.
        run: the run.
        loss: channels and objective of this process, which prepares their rows.
    """

    def __init__(self, config: DictConfig, run: RunContext, loss: CompositeLoss) -> None:
        self.run, self.loss = run, loss
        self.spec, self.train_spec = run.spec, run.spec.train
        self.prompts = Prompts(run.prompts(), seed=run.spec.seed)
        self.held_out = run.eval_prompts()
        self.step_now = 0
        """Optimiser steps that were applied."""
        self.generation: Generation | None = None
        self.curr_step_profile = False
        super().__init__(config)

    # -- what verl sets up -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Workers, rollout servers and agent loops; the first weights reach the servers."""
        self.init()
        # none of verl's own reward workers: the rewards are called in this process
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
        self.agent_loop_manager = AgentLoopManagerTQ.create(
            config=self.config, llm_client=self.get_llm_client(), teacher_client=None, reward_loop_worker_handles=None
        )

    def _init_dataloader(self) -> None:
        """The prompts come from the run, in an order that a checkpoint can hold without a pickle."""
        generations = self.train_spec.steps // self.train_spec.iterations
        self.steps_per_epoch = self.total_training_steps = generations
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = generations

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping = {role: ray.remote(ComposerWorker) for role in self.role_worker_mapping}

    def _load_checkpoint(self) -> None:
        """Nothing yet: the backend restores a run."""
        self.global_steps = self.step_now // self.train_spec.iterations

    # -- one generation ----------------------------------------------------------------------------------------------

    def one_generation(self) -> list[dict[str, float]]:
        """Rollouts, and the optimiser steps on them; their metrics, in order.

        Raises:
            NonFinite: a loss or the gradient; that step and those behind it were not applied.
            RunFailed: a rollout is missing.
        """
        self.global_steps += 1
        self.timing_raw: dict[str, float] = {}
        upstream: dict[str, Any] = {}
        started = time.perf_counter()
        batch = self.step(upstream, self.timing_raw)
        (report, *_) = self.actor_rollout_wg.composer_report()
        self.on_step_end()
        generation = self._taken()
        self._compute_metrics(batch, upstream, self.timing_raw, global_steps=self.global_steps, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        first = self.step_now + 1
        self.step_now += len(report["steps"])
        seconds = (time.perf_counter() - started) / self.train_spec.iterations
        if report["fault"] is not None:
            raise NonFinite(report["fault"])
        return [
            {**generation.metrics, **own, **_numbers(upstream), "step_time": seconds}
            for _, own in enumerate(report["steps"], start=first)
        ]

    def prepare_step(self) -> dict[str, Any]:
        """Hand the next prompts to the agent loops."""
        rows = self.prompts.take(self.train_spec.prompts_per_step)
        self._submit_batch_to_rollout(self._batch(rows))
        return {}

    def _batch(self, rows: Sequence[dict[str, Any]], *, prefix: str = "") -> TensorDict:
        uids = [f"{prefix}{self.global_steps}-{index}" for index in range(len(rows))]
        batch: TensorDict = tu.get_tensordict(prompt_columns(rows, uids))
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch
