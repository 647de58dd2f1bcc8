"""GRPOTrainer with one loss of several parts: channels beside TRL's policy loss, or an objective of the core.

Without channels, or with all of them at weight 0, it computes what `trl.GRPOTrainer` does, bit by bit. TRL's loss is
called, never copied. What the loss is made of stands in `composition.py`; stopping and going on in `steady.py`. The
private surface used here is named and checked in `surface.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig

from composer_core.batch import Batch
from composer_core.data.tool_checks import tool_schemas
from composer_core.errors import MissingError, NonFinite, RunFailed, UsageError
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.heads import take_apart
from composer_core.traces.conversation_sites import rollout_columns
from composer_trl import policy_head, surface
from composer_trl.advantages import objective_advantages
from composer_trl.composition import ROWS, TRLComposition
from composer_trl.metrics import OWN
from composer_trl.micro_batch import GROUP, REWARD, UID, Forward, ids_and_mask, listen, texts_of
from composer_trl.objectives import ignored_fields
from composer_trl.po_config import refuse_traps
from composer_trl.steady import SteadyGRPOTrainer


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


class ComposerGRPOTrainer(SteadyGRPOTrainer):
    """`trl.GRPOTrainer`, usable wherever that is, with one loss of several parts.

    Args:
        model, reward_funcs, args, rest, kwargs: as `trl.GRPOTrainer` takes them, and `steady.SteadyGRPOTrainer`.
        loss: channels beside the policy loss, and the objective where the trainer's own is not to be used.
        native: the policy loss is the trainer's own, by `args.loss_type`; False: it is `loss.objective`.
        own_head: beside channels or an objective of the core, take the policy's log-probs from the core's output head
            where that is faster (`policy_head.py`); then they equal TRL's but for rounding, else bit by bit.
        on_generation: called on every process after each generation while training.

    Raises:
        ValueError: a GRPOConfig that computes something else than it says or that asks for what nobody computes, a KL
            without a model to reload as the reference, an adapter on `lm_head`, or `steps_per_generation` that is no
            multiple of the accumulation.
        MissingError: the installed trl is not the one this class was written against.
        UsageError: channels, or an objective of the core, on a model whose log-probs depend on padding.

    Example::

        trainer = ComposerGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=[reward], train_dataset=dataset,
            args=make_po_config("dr-grpo", output_dir="out"),
            loss=CompositeLoss([ActiveChannel("sdpo", 0.1, sdpo())], objective=None))
        trainer.train()
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *rest: Any,
        loss: CompositeLoss | None = None,
        native: bool = True,
        own_head: bool = False,
        on_generation: Callable[[Generation], None] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is not None:
            refuse_traps(vars(args))
            _refuse_unloadable_reference(model, args, peft_config=kwargs.get("peft_config"))
        _refuse_head_adapter(kwargs.get("peft_config"))
        self._on_generation = on_generation
        self._composition: TRLComposition | None = None
        self._forward: Forward | None = None
        self._own_head = own_head
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if loss is not None and (loss.active or not native):
            self._compose(loss, native=native)

    def _compose(self, loss: CompositeLoss, *, native: bool) -> None:
        generated, accumulated = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        if generated % accumulated:
            raise ValueError(
                f"steps_per_generation={generated} must be a multiple of gradient_accumulation_steps={accumulated}: "
                "the rows of an optimiser step are counted before its first forward"
            )
        _refuse_absolute_positions(self.model.config.model_type)
        if not native:
            if loss.objective is None:
                raise ValueError("native=False lets the core compute the objective, and this loss has none")
            self._refuse_ignored()
        self._composition = TRLComposition(
            loss,
            self.accelerator.unwrap_model(self.model),
            native=native,
            pad_id=self._tokenizer.pad_token_id,
            autocast=self.accelerator.autocast,
        )
        self._step_metrics: dict[str, float] = {}
        self.add_callback(AfterOptimizer(self._after_optimizer))

    def _refuse_ignored(self) -> None:
        ignored = ignored_fields(vars(self.args))
        if ignored:
            raise ValueError(f"{', '.join(ignored)}: only trl's own loss reads it, and the core computes the objective")
        if self.aux_loss_enabled:
            raise ValueError(
                f"the core's objectives have no load-balancing loss, and trl would add one with weight "
                f"{self.router_aux_loss_coef:g} for this mixture-of-experts model: set router_aux_loss_coef=0"
            )

    # -- where rollouts end ------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if self._composition is not None:
            self._prepare_rows(self._composition, inputs, batch)
        if self._on_generation is not None:
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

    def _calculate_rewards(self, inputs: Any, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, *args)
        self._scored = (*args[:2], rewards)
        return rewards

    def _prepare_rows(self, composition: TRLComposition, inputs: list[dict[str, Any]], batch: dict[str, Any]) -> None:
        """Add what our loss wants to TRL's batch, one entry per row."""
        absent = sorted(surface.BATCH_KEYS - set(batch))
        if absent:
            raise MissingError(f"trl's generations have no {', '.join(absent)}: another trl than expected")
        if "pixel_values" in batch:
            raise RunFailed("channels and objectives of the core read text only, and these prompts hold images")
        prompts, completions, per_reward = self._scored
        everyone = (per_reward * self.reward_weights.to(per_reward.device)).nansum(dim=1)
        everyone[per_reward.isnan().all(dim=1)] = math.nan
        if not composition.native:
            self._compare(composition, batch, rewards=everyone)
        first = self.accelerator.process_index * len(inputs)
        own = everyone[first : first + len(inputs)]
        places = [divmod(number, self.num_generations) for number in range(first, first + len(inputs))]
        batch[REWARD] = own
        batch[GROUP] = torch.tensor([group for group, _ in places], device=own.device)
        batch[UID] = [f"{self.state.global_step + 1}-{group}-{member}" for group, member in places]
        schemas = tool_schemas(self.tools or ())
        columns = (
            rollout_columns({**row, "prompt": prompt}, completion, schemas)
            for row, prompt, completion in zip(inputs, prompts, completions, strict=True)
        )
        batch[ROWS] = composition.rows(list(texts_of(batch, columns, tokenizer=self._tokenizer)))

    def _compare(self, composition: TRLComposition, batch: dict[str, Any], *, rewards: Tensor) -> None:
        """The objective's own advantages, in TRL's batch and in its log of completions."""
        batch["advantages"], everyone = objective_advantages(
            composition.loss.objective,
            batch,
            rewards=rewards,
            group_size=self.num_generations,
            policy_logps=lambda: self._logps_without_dropout(batch),
        )
        logged = self._logs["advantages"]
        for _ in range(len(everyone)):
            logged.pop()
        logged.extend(everyone.tolist())

    def _logps_without_dropout(self, batch: Mapping[str, Any]) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            logps = self._get_per_token_logps_and_entropies(
                self.model,
                *ids_and_mask(batch),
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )[0]
        self.model.train()
        return logps

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        window = self.args.gradient_accumulation_steps
        if self._composition is not None and self.model.training and self._step % window == 0:
            first = self._step % self.args.steps_per_generation
            base = Batch(
                step=self.state.global_step + 1, total_steps=self.state.max_steps, temperature=self.temperature
            )
            parts = self._buffered_inputs[first : first + window]
            self._composition.open_batches(parts, base=base, longest=self.max_completion_length)
        return inputs

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        composition = self._composition
        if composition is None or not self.model.training:
            stock: Tensor = super()._compute_loss(model, inputs)
            return stock
        with listen(self.accelerator.unwrap_model(model)) as self._forward:
            if composition.native:
                policy = super()._compute_loss(model, inputs)
            else:
                policy = None
                ids, mask = ids_and_mask(inputs)
                self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        index = self._step % self.args.gradient_accumulation_steps
        try:
            return composition.batch_loss(inputs, self._forward, index=index, stock=policy)
        except NonFinite as error:
            self._found(error.problem)
            return composition.not_a_number(self._forward)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._composition is None or self._forward is None or not torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        scored = self._scored_by_core(*args, **kwargs) or super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._forward.logps = scored[0]
        return scored

    def _scored_by_core(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, **more: Any
    ) -> tuple[Tensor, Tensor, None] | None:
        """None where TRL's head is wanted, or faster, or gives something that the core's does not."""
        parts = take_apart(self.accelerator.unwrap_model(model))
        wanted = self._own_head and not self._entropy_bonus_enabled and policy_head.is_enough(more)
        if parts is None or not wanted or not policy_head.is_faster(ids):
            return None
        assert self._forward is not None
        logps, entropies = policy_head.score(
            model,
            ids,
            mask,
            width,
            forward=self._forward,
            head=parts.head,
            temperature=self.temperature,
            autocast=self.accelerator.autocast,
        )
        return logps, entropies, None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer`.

        Raises:
            NonFinite: the loss of this step, on every process; nothing of the step was applied.
        """
        loss = super().training_step(*args, **kwargs)
        self._forward = None  # its hidden states would outlive the step, through the next generation
        composition, last = self._composition, self._step % self.args.gradient_accumulation_steps == 0
        if composition is not None:
            composition.add_up()
            if last:
                self._step_metrics = composition.close()
                for name, value in self._step_metrics.items():
                    self._metrics["train"][f"{OWN}{name}"].append(value)
        return loss

    def _after_optimizer(self) -> None:
        if self._composition is not None:
            self._composition.stepped(self.state.global_step + 1, self._step_metrics)

    # -- state -------------------------------------------------------------------------------------------------------

    def composition_state(self) -> dict[str, Any]:
        """State of channels, objective and teacher between two steps."""
        return {} if self._composition is None else self._composition.state_dict()

    def load_composition(self, state: Mapping[str, Any]) -> None:
        """Restore what `composition_state` gave; before `train`, as `go_to`.

        Raises:
            RunFailed: it belongs to other channels or another teacher.
        """
        if self._composition is not None:
            self._composition.load_state_dict(state)


class AfterOptimizer(TrainerCallback):  # type: ignore[misc]
    """Calls back between the optimiser's step and everything that looks at its result."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """See `transformers.TrainerCallback`."""
        self._then()


def _refuse_unloadable_reference(model: Any, args: GRPOConfig, *, peft_config: Any) -> None:
    """With a KL and no adapter TRL loads the reference again by the model's name; a nameless model fails obscurely."""
    if args.beta == 0 or isinstance(model, str) or peft_config is not None or hasattr(model, "peft_config"):
        return
    if not getattr(model.config, "_name_or_path", ""):
        raise ValueError(
            f"beta={args.beta} needs a reference model, which trl loads again from the model's own path; this model "
            "was made in memory. Save it first and pass the folder, or set beta=0"
        )


_COUNTS_COLUMNS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "biogpt", "xglm"})
"""Model types that number positions from the first column, padding included, where no position ids are given."""


def _refuse_absolute_positions(model_type: str) -> None:
    """Of a row padded on the left TRL gives no position ids: what a loss reads would depend on the other rows."""
    if model_type in _COUNTS_COLUMNS:
        raise UsageError(
            f"trl pads prompts on the left, and {model_type} counts its positions from the first column: the same "
            "rollout would have other log-probs in another batch, and a teacher would disagree with itself",
            at="model",
            fix="a model with rotary positions, such as Qwen3 or Llama",
        )


def _refuse_head_adapter(peft_config: Any) -> None:
    targets = getattr(peft_config, "target_modules", None)
    if targets and not isinstance(targets, str) and any(name.rpartition(".")[2] == "lm_head" for name in targets):
        raise ValueError("an adapter on lm_head cannot be used: trl's fused log-prob head reads its plain weight")
