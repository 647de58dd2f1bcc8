"""verl's surface that we stand on, checked at start: what is private, and what moves between its releases.

verl 0.9 declares none of it stable. `engine.py` overrides the parts of an optimiser step, `trainer.py` those of a
generation; `_ROLLOUT_REGISTRY` and `EngineRegistry._engines` are tables without a function for what we do with them.
A method that verl renamed would still be defined here and never called, so its name is looked for as well as its
arguments. Only the classes are read: no engine is made and no Ray is started.

`plugin_problems` is about the other silence: verl tells nobody when it could not load our platform.
To stand on one thing more, add a line to the table of its kind.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

SUPPORTED = "0.9"

_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_TRAINER = "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync"
_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
_LOOP = "verl.experimental.agent_loop.agent_loop"
_REPLICA = "verl.workers.rollout.replica"

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    # engine.py, checkpoint.py
    f"{_ENGINE}.__init__": ("self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    f"{_ENGINE}._build_fsdp_module": ("self", "module"),
    f"{_ENGINE}.train_batch": ("self", "data", "loss_function"),
    f"{_ENGINE}.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    f"{_ENGINE}.forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    f"{_ENGINE}.prepare_model_outputs": ("self", "output", "output_args", "micro_batch", "logits_processor_func"),
    f"{_ENGINE}.optimizer_zero_grad": ("self",),
    f"{_ENGINE}.optimizer_step": ("self",),
    f"{_ENGINE}.lr_scheduler_step": ("self",),
    f"{_ENGINE}.get_per_tensor_param": ("self", "layered_summon", "base_sync_done", "kwargs"),
    f"{_ENGINE}.get_data_parallel_group": ("self",),
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
    "verl.workers.engine.utils:prepare_micro_batches": (
        "data", "dp_group", "num_batches_divided_by", "same_micro_num_in_dp", "min_num_micro_batch",
        "use_dynamic_bsz_balance",
    ),
    "verl.utils.seqlen_balancing:restore_dynamic_batch": ("data", "batch_idx_list"),
    "verl.workers.utils.losses:ppo_loss": ("config", "model_output", "data", "dp_group"),
    "verl.trainer.ppo.core_algos:register_policy_loss": ("name",),
    # worker.py
    f"{_WORKER}.__init__": ("self", "config", "role", "distillation_config", "kwargs"),
    f"{_WORKER}.init_model": ("self",),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.single_controller.base.decorator:register": (
        "dispatch_mode", "execute_mode", "blocking", "materialize_futures",
    ),
    "verl.single_controller.base.decorator:make_nd_compute_dataproto_dispatch_fn": ("mesh_name",),
    # trainer.py
    f"{_TRAINER}.__init__": ("self", "config"),
    f"{_TRAINER}.init": ("self",),
    f"{_TRAINER}._init_dataloader": ("self",),
    f"{_TRAINER}._init_resource_pool_mgr": ("self",),
    f"{_TRAINER}._build_replay_buffer": ("self",),
    f"{_TRAINER}._load_checkpoint": ("self",),
    f"{_TRAINER}.step": ("self", "metrics", "timing_raw"),
    f"{_TRAINER}.prepare_step": ("self",),
    f"{_TRAINER}._submit_batch_to_rollout": ("self", "batch"),
    f"{_TRAINER}._add_prompts_to_generate": ("self", "num_prompts"),
    f"{_TRAINER}._compute_reward_colocate": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_advantage": ("self", "batch", "metrics"),
    f"{_TRAINER}._compute_metrics": ("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
    f"{_TRAINER}.on_step_end": ("self",),
    f"{_TRAINER}.get_llm_client": ("self",),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample": ("self", "global_steps", "partition_id", "batch_size"),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll": ("self", "partition_id", "last_debug_time"),
    "verl.workers.rollout.llm_server:LLMServerManager.get_replicas": ("self",),
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences": ("self", "prompts"),
    f"{_LOOP}:AgentLoopManager.__init__": (
        "self", "config", "llm_client", "teacher_client", "reward_loop_worker_handles",
    ),
    "verl.utils.tensordict_utils:get_tensordict": ("tensor_dict", "non_tensor_dict"),
    "verl.utils.tensordict_utils:assign_non_tensor_data": ("tensor_dict", "key", "val"),
    "verl.utils.tensordict_utils:assign_non_tensor": ("tensor_dict", "kwargs"),
    "transfer_queue:init": ("conf",),
    "transfer_queue:close": (),
    "transfer_queue:kv_batch_get": ("keys", "partition_id", "select_fields"),
    "transfer_queue:kv_batch_put": ("keys", "partition_id", "fields", "tags", "data_parser"),
    "transfer_queue:kv_clear": ("keys", "partition_id"),
    "transfer_queue:KVBatchMeta.reorder": ("self", "indexes"),
    # agent_loop.py
    f"{_LOOP}:register": ("agent_name",),
    f"{_LOOP}:AgentLoopBase.run": ("self", "sampling_params", "kwargs"),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": (
        "self", "request_id", "prompt_ids", "sampling_params", "image_data", "video_data", "audio_data",
        "mm_processor_kwargs", "kwargs",
    ),
    # rollout.py and server.py
    f"{_REPLICA}:RolloutReplica.__init__": (
        "self", "replica_rank", "config", "model_config", "gpus_per_node", "is_reward_model", "is_teacher_model",
        "name_suffix",
    ),
    f"{_REPLICA}:RolloutReplica.launch_servers": ("self",),
    f"{_REPLICA}:RolloutReplicaRegistry.register": ("name", "loader"),
    "verl.workers.rollout.base:BaseRollout.__init__": (
        "self", "config", "model_config", "device_mesh", "args", "kwargs",
    ),
    "verl.workers.rollout.base:BaseRollout.resume": ("self", "tags"),
    "verl.workers.rollout.base:BaseRollout.release": ("self",),
    "verl.workers.rollout.base:BaseRollout.update_weights": ("self", "weights", "wire_format", "kwargs"),
    "verl.utils.model:update_model_config": ("module_config", "override_config_kwargs"),
    "verl.utils.model:get_generation_config": ("model", "trust_remote_code"),
    # platform_cpu.py
    "verl.plugin.platform:PlatformRegistry.register": ("platform",),
}  # fmt: skip
"""Function or method -> its arguments."""

FIELDS: Mapping[str, frozenset[str]] = {
    f"{_LOOP}:AgentLoopOutput": frozenset({
        "prompt_ids", "response_ids", "response_mask", "response_logprobs", "num_turns", "metrics", "extra_fields",
    }),
    f"{_LOOP}:AgentLoopMetrics": frozenset({"generate_sequences", "tool_calls"}),
    f"{_REPLICA}:TokenOutput": frozenset({"token_ids", "log_probs", "stop_reason", "extra_fields"}),
    "transfer_queue:KVBatchMeta": frozenset({"keys", "tags", "partition_id", "fields"}),
    "verl.workers.config:FSDPEngineConfig": frozenset({
        "forward_only", "use_dynamic_bsz", "infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu",
    }),
}  # fmt: skip
"""Record -> fields of it that we fill or read."""

USED: Mapping[str, frozenset[str]] = {
    # who calls what we override
    f"{_ENGINE}._build_model_optimizer": frozenset({"_build_fsdp_module"}),
    f"{_ENGINE}.train_batch": frozenset({"optimizer_zero_grad", "forward_backward_batch", "optimizer_step"}),
    f"{_ENGINE}.forward_backward_batch": frozenset({"forward_step"}),
    f"{_ENGINE}.forward_step": frozenset({"prepare_model_outputs"}),
    "verl.workers.engine_workers:TrainingWorker.train_batch": frozenset({
        "train_batch", "loss_fn", "lr_scheduler_step",
    }),
    f"{_TRAINER}.step": frozenset({"prepare_step", "_step_once"}),
    f"{_TRAINER}._step_once": frozenset({"_compute_reward_colocate", "_compute_advantage", "_update_actor"}),
    f"{_TRAINER}._setup": frozenset({"_init_resource_pool_mgr", "_init_dataloader", "_load_checkpoint"}),
    # attributes that we read or set
    _ENGINE: frozenset({
        "module", "optimizer", "lr_scheduler", "model_config", "engine_config", "_autocast_dtype",
    }),
    _TRAINER: frozenset({
        "config", "tokenizer", "use_reference_policy", "total_training_steps", "role_worker_mapping",
        "actor_rollout_wg", "replay_buffer", "reward_loop_manager", "reward_loop_worker_handles",
        "agent_loop_manager", "llm_server_manager",
    }),
    _WORKER: frozenset({"actor", "engine", "loss_fn", "set_loss_fn"}),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": frozenset({"poll_interval", "_wait_for_next_poll"}),
    f"{_LOOP}:AgentLoopManager": frozenset({"agent_loop_workers"}),
    f"{_LOOP}:AgentLoopBase": frozenset({
        "config", "tokenizer", "server_manager", "rollout_config", "apply_chat_template_kwargs",
    }),
    f"{_REPLICA}:RolloutReplica": frozenset({
        "servers", "_server_handle", "_server_address", "workers", "world_size", "rollout_mode", "replica_rank",
        "name_suffix", "max_concurrency", "config", "model_config",
    }),
}  # fmt: skip
"""Function, or class with those it inherits from -> names that its code must use."""

NAMES = (
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.workers.engine.base:EngineRegistry._engines",
    "verl.models.transformers.monkey_patch:is_trl_available",
    "verl.single_controller.base.decorator:Dispatch.ONE_TO_ALL",
    f"{_REPLICA}:RolloutMode.HYBRID",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.create",
    "verl.plugin.platform:PlatformBase",
    "verl.plugin.platform:PlatformRegistry.get",
    "verl.plugin.platform:get_platform",
    "verl.utils.device:get_device_id",
    "verl.utils.device:get_device_name",
    "verl.utils.debug:marked_timer",
)
"""What only has to be there."""

RAY = (
    "ray._private.ray_constants:ENABLE_RAY_CLUSTERS_ENV_VAR",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
)
"""The same of Ray's: set under other names they would do nothing, and a run's own cluster would be open to others."""

SUBCLASSES = (
    "composer_verl.rollout:ServerAdapter",
    "composer_verl.rollout:HFReplica",
    "composer_verl.agent_loop:ComposerAgentLoop",
)
"""Ours that verl makes: an abstract method that verl added would stop it in the middle of a start."""

GROUP, PLATFORM, ENTRY_POINT = "verl.plugins", "cpu", "composer_cpu"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def problems() -> list[str]:
    """One sentence per difference between the installed verl and the one this package was written against, and per
    reason for which verl has no platform for this machine.
    """
    installed = version("verl")
    found = []
    if not installed.startswith(f"{SUPPORTED}."):
        found.append(f"verl {installed} is installed; composer-verl is written against verl {SUPPORTED}")
    differences = (*_signatures(), *_fields(), *_uses(), *_missing(NAMES), *_subclasses())
    found += [f"verl {installed}: {difference}" for difference in differences]
    found += [f"ray {version('ray')}: {absent}" for absent in _missing(RAY)]
    return [*found, *plugin_problems()]


# -- differences -------------------------------------------------------------------------------------------------------


def _signatures() -> Iterator[str]:
    for place, expected in SIGNATURES.items():
        function, absent = _at(place)
        if absent:
            yield absent
        elif (actual := tuple(inspect.signature(function).parameters)) != expected:
            yield f"{_short(place)} takes ({', '.join(actual)}), expected ({', '.join(expected)})"


def _fields() -> Iterator[str]:
    for place, expected in FIELDS.items():
        record, absent = _at(place)
        if absent:
            yield absent
            continue
        known = getattr(record, "model_fields", None) or getattr(record, "__dataclass_fields__", {})
        if missing := sorted(expected - set(known)):
            yield f"{_short(place)} has no field {', '.join(missing)}"


def _uses() -> Iterator[str]:
    for place, expected in USED.items():
        owner, absent = _at(place)
        if absent:
            yield absent
        elif missing := sorted(expected - _used_by(owner)):
            yield f"{_short(place)} no longer uses {', '.join(missing)}"


def _used_by(owner: Any) -> set[str]:
    """Names in the code of a function, or of all methods and properties of a class; a property's own name is one."""
    if not inspect.isclass(owner):
        return set(inspect.unwrap(owner).__code__.co_names)
    members = [item for kind in owner.__mro__ for item in vars(kind).items()]
    methods = [inspect.unwrap(member) for _, member in members if inspect.isfunction(member)]
    used = {name for method in methods for name in method.__code__.co_names}
    return used | {name for name, member in members if isinstance(member, property)}


