"""GRPOTrainer with an ear: it refuses combinations that mislead, and hands each generation to a listener.

Channel 1 is the stock loss, untouched: with the same GRPOConfig the losses and the weights are bit-equal to
`trl.GRPOTrainer`. Beyond that it can say and restore its place between two steps, which trl's own checkpoint leaves
out, stops before a step that is not finite, and evaluates without a trace in training. The private surface used here is
named and checked in `surface.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from composer_core.errors import MissingError, NonFinite
from composer_core.run.metrics import eval_metrics
from composer_core.run.state import capture_rng, restore_rng
from composer_trl import surface
from composer_trl.po_config import refuse_traps


@dataclass(frozen=True)
class Generation:
    """The rollouts of one generation, over all processes, in TRL's order (a prompt's group is contiguous)."""

    step: int
    """The optimiser step they are about to train, from 1."""
    prompts: list[Any]
    completions: list[Any]
    """Texts, or lists of chat messages."""
    rewards: dict[str, list[float]]
    """Reward name -> one value per completion; NaN where it did not apply."""
    advantages: list[float]


class ComposerGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer`, usable wherever that is.

    Args:
        model, reward_funcs, args, rest, kwargs: as `trl.GRPOTrainer` takes them.
        on_generation: called on every process after each generation while training.
        on_evaluation: called with the trainer's control and the metrics `eval/...` after each evaluation.

    Raises:
        ValueError: a GRPOConfig that computes something else than it says, a KL without a model to reload as the
            reference, or an adapter on `lm_head`.
        MissingError: the installed trl is not the one this class was written against.

    Example::

        trainer = ComposerGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=[reward], train_dataset=dataset,
            args=make_po_config("dr-grpo", output_dir="out"))
        trainer.train()
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *rest: Any,
        on_generation: Callable[[Generation], None] | None = None,
        on_evaluation: Callable[[Any, dict[str, float]], None] | None = None,
        **kwargs: Any,
    ) -> None:
        found = surface.problems()
        if found:
            raise MissingError("; ".join(found), fix=f"pip install 'trl>={surface.SUPPORTED},<1.17'")
        if args is not None:
            refuse_traps(vars(args))
            _refuse_unloadable_reference(model, args, peft_config=kwargs.get("peft_config"))
        _refuse_head_adapter(kwargs.get("peft_config"))
        self._on_generation = on_generation
        self._on_evaluation = on_evaluation
        self._evaluated: list[Tensor] = []
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        missing = surface.LOG_KEYS - set(self._logs)
        if missing:
            raise MissingError(f"GRPOTrainer._logs has no {', '.join(sorted(missing))}: another trl than expected")
        absent = sorted(name for name in surface.ATTRIBUTES if not hasattr(self, name))
        if absent:
            raise MissingError(f"GRPOTrainer has no {', '.join(absent)}: another trl than expected")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._on_generation is not None and self.model.training:
            self._on_generation(
                Generation(
                    step=self.state.global_step + 1,
                    prompts=list(self._logs["prompt"]),
                    completions=list(self._logs["completion"]),
                    rewards={name: list(values) for name, values in self._logs["rewards"].items()},
                    advantages=list(self._logs["advantages"]),
                )
            )
        return batch

    # -- stopping before a step that is not finite -------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer`.

        Raises:
            NonFinite: the loss of this micro-batch; nothing of its step was applied.
        """
        loss: Tensor = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss).all():  # transformers would put an average in its place in the log, and go on
            raise NonFinite(f"the loss is {loss.item()} at step {self.state.global_step + 1}")
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(float(norm)):
            raise NonFinite(f"the gradient norm is {float(norm)} at step {self.state.global_step + 1}")
        return norm

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

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `transformers.Trainer`; training goes on as if nothing had been evaluated."""
        self._evaluated = []
        before = capture_rng()
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        restore_rng(before)
        if self._on_evaluation is not None:
            self._on_evaluation(self.control, self._eval_metrics())
        return metrics

    def _eval_metrics(self) -> dict[str, float]:
        """From every completion; trl's own are means of batches, whatever their sizes."""
        rewards = torch.cat(self._evaluated)  # (completions, rewards), over all processes
        weighted = (rewards * self.reward_weights.cpu()).nansum(dim=1)
        weighted[rewards.isnan().all(dim=1)] = math.nan
        scores = {name: rewards[:, i].tolist() for i, name in enumerate(self.reward_func_names)}
        return eval_metrics(scores, weighted.tolist())


def _refuse_unloadable_reference(model: Any, args: GRPOConfig, *, peft_config: Any) -> None:
    """With a KL and no adapter TRL loads the reference again by the model's name; a nameless model fails obscurely."""
    if args.beta == 0 or isinstance(model, str) or peft_config is not None or hasattr(model, "peft_config"):
        return
    if not getattr(model.config, "_name_or_path", ""):
        raise ValueError(
            f"beta={args.beta} needs a reference model, which trl loads again from the model's own path; this model "
            "was made in memory. Save it first and pass the folder, or set beta=0"
        )


def _refuse_head_adapter(peft_config: Any) -> None:
    targets = getattr(peft_config, "target_modules", None)
    if targets and not isinstance(targets, str) and any(name.rpartition(".")[2] == "lm_head" for name in targets):
        raise ValueError("an adapter on lm_head cannot be used: trl's fused log-prob head reads its plain weight")
