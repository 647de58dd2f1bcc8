"""`backend.options`: keys of verl's configuration that a user may set, and why the others may not be.

A key of verl's that another part of the spec decides stands in `OWNED`, one that the adapter cannot live with in
`REFUSED`; both hold for all keys below it, and of several the longest counts. `FREE` are exceptions. A new key of
verl's is free until it is put into one of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import Problem
from composer_verl.upstream import UNSET, leaves

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

_OBJECTIVE = "loss.objective"
_BATCH = "train.micro_batch"
_RATE = "train.schedule"
_NO_CRITIC = "nothing: no objective has a critic"
_OWN_LOOP = "nothing: the backend has its own loop"

OWNED: Mapping[str, str] = {
    "model_engine": "nothing: the backend trains with FSDP2",
    "data": "data",
    "data.train_batch_size": "train.prompts_per_step",
    "data.gen_batch_size": "train.prompts_per_step",
    "data.max_prompt_length": "data.max_tokens",
    "data.max_response_length": "train.max_completion_tokens",
    "data.seed": "seed",
    "data.trust_remote_code": "model.trust_remote_code",
    "trainer": _OWN_LOOP,
    "trainer.n_gpus_per_node": "backend.processes",
    "trainer.nnodes": "backend.nodes",
    "trainer.total_training_steps": "train.steps",
    "trainer.total_epochs": "train.steps",
    "trainer.project_name": "name",
    "trainer.experiment_name": "name",
    "trainer.logger": "sinks",
    "trainer.rollout_data_dir": "train.sample_rollouts",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.default_local_dir": "nothing: the run directory",
    "trainer.resume_mode": "nothing: a run starts from its own checkpoints",
    "trainer.test_freq": "data.eval.every",
    "trainer.val_before_train": "data.eval",
    "trainer.device": "nothing: it follows from the machine",
    "algorithm": "loss.objective, or backend.advantages",
    "algorithm.adv_estimator": "backend.advantages",
    "algorithm.use_kl_in_reward": "loss.objective.kl_coef",
    "algorithm.kl_penalty": "loss.objective.kl_estimator",
    "algorithm.kl_ctrl": "loss.objective.kl_coef",
    "algorithm.rollout_correction": "loss.objective.rollout_correction",
    "critic": _NO_CRITIC,
    "reward": "data.rewards",
    "reward_model": "data.rewards",
    "custom_reward_function": "data.rewards",
    "sandbox_fusion": "data.rewards",
    "distillation": "loss.channels",
    "transfer_queue.enable": "nothing: verl's trainer needs it",
    "ray_kwargs.ray_init.address": "backend.ray",
    "actor_rollout_ref.composer": "nothing: the plan itself stands there",
    f"{ACTOR}.strategy": "nothing: the backend trains with FSDP2",
    f"{ACTOR}.rollout_n": "train.group_size",
    f"{ACTOR}.ppo_mini_batch_size": "train.prompts_per_step",
    f"{ACTOR}.ppo_micro_batch_size": _BATCH,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": _BATCH,
    f"{ACTOR}.ppo_epochs": "train.iterations",
    f"{ACTOR}.shuffle": "nothing: an optimiser step is the whole batch",
    f"{ACTOR}.data_loader_seed": "seed",
    f"{ACTOR}.policy_loss": _OBJECTIVE,
    f"{ACTOR}.loss_agg_mode": _OBJECTIVE,
    f"{ACTOR}.loss_scale_factor": "train.max_completion_tokens",
    f"{ACTOR}.clip_ratio": "loss.objective.epsilon",
    f"{ACTOR}.clip_ratio_low": "loss.objective.epsilon",
    f"{ACTOR}.clip_ratio_high": "loss.objective.epsilon_high",
    f"{ACTOR}.clip_ratio_c": "loss.objective.dual_clip",
    f"{ACTOR}.tau_pos": "loss.objective.temperature_positive",
    f"{ACTOR}.tau_neg": "loss.objective.temperature_negative",
    f"{ACTOR}.use_kl_loss": "loss.objective.kl_coef",
    f"{ACTOR}.kl_loss_coef": "loss.objective.kl_coef",
    f"{ACTOR}.kl_loss_type": "loss.objective.kl_estimator",
    f"{ACTOR}.grad_clip": "train.max_grad_norm",
    f"{ACTOR}.optim.lr": "train.learning_rate",
    f"{ACTOR}.optim.lr_scheduler_type": _RATE,
    f"{ACTOR}.optim.warmup_style": _RATE,
    f"{ACTOR}.optim.lr_warmup_steps": "train.warmup_steps",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "train.warmup_steps",
    f"{ACTOR}.optim.total_training_steps": "train.steps",
    f"{ACTOR}.optim.weight_decay": "train.weight_decay",
    f"{ACTOR}.optim.clip_grad": "train.max_grad_norm",
    f"{ACTOR}.fsdp_config.strategy": "nothing: the backend trains with FSDP2",
    f"{ACTOR}.fsdp_config.model_dtype": "model.dtype",
    f"{ACTOR}.fsdp_config.mixed_precision": "model.dtype",
    f"{ACTOR}.fsdp_config.dtype": "model.dtype",
    f"{ACTOR}.fsdp_config.seed": "seed",
    f"{ACTOR}.fsdp_config.forward_only": "nothing: the policy is trained",
    f"{ACTOR}.checkpoint": "checkpoint",
    f"{ACTOR}.use_remove_padding": f"backend.options.{MODEL}.use_remove_padding",
    REF: "loss.objective.kl_coef",
    f"{MODEL}.path": "model.path",
    f"{MODEL}.hf_config_path": "model.path",
    f"{MODEL}.tokenizer_path": "model.path",
    f"{MODEL}.custom_chat_template": "model.path",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{MODEL}.external_lib": "plugins",
    f"{MODEL}.enable_gradient_checkpointing": "train.gradient_checkpointing",
    f"{MODEL}.lora_rank": "model.lora.rank",
    f"{MODEL}.lora_alpha": "model.lora.alpha",
    f"{MODEL}.target_modules": "model.lora.targets",
    f"{MODEL}.exclude_modules": "model.lora.targets",
    f"{MODEL}.lora_adapter_path": "model.path",
    f"{ROLLOUT}.name": "backend.rollout",
    f"{ROLLOUT}.mode": "nothing: verl has one",
    f"{ROLLOUT}.n": "train.group_size",
    f"{ROLLOUT}.temperature": "train.temperature",
    f"{ROLLOUT}.top_p": "train.top_p",
    f"{ROLLOUT}.top_k": "train.top_k",
    f"{ROLLOUT}.do_sample": "train.temperature",
    f"{ROLLOUT}.seed": "seed",
    f"{ROLLOUT}.prompt_length": "data.max_tokens",
    f"{ROLLOUT}.response_length": "train.max_completion_tokens",
    f"{ROLLOUT}.ignore_eos": "nothing: a completion ends with its end token",
    f"{ROLLOUT}.log_prob_micro_batch_size": _BATCH,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": _BATCH,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": f"backend.options.{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.calculate_log_probs": "nothing: objectives and checks read the sampler's log-probs",
    f"{ROLLOUT}.logprobs_mode": "nothing: the log-probs must be those of what was sampled",
    f"{ROLLOUT}.val_kwargs": "data.eval",
    f"{ROLLOUT}.multi_turn": "rollout",
    f"{ROLLOUT}.agent": "rollout",
    f"{ROLLOUT}.nnodes": "backend.nodes",
    f"{ROLLOUT}.n_gpus_per_node": "backend.processes",
    f"{ROLLOUT}.checkpoint_engine": "nothing: the sampler has the trainer's weights after every step",
    f"{ROLLOUT}.trace": "train.sample_rollouts",
}
"""verl's key -> the key of the spec that decides it."""

