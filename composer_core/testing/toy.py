"""Backend `toy`: GRPO in plain torch, to prove channels and objectives on. Rollout, reward, advantage, loss, step.

`sampling.py` generates and scores, `accumulate.py` makes gradients, `toy_files.py` and `toy_state.py` know what a
checkpoint holds. Left out on purpose: adapters, top-p and top-k, schedules, checkpointed activations; a spec that asks
for one is refused by its plan. Teacher and reference are the starting model, frozen. Under torch.distributed each rank
takes its share of a step's prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.data.scoring import weigh
from composer_core.errors import NonFinite
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.reduce import segment_sum, select
from composer_core.loss.views import ModelView
from composer_core.plugins.builtin_settings import ToySettings
from composer_core.protocols import RolloutText, TrainResult
from composer_core.run.collectives import gather, world_size
from composer_core.run.context import Checkpoint, RolloutSample, RunContext
from composer_core.run.control import agree
from composer_core.run.metrics import reward_metrics
from composer_core.run.prompts import Prompts
from composer_core.run.state import capture_rng, load_state, restore_rng, save_state
from composer_core.testing.accumulate import Window, accumulate_gradients
from composer_core.testing.sampling import Completion, evaluate, sample, score
from composer_core.testing.toy_files import LOSS, PLACE, load_optimizer, save_model, save_optimizer
from composer_core.testing.toy_state import Generation, generation_of, state_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ToyBackend:
    """See the module. Holds nothing between runs."""

    def __init__(self, settings: ToySettings) -> None:
        pass

    def check(self) -> list[str]:
        """Nothing upstream that could differ."""
        return []

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to the last step, or to the first step boundary at which any rank has a reason to stop.

        A loss or gradient that is not finite is such a reason too: its step is not applied.
        """
        return _Training(run, loss).run_steps()


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
        self.prompts = Prompts(run.prompts(), seed=run.spec.seed)
        self.held_out = run.eval_prompts()
        self.generator = torch.Generator().manual_seed(run.spec.seed + self.rank)
        self.step = 0
        self.generation: Generation | None = None
        """Rollouts that the next step trains on; None: it makes new ones."""
        if run.resume_from is not None:
            self.restore(run.resume_from)
        self.boundary = self.place()

    def run_steps(self) -> TrainResult:
        """The loop."""
        reason = None
        while self.step < self.train.steps and reason is None:
            try:
                self.one_step(self.step + 1)
            except NonFinite as error:
                reason = error.problem
            else:
                self.step += 1
                self.boundary = self.place()
                if self.step < self.train.steps:
                    reason = agree(self.run.stop_reason())
            self.checkpoint(stopping=reason is not None)
        with self.run.trained_model() as folder:
            if self.run.is_main:
                save_model(folder, self.policy, self.tokenizer)
        return TrainResult(steps=self.step, stopped=reason or "")

    def one_step(self, step: int) -> None:
        """Rollouts where there are none left, one optimiser step, the log; `iterations` steps share one generation.

        Raises:
            NonFinite: a loss or the gradient; nothing was applied then.
        """
        started = time.perf_counter()
        generation = self.generation or self.roll_out(step)
        metrics = {**generation.metrics, **self.optimise(generation.window, step)}
        self.generation = None if step % self.train.iterations == 0 else generation
        self.loss.on_step_end(step, metrics)
        seconds = time.perf_counter() - started
        metrics |= {"step_time": seconds, "tokens_per_s": metrics.pop("tokens") / seconds}
        evaluated = self.evaluate(step)
        if step % self.train.log_every == 0 or step == self.train.steps or evaluated:
            self.run.log_step(step, {**metrics, **evaluated})
            self.run.log_rollouts(step, generation.samples[: self.train.sample_rollouts])

    def roll_out(self, step: int) -> Generation:
        """Sample and score this rank's prompts, compare over all ranks, let the channels prepare their rows."""
        drawn = self.draw(step)
        everyone = gather(drawn.rewards)
        rollouts, advantages = self.compare(drawn, everyone)
        prepared = self.loss.prepare_all(list(_texts(drawn, self.tokenizer)))
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
        return Generation(window, samples, reward_metrics(everyone.tolist(), gather(drawn.group).tolist()))

    def draw(self, step: int) -> _Drawn:
        """A share of the step's prompts, `group_size` completions each."""
        size = self.train.group_size
        prompts = list(enumerate(self.prompts.take(self.train.prompts_per_step)))
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
        flags = [[False] * len(c.prompt_ids) + [not self.dropped(c)] * len(c.ids) for c in drawn.completions]
        action = torch.tensor([flag for sequence in flags for flag in sequence])
        seqs = replace(Seqs.from_lists([c.prompt_ids + c.ids for c in drawn.completions]), scored=action)
        view = ModelView(self.policy, rollouts=seqs, reference=self.reference)
        old = view.logps(seqs, grad=False, temperature=self.train.temperature)
        ref = view.logps(seqs, model="reference", grad=False, temperature=self.train.temperature)
        assert self.run.objective is not None  # `rollouts: none` is refused by the plan
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
        objective = self.run.spec.loss.objective
        return completion.truncated and objective is not None and getattr(objective.settings, "drop_truncated", False)

    def optimise(self, window: Window, step: int) -> dict[str, float]:
        """One optimiser step; the step's losses over all ranks."""
        self.policy.train()
        self.optimizer.zero_grad()
        base = Batch(step=step, total_steps=self.train.steps, temperature=self.train.temperature)
        window = replace(window, rows={**window.rows, **self.loss.draw(step, self.rank, world_size())})
        metrics = accumulate_gradients(self.policy, self.loss, window, base=base, reference=self.reference)
        # the gradients are the same on every rank by now, so all of them fail here or none
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.train.max_grad_norm))
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient norm is {norm} at step {step}", fix="lower train.learning_rate")
        self.optimizer.step()
        return {**metrics, "grad_norm": norm}

    def evaluate(self, step: int) -> dict[str, float]:
        """Rewards on held-out prompts, every so many steps and after the last one; training notices nothing of it."""
        settings = self.run.spec.data.eval
        if settings is None or (step % settings.every and step != self.train.steps):
            return {}
        before = capture_rng()  # of rewards that draw
        completions = partial(
            sample,
            self.policy,
            self.tokenizer,
            limit=self.train.max_completion_tokens,
            temperature=self.train.temperature,
            generator=torch.Generator().manual_seed(self.run.spec.seed + step),
        )
        rows = [row for row in self.held_out for _ in range(settings.group_size)]
        metrics = evaluate(completions, self.run.rewards, rows, batch=self.train.sequences_per_step)
        restore_rng(before)
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Where this rank stands between two steps, beside weights and optimiser; safe from what the next step does."""
        return {
            "step": self.step,
            "prompts": self.prompts.state_dict(),
            "generator": self.generator.get_state(),
            "rng": capture_rng(),
            "generation": self.generation,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a checkpoint was made."""
        folder, model = checkpoint.folder, self.run.spec.model
        saved = load_policy(folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
        self.policy.load_state_dict(saved.state_dict())
        load_optimizer(folder, self.policy, self.optimizer)
        self.loss.load_state_dict(load_state(folder, LOSS))
        place = load_state(checkpoint.own, PLACE)
        self.step = place["step"]
        self.prompts.load_state_dict(place["prompts"])
        self.generator.set_state(place["generator"])
        self.generation = None if place["generation"] is None else generation_of(place["generation"])
        restore_rng(place["rng"])

    def checkpoint(self, *, stopping: bool) -> None:
        """Save every so many steps, after the last one, and before an early end."""
        every, last = self.run.spec.checkpoint.every, self.step == self.train.steps
        if not self.step or not (stopping or (every is not None and (last or self.step % every == 0))):
            return
        place, generation = self.boundary, self.boundary["generation"]
        with self.run.checkpoint(self.step) as folder:
            if self.run.is_main:
                save_model(folder, self.policy, self.tokenizer)
                save_optimizer(folder, self.policy, self.optimizer)
                save_state(folder, LOSS, self.loss.state_dict())
            save_state(folder, PLACE, {**place, "generation": generation and state_of(generation)})


def _texts(drawn: _Drawn, tokenizer: PreTrainedTokenizerBase) -> Iterator[RolloutText]:
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
            tokenizer=tokenizer,
        )


def _splits(sequences: int, size: int) -> list[range]:
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]
