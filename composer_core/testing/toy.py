"""Backend `toy`: GRPO in plain torch, to prove channels and objectives on. Rollout, reward, advantage, loss, step.

`sampling.py` generates and scores, `accumulate.py` makes gradients, `toy_files.py` knows what a checkpoint holds.
Left out on purpose: adapters, top-p and top-k, schedules, checkpointed activations, resume; a spec that asks for one
is refused by its plan. Teacher and reference are the starting model, frozen. Under torch.distributed each rank takes
its share of a step's prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import RunFailed, UsageError
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.reduce import segment_sum, select
from composer_core.loss.views import ModelView
from composer_core.plugins.builtin_settings import ToySettings
from composer_core.protocols import RolloutText, TrainResult
from composer_core.run.context import RolloutSample, RunContext
from composer_core.spec.model import RunSpec
from composer_core.testing.accumulate import Window, accumulate_gradients, gather, sum_over_ranks, world_size
from composer_core.testing.sampling import Completion, sample, score, weigh
from composer_core.testing.toy_files import save_loss_state, save_model, save_optimizer


class ToyBackend:
    """See the module. Holds nothing between runs."""

    def __init__(self, settings: ToySettings) -> None:
        pass

    def check(self) -> list[str]:
        """Nothing upstream that could differ."""
        return []

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to the last step, or to the first step boundary at which any rank has a reason to stop.

        Raises:
            UsageError: the processes cannot share the prompts of a step equally.
            RunFailed: a loss or the gradient is not finite.
        """
        _share_prompts(run.spec)
        return _Training(run, loss).run_steps()


def _share_prompts(spec: RunSpec) -> None:
    prompts, world = spec.train.prompts_per_step, world_size()
    if prompts % world:
        raise UsageError(f"{prompts} prompts cannot be shared by {world} processes", at="train.prompts_per_step")


@dataclass(frozen=True)
class _Drawn:
    """One entry per completion of this rank."""

    rows: list[dict[str, Any]]
    completions: list[Completion]
    scores: dict[str, list[float | None]]
    rewards: Tensor
    group: Tensor
    uid: tuple[str, ...]