_ONE_SHARE = "each rank has whole sequences: channels find their tokens by place in them"
_READS_LOGITS = "channels read the logits, and with it there are none where they look"
_NO_PROFILER = "the backend's own loop starts no profiler, so it would do nothing"

REFUSED: Mapping[str, str] = {
    "actor_rollout_ref.hybrid_engine": "policy and sampler share their ranks in this backend",
    f"{ACTOR}.ulysses_sequence_parallel_size": _ONE_SHARE,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": _ONE_SHARE,
    f"{ACTOR}.pad_to_length": _ONE_SHARE,
    f"{ACTOR}.fsdp_config.pad_to_length": _ONE_SHARE,
    f"{ACTOR}.fsdp_config.turbo_config": "the backend trains with plain FSDP2",
    f"{ACTOR}.use_prefix_grouper": _ONE_SHARE,
    f"{ACTOR}.use_fused_kernels": _READS_LOGITS,
    f"{MODEL}.use_fused_kernels": _READS_LOGITS,
    f"{MODEL}.fused_kernel_options": _READS_LOGITS,
    f"{MODEL}.mtp": "a loss of its own over further tokens would come on top of the spec's",
    f"{ACTOR}.qat": "teachers and sampler would read weights that the loss does not",
    f"{ACTOR}.fsdp_config.qat": "teachers and sampler would read weights that the loss does not",
    f"{ROLLOUT}.qat": "the sampler must have the trainer's weights",
    f"{ROLLOUT}.mtp": "a loss of its own over further tokens would come on top of the spec's",
    f"{ROLLOUT}.enable_rollout_routing_replay": "this verl replays routes on Megatron only",
    f"{ROLLOUT}.disaggregation": "policy and sampler share their ranks in this backend",
    f"{MODEL}.lora": "these are Megatron's adapters; FSDP's are model.lora",
    f"{ACTOR}.profiler": _NO_PROFILER,
    f"{ROLLOUT}.profiler": _NO_PROFILER,
    "global_profiler": _NO_PROFILER,
    "skip": "rollouts of an earlier run would stand in for those that the spec asks for",
}
"""verl's key -> why it must stay as it is."""

