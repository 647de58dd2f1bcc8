"""From a run spec to verl's configuration. Light: verl, ray and torch are never imported here.

verl's global step is one generation with `ppo_epochs` passes over it, each in mini-batches; here a mini-batch is the
whole batch, so

    prompts of a generation = prompts_per_step        optimiser steps of a generation = iterations
    global steps            = steps / iterations      ppo_micro_batch_size_per_gpu    = micro_batch

and the result does not depend on `micro_batch` (except `bnpo`, whose mean is local by definition).

`shares.py` has this arithmetic, `objectives.py` the fields of the policy loss, `options.py` what a user may set
besides, `refusals.py` what verl cannot do. What depends on the machine is in `machine_fields`: the plan shows a guess,
and the backend puts in what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import SpecError
from composer_core.plugins.contributions import Derived
from composer_core.protocols import Aggregation
from composer_core.spec.environment import required_env
from composer_core.spec.model import RunSpec
from composer_core.spec.rollout_problems import rollout_problems
from composer_verl.objectives import aggregation_of, loss_fields
from composer_verl.options import ACTOR, MODEL, REF, ROLLOUT, flattened, option_problems
from composer_verl.refusals import (
    advantage_problems,
    batch_problems,
    cluster_problems,
    dynamic_problems,
    topk_problems,
    train_problems,
)
from composer_verl.settings import AHEAD, VerlSettings
from composer_verl.shares import (
    generations,
    micro_batch,
    needs_reference,
    objective_of,
    ranks,
    settings_of,
    share,
)
from composer_verl.upstream import composed, resolved, with_fields

ROLLOUTS = {"hf": "composer_hf", "vllm": "vllm", "sglang": "sglang"}
"""`backend.rollout` -> verl's name."""
AGENT_LOOP = "composer"
EXTERNAL = "composer_verl.external"
"""What verl imports in each of its processes, where our rollout and agent loop are registered."""
OWN_ADVANTAGES = "composer"
"""No estimator of verl's: the trainer computes them, and verl would refuse the name."""
PROMPT_TOKENS = 1024
"""`max_prompt_length` where `data.max_tokens` is silent; the backend raises it to the longest prompt."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
FOLLOWS = {
    f"{ACTOR}.use_remove_padding": f"{MODEL}.use_remove_padding",
    f"{REF}.use_torch_compile": f"{ACTOR}.use_torch_compile",
}
"""Keys that verl gives the value of another one unless they are set."""
HF_SEQUENCES = 64
BASE_CPUS = 8
"""Logical CPUs of a local Ray beside those of the ranks: TransferQueue's, the sampler's and Ray's own actors."""
RANK_CPUS = 4
"""Of one rank: verl asks 3 for its place, and its sampler takes one."""


def derive(spec: RunSpec) -> Derived:
    """The configuration of verl for a spec.

    Raises:
        SpecError: a batch that the ranks or verl's steps cannot share, a schedule or adapter that verl does not have,
            or an option that is unknown, owned, mistyped or at odds with the adapter.
        MissingError: verl is not installed.
    """
    config = composed()
    options = options_of(spec, config)
    own = settings_of(spec).advantages == "core"
    problems = [
        *batch_problems(spec),
        *train_problems(spec),
        *advantage_problems(spec),
        *cluster_problems(spec),
        *topk_problems(spec),
        *rollout_problems(spec, backend="verl"),
        *option_problems(options, config, own=own),
        *dynamic_problems(spec, options),
    ]
    if problems:
        raise SpecError(problems)
    # a GPU is certain where the sampler needs one
    gpu = settings_of(spec).rollout != "hf"
    fields = {**spec_fields(spec), **machine_fields(spec, cuda=gpu, flash_attention=gpu)}
    return Derived(numbers=_numbers(spec), upstream=_upstream(config, fields, options), notes=tuple(_notes(spec)))