class _Training:
    def __init__(self, run: RunContext, loss: CompositeLoss) -> None:
        self.run, self.loss, self.train = run, loss, run.spec.train
        folder, model = run.model_folder(), run.spec.model
        self.tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        self.policy = load_policy(folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
        self.reference = deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.train.learning_rate, weight_decay=self.train.weight_decay
        )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.prompts = _endless(run.prompts(), seed=run.spec.seed)
        self.generator = torch.Generator().manual_seed(run.spec.seed + self.rank)

    def run_steps(self) -> TrainResult:
        """The loop; `iterations` optimiser steps share one set of rollouts."""
        step, reason = 0, None
        while step < self.train.steps and reason is None:
            step, started = step + 1, time.perf_counter()
            if (step - 1) % self.train.iterations == 0:
                window, samples, rewards = self.roll_out(step)
            metrics = {**rewards, **self.optimise(window, step)}
            self.loss.on_step_end(step, metrics)
            seconds = time.perf_counter() - started
            speed = {"step_time": seconds, "tokens_per_s": metrics.pop("tokens") / seconds}
            if step % self.train.log_every == 0 or step == self.train.steps:
                self.run.log_step(step, {**metrics, **speed})
                self.run.log_rollouts(step, samples[: self.train.sample_rollouts])
            reason = self.stop_reason()
            self.checkpoint(step, stopping=reason is not None)
        with self.run.trained_model() as folder:
            if self.run.is_main:
                save_model(folder, self.policy, self.tokenizer)
        return TrainResult(steps=step, stopped=reason or "")

    def roll_out(self, step: int) -> tuple[Window, list[RolloutSample], dict[str, float]]:
        """Sample and score this rank's prompts, compare over all ranks, let the channels prepare their rows."""
        drawn = self.draw(step)
        everyone = gather(drawn.rewards)
        rollouts, advantages = self.compare(drawn, everyone)
        prepared = [self.loss.prepare(text) for text in _texts(drawn)]
        window = Window(
            rollouts=rollouts,
            rows={active.name: [rows[active.name] for rows in prepared] for active in self.loss.active},
            splits=_splits(len(drawn.rows), self.train.micro_batch_size),
            longest=self.train.max_completion_tokens,
        )
        samples = [
            RolloutSample(row["prompt"], c.text, {name: s[i] for name, s in drawn.scores.items()}, float(advantages[i]))
            for i, (row, c) in enumerate(zip(drawn.rows, drawn.completions, strict=True))
        ]
        return window, samples, {"reward/mean": float(everyone.nanmean()), "reward/std": _std(everyone)}

    def draw(self, step: int) -> _Drawn:
        """A share of the step's prompts, `group_size` completions each."""
        size = self.train.group_size
        prompts = list(enumerate(next(self.prompts) for _ in range(self.train.prompts_per_step)))
        share = len(prompts) // world_size()
        mine = [prompt for prompt in prompts[self.rank * share : (self.rank + 1) * share] for _ in range(size)]
        rows = [row for _, row in mine]
        completions = sample(
            self.policy,
            self.tokenizer,
            [row["prompt"] for row in rows],
            limit=self.train.max_completion_tokens,
            temperature=self.train.temperature,
            generator=self.generator,
        )
        scores = score(self.run.rewards, rows, completions)
        return _Drawn(
            rows=rows,
            completions=completions,
            scores=scores,
            rewards=torch.tensor([weigh(self.run.rewards, scores, index=i) for i in range(len(rows))]),
            group=torch.tensor([g for g, _ in mine]),
            uid=tuple(f"{step}-{g}-{i % size}" for i, (g, _) in enumerate(mine)),
        )

    def compare(self, drawn: _Drawn, rewards: Tensor) -> tuple[Rollouts, Tensor]:
        """Packed rollouts and their advantages, (S,), from the rewards of all ranks."""
        seqs = Seqs.from_lists([c.prompt_ids + c.ids for c in drawn.completions])
        flags = [[False] * len(c.prompt_ids) + [not self.dropped(c)] * len(c.ids) for c in drawn.completions]
        action = torch.tensor([flag for sequence in flags for flag in sequence])
        view = ModelView(self.policy, rollouts=seqs, reference=self.reference)
        old = view.logps(seqs, grad=False, temperature=self.train.temperature)
        ref = view.logps(seqs, model="reference", grad=False, temperature=self.train.temperature)
        advantages = self.run.objective.advantages(
            rewards,
            gather(drawn.group),
            gather(segment_sum(action.float(), seqs)),
            gather(segment_sum(select(old - ref, action), seqs)),
        )
        own = advantages[self.rank * len(seqs) : (self.rank + 1) * len(seqs)]
        rollouts = Rollouts(
            seqs=seqs,
            action=action,
            advantages=own[seqs.owner],
            # None while the policy is the one that sampled: the ratio is then exactly 1
            old_logps=old if self.train.iterations > 1 else None,
            ref_logps=ref,
            rewards=drawn.rewards,
            group=drawn.group,
            uid=drawn.uid,
        )
        return rollouts, own

    def dropped(self, completion: Completion) -> bool:
        """Truncated, where the objective's settings leave those out (a third party's may not have the setting)."""
        return completion.truncated and getattr(self.run.spec.loss.objective.settings, "drop_truncated", False)

    def optimise(self, window: Window, step: int) -> dict[str, float]:
        """One optimiser step; the step's losses over all ranks."""
        self.policy.train()
        self.optimizer.zero_grad()
        base = Batch(step=step, total_steps=self.train.steps, temperature=self.train.temperature)
        metrics = accumulate_gradients(self.policy, self.loss, window, base=base, reference=self.reference)
        # the gradients are the same on every rank by now, so all of them fail here or none
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.train.max_grad_norm))
        if not math.isfinite(norm):
            raise RunFailed(f"the gradient is {norm} at step {step}", fix="lower train.learning_rate")
        self.optimizer.step()
        return {**metrics, "grad_norm": norm}

    def stop_reason(self) -> str | None:
        """A reason that any rank has, known to all: none may go on into a collective alone."""
        reason = self.run.stop_reason()
        stopping = sum_over_ranks({"stopping": float(reason is not None)})["stopping"]
        return (reason or "another process was asked to stop") if stopping else None

    def checkpoint(self, step: int, *, stopping: bool) -> None:
        """Save every so many steps, and before an early end."""
        every = self.run.spec.checkpoint.every
        if not stopping and (every is None or step % every):
            return
        with self.run.checkpoint(step) as folder:
            if self.run.is_main:
                save_model(folder, self.policy, self.tokenizer)
                save_optimizer(folder, self.policy, self.optimizer)
                save_loss_state(folder, self.loss.state_dict())


def _endless(rows: list[dict[str, Any]], *, seed: int) -> Iterator[dict[str, Any]]:
    """Rows in a new order each time round, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(rows), generator=generator).tolist():
            yield rows[i]


def _texts(drawn: _Drawn) -> Iterator[RolloutText]:
    for uid, row, completion, reward in zip(
        drawn.uid, drawn.rows, drawn.completions, drawn.rewards.tolist(), strict=True
    ):
        yield RolloutText(
            uid=uid,
            prompt_ids=completion.prompt_ids,
            completion_ids=completion.ids,
            action=[True] * len(completion.ids),
            reward=None if math.isnan(reward) else reward,
            columns=row,
        )


def _splits(sequences: int, size: int) -> list[range]:
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]


def _std(rewards: Tensor) -> float:
    present = rewards[~rewards.isnan()]
    return float(present.std()) if len(present) > 1 else 0.0
