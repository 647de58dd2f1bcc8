"""TRL's private surface that we stand on, checked at start. The only file that names it; see trainer.py for the use.

trl 1.16 declares none of this stable: `_generate_and_score_completions` is where completions, rewards and advantages
come together, `_prepare_inputs` has the micro-batches of a step after their shuffle, `_compute_loss` is the stock loss
with the policy's forward in it (`_get_per_token_logps_and_entropies`), and `_logs` is the only place where what was
generated is kept. `_step`, `_buffered_inputs` and the sampler are what trl does not restore when it resumes: it would
begin a new generation in the middle of one, and the second time through the data in the order of the first.
`training_step` and `_get_grad_norm` are the last places before a step is applied.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

from composer_trl.config import OWNED

SUPPORTED = "1.16"

_SIGNATURES: dict[str, tuple[str, ...]] = {
    "__init__": (
        "self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
        "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools",
        "rollout_func", "environment_factory",
    ),
    "_generate_and_score_completions": ("self", "inputs"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ),
    "save_model": ("self", "output_dir", "_internal_call"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_get_train_sampler": ("self", "dataset"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
}  # fmt: skip

LOG_KEYS = frozenset({"prompt", "completion", "rewards", "advantages"})
"""Of `GRPOTrainer._logs`; an instance attribute, so `trainer.py` checks it after construction."""
BATCH_KEYS = frozenset({"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"})
"""Of what `_generate_and_score_completions` gives; checked at the first generation."""
ATTRIBUTES = frozenset({
    "_step", "_buffered_inputs", "_metrics", "_tokenizer", "reward_weights", "reward_func_names", "num_generations",
    "num_iterations", "max_completion_length", "temperature", "tools", "_entropy_bonus_enabled", "aux_loss_enabled",
    "router_aux_loss_coef",
})  # fmt: skip
"""Instance attributes, checked likewise."""

CHAT_TEMPLATES = frozenset({
    "add_response_schema", "get_training_chat_template", "is_chat_template_prefix_preserving", "supports_tool_calling",
})  # fmt: skip
"""Functions of `trl.chat_template_utils`; `tools.py` asks them what the trainer will find out about a model."""


def problems() -> list[str]:
    """One sentence per difference between the installed trl and the one this package was written against."""
    from trl import GRPOConfig, GRPOTrainer, chat_template_utils

    installed = version("trl")
    found = []
    if not installed.startswith(f"{SUPPORTED}."):
        found.append(f"trl {installed} is installed; composer-trl is written against trl {SUPPORTED}")
    for method, expected in _SIGNATURES.items():
        function = getattr(GRPOTrainer, method, None)
        actual = tuple(inspect.signature(function).parameters) if function else ()
        if actual != expected:
            found.append(f"trl {installed}: GRPOTrainer.{method} takes {actual}, expected {expected}")
    absent = sorted(set(OWNED) - set(GRPOConfig.__dataclass_fields__))
    if absent:
        found.append(f"trl {installed}: GRPOConfig has no field {', '.join(absent)}")
    unknown = sorted(name for name in CHAT_TEMPLATES if not hasattr(chat_template_utils, name))
    if unknown:
        found.append(f"trl {installed}: chat_template_utils has no {', '.join(unknown)}")
    return found
