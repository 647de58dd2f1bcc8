"""GRPOTrainer that can be stopped, gone on with, and evaluated, without a trace in what it computes.

It can say and restore its place between two steps, which trl's own checkpoint leaves out, stops before a step that is
not finite, and evaluates without moving a random generator. It knows nothing of the core's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_core.errors import MissingError
from composer_core.run.metrics import eval_metrics
from composer_core.run.state import capture_rng, restore_rng
from composer_trl import surface
from composer_trl.finite import FiniteSteps


class SteadyGRPOTrainer(FiniteSteps, GRPOTrainer):  # type: ignore[misc]
    """See the module.

    Args:
        args, kwargs: as `trl.GRPOTrainer` takes them.
        on_evaluation: called with the trainer's control and the metrics `eval/...` after each evaluation.

    Raises:
        MissingError: the installed trl is not the one this class was written against.
    """

    def __init__(
        self, *args: Any, on_evaluation: Callable[[Any, dict[str, float]], None] | None = None, **kwargs: Any
    ) -> None:
        found = surface.problems()
        if found:
            raise MissingError("; ".join(found), fix=f"pip install 'trl>={surface.SUPPORTED},<1.17'")
        self._on_evaluation = on_evaluation
        self._evaluated: list[Tensor] = []
        super().__init__(*args, **kwargs)
        missing = surface.LOG_KEYS - set(self._logs)
        if missing:
            raise MissingError(f"GRPOTrainer._logs has no {', '.join(sorted(missing))}: another trl than expected")
        absent = sorted(name for name in surface.ATTRIBUTES if not hasattr(self, name))
        if absent:
            raise MissingError(f"GRPOTrainer has no {', '.join(absent)}: another trl than expected")

    # -- stopping before a step that is not finite -------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer`.

        Raises:
            NonFinite: the loss of this step, on every process; nothing of the step was applied.
        """
        loss: Tensor = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss).all():  # transformers would put an average in its place in the log, and go on
            self._found(f"the loss is {loss.item()} at step {self.state.global_step + 1}")
        self._raise_together(last=self._step % self.args.gradient_accumulation_steps == 0)
        return loss

    # -- the place between two steps ---------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Where training stands between two steps, beyond what trl saves; as `run.state.save_state` takes it."""
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "micro_step": self._step,
            "tokens": self.state.num_input_tokens_seen,
            "buffer": None if used_up else self._buffered_inputs,
            "rng": capture_rng(),
        }

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Stand where `place` was taken: call it before `train(resume_from_checkpoint=...)` of the same step."""
        self._step = place["micro_step"]
        self._buffered_inputs = place["buffer"]

    def save_at(self, place: Mapping[str, Any]) -> None:
        """Save the state of the last applied step, whose `place` this is, after a later one was broken off."""
        self.go_to(place)
        self.state.num_input_tokens_seen = place["tokens"]
        restore_rng(place["rng"])  # trl saves the generators' state as it is now
        self._save_checkpoint(self.model, trial=None)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if getattr(sampler, "shuffle", False):
            # each round shuffles anew from one generator, which trl makes afresh when it resumes
            drawn = self._step * self.args.generation_batch_size  # each micro-step draws a whole generation's prompts
            for _ in range(drawn // len(sampler)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs: Any, *args: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, *args)
        if not self.model.training:
            self._evaluated.append(rewards.detach().cpu())
        return rewards

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `transformers.Trainer`; training goes on as if nothing had been evaluated."""
        self._evaluated = []
        before = capture_rng()
        metrics: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
        restore_rng(before)
        if self._on_evaluation is not None:
            self._on_evaluation(self.control, self._eval_metrics(eval_dataset or self.eval_dataset))
        return metrics

    def _eval_metrics(self, dataset: Any) -> dict[str, float]:
        """From every completion; trl's own are means of batches, whatever their sizes."""
        rewards = torch.cat(self._evaluated)  # (completions, rewards), over all processes
        rewards = rewards[: len(dataset) * self.num_generations_eval]  # behind them rows that fill up the last batches
        weighted = (rewards * self.reward_weights.cpu()).nansum(dim=1)
        weighted[rewards.isnan().all(dim=1)] = math.nan
        scores = {name: rewards[:, i].tolist() for i, name in enumerate(self.reward_func_names)}
        return eval_metrics(scores, weighted.tolist())
