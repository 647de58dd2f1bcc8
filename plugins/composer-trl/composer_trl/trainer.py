"""GRPOTrainer with an ear: it refuses combinations that mislead, and hands each generation to a listener.

Channel 1 is the stock loss, untouched: with the same GRPOConfig the losses and the weights are bit-equal to
`trl.GRPOTrainer`. The private surface used here is named and checked in `surface.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from composer_core.errors import MissingError
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
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        missing = surface.LOG_KEYS - set(self._logs)
        if missing:
            raise MissingError(f"GRPOTrainer._logs has no {', '.join(sorted(missing))}: another trl than expected")

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