def _missing(places: Iterable[str]) -> Iterator[str]:
    return (absent for _, absent in map(_at, places) if absent)


def _subclasses() -> Iterator[str]:
    for place in SUBCLASSES:
        kind, _ = _at(place)
        if missing := sorted(kind.__abstractmethods__):
            yield f"it wants {', '.join(missing)} of {_short(place)}"


def _at(place: str) -> tuple[Any, str]:
    """The object at `module:name.name`, and a sentence where there is none."""
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return None, f"{module} cannot be imported: {error}"
    for name in path.split("."):
        if not hasattr(found, name):
            return None, f"{module} has no {path}"
        found = getattr(found, name)
    return found, ""


def _short(place: str) -> str:
    module, _, path = place.partition(":")
    return path if "." in path or path[:1].isupper() else f"{module.rpartition('.')[2]}.{path}"


# -- the platform ------------------------------------------------------------------------------------------------------


def plugin_problems() -> Iterator[str]:
    """Why verl has no platform for a machine without GPUs, where it needs one: what it keeps to itself."""
    import torch

    if torch.cuda.is_available():
        return
    ours = [entry for entry in entry_points(group=GROUP) if entry.name == ENTRY_POINT]
    if not ours:
        yield (
            f"this machine has no GPU, and verl finds no entry point {ENTRY_POINT} in the group {GROUP}: the metadata "
            "of composer-verl is incomplete; install it again"
        )
    elif (policy := _excluded()) is not None:
        yield (
            f"this machine has no GPU, and {POLICY}={policy} keeps verl from loading its platform for one; unset it, "
            f"or add {ENTRY_POINT}"
        )
    elif (kind := _registered()) is None:
        yield _unloaded(ours[0])
    elif missing := sorted(kind.__abstractmethods__):
        # verl would take the error for an answer, and go on as if there were a GPU
        yield f"this machine has no GPU, and verl's platform for one lacks {', '.join(missing)}, which this verl wants"


def _excluded() -> str | None:
    """The value of `POLICY` where it leaves us out."""
    policy = os.environ.get(POLICY, "auto").strip()
    named = [name.strip() for name in policy.lower().split(",")]
    return None if policy.lower() == "auto" or ENTRY_POINT in named else policy


def _registered() -> Any:
    registry, absent = _at("verl.plugin.platform:PlatformRegistry")
    return None if absent else registry.get(PLATFORM)


def _unloaded(entry: EntryPoint) -> str:
    told = f"this machine has no GPU, and verl could not load its platform for one, {entry.value}"
    try:
        entry.load()
    except Exception as error:  # whatever it is, verl swallowed it
        return f"{told}: {type(error).__name__}: {error}"
    return f"{told}, which can be loaded now: something else failed while verl was imported; start again"