def options_of(spec: RunSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """`backend.options` by dotted keys of `config`."""
    return dict(flattened(settings_of(spec).options, config))


def _upstream(config: Mapping[str, Any], fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    # `${env:NAME}` is the spec's way to name a secret, and would be an interpolation to OmegaConf
    held = {key: value for key, value in options.items() if required_env(value)}
    plain = {key: value for key, value in options.items() if key not in held}
    return with_fields(resolved(with_fields(config, {**fields, **plain})), held)


# -- fields, by dotted keys of verl's ---------------------------------------------------------------------------------


def spec_fields(spec: RunSpec) -> dict[str, Any]:
    """What the spec decides; paths, files and the plan are put in by the backend."""
    loss = loss_fields(objective_of(spec), max_completion_tokens=spec.train.max_completion_tokens)
    return {
        **_data_fields(spec),
        **_trainer_fields(spec),
        **_algorithm_fields(spec),
        **_model_fields(spec),
        **{f"{ACTOR}.{name}": value for name, value in _actor_fields(spec).items()},
        **{f"{ACTOR}.{name}": value for name, value in loss.items()},
        **_reference_fields(spec),
        **{f"{ROLLOUT}.{name}": value for name, value in _rollout_fields(spec).items()},
        "actor_rollout_ref.composer": {"plan": None, "run": None},
        "critic.enable": False,
        "reward.num_workers": 0,  # the backend scores rewards itself
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def _data_fields(spec: RunSpec) -> Mapping[str, Any]:
    return {
        "data.train_files": None,
        "data.val_files": None,
        "data.train_batch_size": spec.train.prompts_per_step,
        "data.max_response_length": spec.train.max_completion_tokens,
        **prompt_fields(spec.data.max_tokens or PROMPT_TOKENS),
        "data.seed": spec.seed,
        "data.dataloader_num_workers": 0,
        "data.trust_remote_code": spec.model.trust_remote_code,
    }


def prompt_fields(tokens: int) -> dict[str, Any]:
    """Fields that say how long a prompt may be."""
    return {"data.max_prompt_length": tokens, f"{ROLLOUT}.prompt_length": tokens}


def _trainer_fields(spec: RunSpec) -> Mapping[str, Any]:
    return {
        "trainer.project_name": "composer",
        "trainer.experiment_name": spec.name,
        "trainer.n_gpus_per_node": settings_of(spec).processes,
        "trainer.nnodes": settings_of(spec).nodes,
        "trainer.total_training_steps": generations(spec),
        "trainer.total_epochs": generations(spec),  # enough, however few the prompts are
        "trainer.logger": [],
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": None,
    }


def _algorithm_fields(spec: RunSpec) -> Mapping[str, Any]:
    advantages = settings_of(spec).advantages
    return {
        "algorithm.rollout_correction": None,  # the objective's own, where it has one
        "algorithm.adv_estimator": OWN_ADVANTAGES if advantages == "core" else advantages,
        # verl's word for "compute the reference's log-probs"; at coefficient 0 it changes no reward, and unlike
        # actor.use_kl_loss it adds nothing to the loss
        "algorithm.use_kl_in_reward": needs_reference(spec),
        "algorithm.kl_ctrl.kl_coef": 0.0,
    }


def _model_fields(spec: RunSpec) -> Mapping[str, Any]:
    model, lora = spec.model, spec.model.lora
    fields: dict[str, Any] = {
        f"{MODEL}.path": model.path,
        f"{MODEL}.trust_remote_code": model.trust_remote_code,
        f"{MODEL}.external_lib": EXTERNAL,
        f"{MODEL}.enable_gradient_checkpointing": spec.train.gradient_checkpointing,
    }
    if lora is not None:
        fields[f"{MODEL}.lora_rank"] = lora.rank
        fields[f"{MODEL}.lora_alpha"] = lora.alpha or 2 * lora.rank
        fields[f"{MODEL}.target_modules"] = lora.targets
    return fields


def _engine_fields(spec: RunSpec) -> Mapping[str, Any]:
    """Of each FSDP engine, the policy's and the reference's."""
    return {
        "fsdp_config.strategy": "fsdp2",
        "fsdp_config.seed": spec.seed,
        "fsdp_config.model_dtype": "fp32",
        "fsdp_config.mixed_precision": {
            "param_dtype": DTYPES[spec.model.dtype],
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
    }


def _actor_fields(spec: RunSpec) -> Mapping[str, Any]:
    train = spec.train
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": train.prompts_per_step,
        "ppo_micro_batch_size_per_gpu": micro_batch(spec),
        "ppo_epochs": train.iterations,
        "shuffle": False,
        "data_loader_seed": spec.seed,
        "optim.lr": train.learning_rate,
        "optim.lr_scheduler_type": train.schedule,
        "optim.lr_warmup_steps": train.warmup_steps // train.iterations,
        "optim.total_training_steps": generations(spec),
        "optim.weight_decay": train.weight_decay,
        "optim.clip_grad": train.max_grad_norm,
        "grad_clip": train.max_grad_norm,
        **_engine_fields(spec),
    }


def _reference_fields(spec: RunSpec) -> Mapping[str, Any]:
    return {
        f"{REF}.log_prob_micro_batch_size_per_gpu": micro_batch(spec),
        **{f"{REF}.{name}": value for name, value in _engine_fields(spec).items()},
    }


def _rollout_fields(spec: RunSpec) -> Mapping[str, Any]:
    train, held_out = spec.train, spec.data.eval
    sampling = {"temperature": train.temperature, "top_p": train.top_p, "top_k": train.top_k or -1}
    return {
        "name": ROLLOUTS[settings_of(spec).rollout],
        "n": train.group_size,
        **sampling,
        **{f"val_kwargs.{name}": value for name, value in sampling.items()},
        "val_kwargs.do_sample": True,
        "val_kwargs.n": 1 if held_out is None else held_out.group_size,
        "seed": spec.seed,
        "dtype": spec.model.dtype,
        "tensor_model_parallel_size": 1,
        "log_prob_micro_batch_size_per_gpu": micro_batch(spec),
        "calculate_log_probs": True,
        # sequences that composer_hf works on together; each of the others has a default of its own kind
        **({"max_num_seqs": HF_SEQUENCES} if settings_of(spec).rollout == "hf" else {}),
        "agent.default_agent_loop": AGENT_LOOP,
    }


def machine_fields(spec: RunSpec, *, cuda: bool, flash_attention: bool) -> dict[str, Any]:
    """What depends on the machine that runs the worker, without what `backend.options` sets.

    Args:
        spec: the run.
        cuda: whether it has GPUs.
        flash_attention: whether the package flash_attn is there; sequences are packed by its kernels.
    """
    # its kernels have half precision only
    packed = cuda and flash_attention and spec.model.dtype == "bfloat16"
    workers = min(8, spec.train.prompts_per_step) if cuda else 1
    fields: dict[str, Any] = {
        "trainer.device": "cuda" if cuda else "cpu",
        f"{MODEL}.use_remove_padding": packed,
        f"{ACTOR}.use_remove_padding": packed,
        f"{MODEL}.override_config.attn_implementation": "flash_attention_2" if packed else "sdpa",
        f"{ACTOR}.use_torch_compile": cuda,
        f"{ACTOR}.fsdp_config.use_torch_compile": cuda,
        f"{REF}.use_torch_compile": cuda,
        f"{REF}.fsdp_config.use_torch_compile": cuda,
        f"{ROLLOUT}.agent.num_workers": workers,
        **_ray_fields(settings_of(spec), cuda=cuda, workers=workers),
    }
    given = settings_of(spec).options
    return {key: value for key, value in fields.items() if not _has(given, key) and not _has(given, FOLLOWS.get(key))}


def _ray_fields(settings: VerlSettings, *, cuda: bool, workers: int) -> Mapping[str, Any]:
    if settings.ray != "local":
        return {"ray_kwargs.ray_init.address": settings.ray}
    ranks = settings.processes
    fields = {
        "address": "local",
        "include_dashboard": False,
        # places in Ray's books, not cores: with fewer than verl asks for it would wait for ever
        "num_cpus": BASE_CPUS + RANK_CPUS * ranks + workers,
        # without GPUs a rank still asks Ray for one
        **({} if cuda else {"num_gpus": ranks}),
    }
    return {f"ray_kwargs.ray_init.{name}": value for name, value in fields.items()}


def _has(options: Mapping[str, Any], key: str | None) -> bool:
    """Whether options, dotted or nested in any mixture, set this key."""
    if key is None:
        return False
    for name, value in options.items():
        if name == key:
            return True
        if isinstance(value, Mapping) and key.startswith(f"{name}.") and _has(value, key[len(str(name)) + 1 :]):
            return True
    return False


# -- what the plan tells ----------------------------------------------------------------------------------------------


def _numbers(spec: RunSpec) -> dict[str, int | float | str]:
    train = spec.train
    return {
        "sequences per step": train.sequences_per_step,
        "ranks": ranks(spec),
        "micro-batch (sequences)": micro_batch(spec),
        "accumulated micro-batches": share(spec) // micro_batch(spec),
        "optimiser steps per generation": train.iterations,
        "generations (verl's global steps)": generations(spec),
        "prompts seen in the run": train.prompts_per_step * generations(spec),
        "longest completion (tokens)": train.max_completion_tokens,
    }


def _notes(spec: RunSpec) -> Iterator[str]:
    settings, train, objective = settings_of(spec), spec.train, objective_of(spec)
    seen = "without GPUs" if settings.rollout == "hf" else "with GPUs and flash-attn"
    yield (
        f"upstream configuration: device, attention, packing, compilation and Ray's resources are shown as on a "
        f"machine {seen}; the worker sets them by its own machine. Paths and the longest prompt are filled in there too"
    )
    if train.iterations == 1:
        yield (
            "iterations: 1 keeps every step on policy: the importance ratio is 1, clipping never engages, and "
            "objectives differ only in how they weight and average tokens"
        )
    elif train.schedule != "constant" or train.warmup_steps:
        yield f"verl moves the learning rate once per generation, so {train.iterations} steps in a row share it"
    if aggregation_of(objective) is Aggregation.TOKEN_MEAN_LOCAL:
        yield f"{objective.name} averages within each micro-batch, so its result depends on train.micro_batch"
    if spec.model.dtype == "bfloat16":
        yield "bfloat16: verl keeps float32 weights and computes in bfloat16, so no update is lost, at twice the memory"
    if settings.topk == AHEAD:
        yield (
            "topk: batch: the teacher reads the hints of a batch of rollouts before the optimiser steps on it, "
            f"{train.iterations} here, so a live or ema teacher stays as it is then, one batch old, for all of them"
        )
    if settings.advantages != "core":
        yield f"advantages are verl's {settings.advantages}, of the plain rewards; the objective's own are not computed"