FREE = frozenset(
    {
        "trainer.balance_batch",
        "trainer.ray_wait_register_center_timeout",
        f"{ROLLOUT}.agent.num_workers",
        f"{MODEL}.lora.merge",
    }
)
"""Keys that may be set although one above them may not."""

ESTIMATOR = frozenset({"algorithm.gamma", "algorithm.norm_adv_by_std_in_grpo"})
"""What verl's own advantages read beside the rewards."""

OPEN = ("ray_kwargs.ray_init",)
"""Sections that take more keys than verl's defaults have: arguments of `ray.init`."""

FLOATS = frozenset({f"{ACTOR}.entropy_coeff", f"{ROLLOUT}.over_sample_rate"})
"""Numbers whose default is written without a point."""


def flattened(options: Mapping[str, Any], default: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each option by its full dotted key; a mapping where verl has no section is a value."""
    for name, value in options.items():
        known = _at(default, str(name))
        if isinstance(value, Mapping) and value and known is not None:
            yield from flattened(value, known, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def option_problems(options: Mapping[str, Any], config: Mapping[str, Any], *, own: bool) -> Iterator[Problem]:
    """What is wrong with options.

    Args:
        options: by dotted keys, see `flattened`.
        config: verl's defaults, see `upstream.composed`.
        own: the core computes the advantages, and nothing reads what verl's would.
    """
    if not options:
        return
    defaults = dict(leaves(config))
    for key, value in options.items():
        problem, fix = _wrong(key, value, defaults, own=own)
        if problem:
            yield Problem(key=f"backend.options.{key}", problem=problem, fix=fix)


def _wrong(key: str, value: Any, defaults: Mapping[str, Any], *, own: bool) -> tuple[str, str]:
    """Problem and fix; two empty texts where there is none."""
    if key.startswith(("+", "~")):
        return "a + or ~ belongs to hydra's command line; options change what verl has", "the key alone"
    if key not in FREE and (own or key not in ESTIMATOR):
        if (owned := _above(key, OWNED)) is not None:
            return "another part of the spec decides this", f"set {OWNED[owned]}"
        if (refused := _above(key, REFUSED)) is not None:
            return REFUSED[refused], "leave it out"
    if key in defaults:
        wanted = _wanted(key, defaults[key])
        if wanted is None or _fits(value, wanted):
            return "", ""
        return f"verl wants {wanted.__name__} here, got {value!r}", ""
    if _is_open(key, defaults):
        return "", ""
    if any(name.startswith(f"{key}.") for name in defaults):
        return "this is a section of verl's configuration, not a value", "one of its keys"
    return "verl has no such key", _near(key, defaults)


def _at(default: Any, key: str) -> Any:
    for part in key.split("."):
        default = default.get(part) if isinstance(default, Mapping) else None
    return default


def _above(key: str, table: Mapping[str, str]) -> str | None:
    """The longest entry that is this key or stands above it."""
    parts = key.split(".")
    return next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in table), None)


def _is_open(key: str, defaults: Mapping[str, Any]) -> bool:
    """Whether the key lies in a section that takes any: one that verl leaves empty or null, or one of `OPEN`."""
    parts = key.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(name in OPEN or (name in defaults and defaults[name] in ({}, None)) for name in above)


def _near(key: str, defaults: Mapping[str, Any]) -> str:
    endings = [name for name in defaults if name.endswith(f".{key}") and not name.startswith("critic.")]
    near = endings or difflib.get_close_matches(key, defaults, 1, 0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def _wanted(key: str, default: Any) -> type | None:
    if default is None or default == UNSET or (isinstance(default, str) and "${" in default):
        return None  # anything: of what follows another key verl's own classes know the type
    return float if key in FLOATS else type(default)


def _fits(value: Any, wanted: type) -> bool:
    if isinstance(value, bool):  # bool is an int to Python, but not to a user
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)
