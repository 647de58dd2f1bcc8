"""From a spec to verl's configuration, without verl. Its own losses are compared in test_verl_config_parity.py."""

import importlib.util
import json
import subprocess
import sys

import pytest

from composer_core.errors import MissingError, SpecError
from composer_core.plugins.builtin_settings import LmCeSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged
from composer_verl.config import derive, machine_fields, prompt_fields, spec_fields
from composer_verl.objectives import NATIVE, is_native, loss_fields, policy_loss_name
from composer_verl.upstream import composed, leaves, with_fields

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module", autouse=True)
def _composed_once():
    """Composing takes 0.4 s, and nothing changes what it gives."""
    once = composed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer_verl.config.composed", lambda: once)
        yield


@pytest.fixture
def flat(verl_spec):
    """`flat(**spec)`: verl's whole configuration by dotted keys."""
    return lambda **given: dict(leaves(derive(verl_spec(**given)).upstream))


@pytest.fixture
def refused(verl_spec):
    """`refused(**spec)`: what is wrong with it, one (key, problem, fix) each."""

    def _refused(**given):
        with pytest.raises(SpecError) as caught:
            derive(verl_spec(**given))
        return [(problem.key, problem.problem, problem.fix) for problem in caught.value.problems]

    return _refused


def given(config, *names):
    return [config[name] for name in names]


def test_a_generation_of_verls_is_the_steps_that_share_its_rollouts(flat, verl_spec):
    spec = {"prompts_per_step": 6, "group_size": 4, "micro_batch": 4, "iterations": 2}
    config = flat(**spec)
    assert given(
        config,
        "data.train_batch_size",
        f"{ROLLOUT}.n",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.ppo_epochs",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "trainer.total_training_steps",
        f"{ACTOR}.optim.total_training_steps",
    ) == [6, 4, 6, 2, 4, 4, 4, 5, 5]
    # 24 sequences in micro-batches of 4; 10 steps, 2 per generation: 5 generations of 6 prompts
    assert derive(verl_spec(**spec)).numbers == {
        "sequences per step": 24,
        "ranks": 1,
        "micro-batch (sequences)": 4,
        "accumulated micro-batches": 6,
        "optimiser steps per generation": 2,
        "generations (verl's global steps)": 5,
        "prompts seen in the run": 30,
        "longest completion (tokens)": 256,
    }


def test_ranks_of_all_nodes_share_a_step(verl_spec):
    spec = verl_spec(prompts_per_step=6, group_size=4, backend={"processes": 2, "nodes": 2, "ray": "auto"})
    numbers = derive(spec).numbers  # 24 sequences, 6 for each of 4 ranks: one micro-batch of 6
    assert [numbers[name] for name in ("ranks", "micro-batch (sequences)", "accumulated micro-batches")] == [4, 6, 1]


def test_what_the_optimiser_does_is_trains(flat):
    config = flat(learning_rate=2e-5, schedule="cosine", warmup_steps=4, iterations=2, weight_decay=0.1, seed=7)
    assert given(
        config,
        f"{ACTOR}.optim.lr",
        f"{ACTOR}.optim.lr_scheduler_type",
        f"{ACTOR}.optim.lr_warmup_steps",
        f"{ACTOR}.optim.weight_decay",
        f"{ACTOR}.optim.clip_grad",
        f"{ACTOR}.optim.betas",
        f"{ACTOR}.data_loader_seed",
        f"{ACTOR}.fsdp_config.seed",
        f"{ROLLOUT}.seed",
        "data.seed",
    ) == [2e-5, "cosine", 2, 0.1, 1.0, [0.9, 0.999], 7, 7, 7, 7]


def test_sampling_is_the_same_for_held_out_prompts(flat):
    config = flat(
        temperature=0.7, top_p=0.9, max_completion_tokens=40, data={"eval": {"builtin": "digits", "group_size": 3}}
    )
    for place in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        assert given(config, f"{place}.temperature", f"{place}.top_p", f"{place}.top_k") == [0.7, 0.9, -1]
    assert given(config, f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.response_length") == [3, 40]
    assert flat(top_k=5)[f"{ROLLOUT}.top_k"] == 5


@pytest.mark.parametrize(("dtype", "computes"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_weights_are_kept_in_float32_and_computed_with_in_the_specs_type(flat, dtype, computes):
    config = flat(model={"builtin": "tiny", "dtype": dtype})
    for engine in (ACTOR, "actor_rollout_ref.ref"):
        assert given(
            config,
            f"{engine}.fsdp_config.model_dtype",
            f"{engine}.fsdp_config.mixed_precision.param_dtype",
            f"{engine}.fsdp_config.mixed_precision.reduce_dtype",
            f"{engine}.fsdp_config.strategy",
        ) == ["fp32", computes, "fp32", "fsdp2"]


def test_adapters_have_twice_their_rank_as_scale_unless_told(flat):
    lora = {"rank": 4, "targets": ["q_proj"]}
    for more, alpha in (({}, 8), ({"alpha": 5}, 5)):
        config = flat(model={"builtin": "tiny", "lora": lora | more})
        found = given(config, f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules")
        assert found == [4, alpha, ["q_proj"]]
    assert flat()[f"{MODEL}.lora_rank"] == 0


def test_a_reference_is_computed_for_a_kl_and_never_added_to_verls_loss(flat, objective):
    for kl_coef, wanted in ((0.0, False), (0.01, True)):
        config = flat(policy=objective("grpo", kl_coef=kl_coef))
        assert given(
            config, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}.use_kl_loss"
        ) == [wanted, 0.0, False]  # fmt: skip


def test_the_longest_prompt_follows_from_the_longest_sequence(flat):
    assert given(flat(), "data.max_prompt_length", f"{ROLLOUT}.prompt_length") == [1024, 1024]
    config = flat(data={"max_tokens": 300})
    assert {name: config[name] for name in prompt_fields(300)} == prompt_fields(300)


def test_the_configuration_is_json_and_nothing_in_it_is_left_to_resolve(verl_spec):
    upstream = derive(verl_spec()).upstream
    assert json.loads(json.dumps(upstream)) == upstream
    assert [key for key, value in leaves(upstream) if isinstance(value, str) and "${" in value] == []
    # no reward model is loaded, so nobody names its sampler
    assert [key for key, value in leaves(upstream) if value == "???"] == ["reward.reward_model.rollout.name"]


def test_what_the_spec_is_silent_about_is_as_verl_has_it(flat, verl_spec):
    changed = {**spec_fields(verl_spec()), **machine_fields(verl_spec(), cuda=False, flash_attention=False)}
    stock, config = dict(leaves(composed())), flat()
    plain = {key: value for key, value in stock.items() if not (isinstance(value, str) and "${" in value)}
    untouched = [key for key in plain if key in config and not any(f"{key}.".startswith(f"{own}.") for own in changed)]
    assert len(untouched) > 500
    assert {key: config[key] for key in untouched} == {key: plain[key] for key in untouched}


# -- the machine ------------------------------------------------------------------------------------------------------


def test_sequences_are_packed_where_the_kernels_for_it_can_run(verl_spec):
    half = verl_spec(model={"builtin": "tiny", "dtype": "bfloat16"})
    packed = [
        machine_fields(spec, cuda=cuda, flash_attention=flash)[f"{MODEL}.use_remove_padding"]
        for spec in (half, verl_spec())
        for cuda, flash in ((True, True), (True, False), (False, True))
    ]
    assert packed == [True, False, False, False, False, False]


def test_a_machine_without_gpus(verl_spec):
    fields = machine_fields(verl_spec(backend={"processes": 2}), cuda=False, flash_attention=False)
    assert fields == {
        "trainer.device": "cpu",
        f"{MODEL}.use_remove_padding": False,
        f"{ACTOR}.use_remove_padding": False,
        f"{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ACTOR}.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        f"{ROLLOUT}.agent.num_workers": 1,
        "ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.num_cpus": 17,  # 8, 4 for each of 2 ranks, 1 agent worker
        "ray_kwargs.ray_init.num_gpus": 2,
    }


def test_a_cluster_that_runs_already_keeps_its_own_resources(verl_spec):
    fields = machine_fields(verl_spec(backend={"ray": "ray://head:10001"}), cuda=True, flash_attention=True)
    found = {key: value for key, value in fields.items() if key.startswith("ray_kwargs")}
    assert found == {"ray_kwargs.ray_init.address": "ray://head:10001"}


@pytest.mark.parametrize(
    "options",
    [
        {f"{MODEL}.use_remove_padding": True},
        {"actor_rollout_ref": {"model": {"use_remove_padding": True}}},
        {"actor_rollout_ref.model": {"use_remove_padding": True}},
    ],
    ids=["dotted", "nested", "both"],
)
def test_an_option_goes_before_the_machine(verl_spec, flat, options):
    key = f"{MODEL}.use_remove_padding"
    assert key not in machine_fields(verl_spec(backend={"options": options}), cuda=False, flash_attention=False)
    assert flat(backend={"options": options})[key] is True


def test_the_plan_says_for_which_machine_it_shows_the_configuration(verl_spec):
    for rollout, machine, device in (("hf", "without GPUs", "cpu"), ("vllm", "with GPUs and flash-attn", "cuda")):
        derived = derive(verl_spec(backend={"rollout": rollout}))
        assert derived.notes[0] == (
            "upstream configuration: device, attention, packing, compilation and Ray's resources are shown as on a "
            f"machine {machine}; the worker sets them by its own machine. Paths and the longest prompt are filled in "
            "there too"
        )
        assert derived.upstream["trainer"]["device"] == device


# -- objectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "native"),
    [
        *((name, {}, True) for name in NATIVE if name != "composer2"),
        ("composer2", {}, False),  # its KL is measured by the core
        ("composer2", {"kl_coef": 0.0}, True),
        ("grpo", {"kl_coef": 0.01}, False),
        ("grpo", {"delta": 4.0}, False),
        ("grpo", {"dual_clip": 3.0}, True),
        ("grpo", {"rollout_correction": {}}, False),
        ("grpo", {"off_policy_threshold": 0.1}, False),
        ("grpo", {"overlong": {"limit": 10, "cache": 5}, "scale_rewards": "batch", "drop_truncated": False}, True),
        ("cispo", {"kl_estimator": "k2"}, True),
        *((name, {}, False) for name in ("bnpo", "gspo", "gspo-token", "gmpo", "vespo", "luspo")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_core_computes_what_verls_loss_has_not_all_of(name, settings, native, objective):
    block = objective(name, **settings)
    assert is_native(block) is native
    mode = loss_fields(block, max_completion_tokens=16)["policy_loss.loss_mode"]
    assert (mode == policy_loss_name(name)) is not native


def test_a_third_partys_objective_of_the_same_name_is_another_one(objective):
    block = objective("grpo")
    other = Plugged(block.kind, block.use, "acme 1.0", block.settings)
    assert not is_native(other)
    assert loss_fields(other, max_completion_tokens=16)["policy_loss.loss_mode"] == "composer_grpo"


@pytest.mark.parametrize(
    ("name", "mode", "factor"),
    [
        ("grpo", "seq-mean-token-mean", None),
        ("dapo", "token-mean", None),
        ("luspo", "seq-mean-token-sum", None),
        ("dr-grpo", "seq-mean-token-sum-norm", 16),
    ],
)
def test_averages_have_verls_names(name, mode, factor, objective):
    fields = loss_fields(objective(name), max_completion_tokens=16)
    assert (fields["loss_agg_mode"], fields["loss_scale_factor"]) == (mode, factor)


def test_an_objective_without_rewards_is_the_cores(flat):
    block = Plugged(Kind.OBJECTIVE, "lm-ce", "composer-core 0.1.0", LmCeSettings())
    config = flat(policy=block)
    assert given(config, f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode") == ["composer_lm-ce", "token-mean"]


# -- what verl cannot do ----------------------------------------------------------------------------------------------


def test_steps_fill_whole_generations(refused):
    assert refused(steps=10, iterations=4) == [
        (
            "train.steps",
            "10 steps are no whole number of generations: each serves 4 of them (train.iterations), and verl saves and "
            "stops between generations",
            "a multiple of 4, such as 12",
        )
    ]


def test_the_learning_rate_rises_in_whole_generations(refused):
    assert refused(iterations=2, warmup_steps=3) == [
        (
            "train.warmup_steps",
            "verl moves the learning rate once per generation, which is 2 steps (train.iterations), and 3 is no "
            "multiple of it",
            "a multiple of 2",
        )
    ]


def test_ranks_share_sequences_equally_and_micro_batches_their_share(refused):
    assert refused(prompts_per_step=5, group_size=2, backend={"processes": 3}) == [
        (
            "backend.processes",
            "the 10 sequences of a step (prompts_per_step x group_size) cannot be shared equally by 3 ranks",
            "one of 1, 2, 5, 10 ranks, or more prompts per step",
        )
    ]
    assert refused(prompts_per_step=4, group_size=4, micro_batch=5, backend={"processes": 2}) == [
        (
            "train.micro_batch",
            "5 does not divide the 8 sequences that each of 2 ranks takes of a step (prompts_per_step x group_size)",
            "one of 1, 2, 4, 8",
        )
    ]


def test_all_problems_are_told_at_once(refused):
    model = {"builtin": "tiny", "lora": {"dropout": 0.1}}
    assert refused(schedule="linear", model=model, backend={"nodes": 2}) == [
        (
            "train.schedule",
            "verl's learning rate stays constant or falls along a cosine; it has no linear schedule",
            "cosine, or constant",
        ),
        ("model.lora.dropout", "verl trains adapters without dropout, got 0.1", "leave it out"),
        (
            "backend.nodes",
            "2 nodes need a Ray cluster that spans them, and backend.ray is local",
            "backend.ray: auto on its head node, or its address",
        ),
    ]


def test_verls_advantages_leave_no_setting_of_the_cores_unread(refused, flat, objective):
    problem = "it is part of the core's advantages, and backend.advantages is verl's rloo, which sees the plain rewards"
    backend = {"advantages": "rloo"}
    assert refused(policy=objective("composer2"), backend=backend) == [
        ("loss.objective.length_penalty", problem, "backend.advantages: core"),
        ("loss.objective.kl_estimator", problem, "backend.advantages: core"),
    ]
    assert refused(policy=objective("grpo", scale_rewards="none"), backend=backend) == [
        ("loss.objective.scale_rewards", problem, "backend.advantages: core")
    ]
    assert flat(backend=backend)["algorithm.adv_estimator"] == "rloo"
    assert flat()["algorithm.adv_estimator"] == "composer"


def test_verl_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verl" else real(name))
    with pytest.raises(MissingError) as caught:
        composed()
    assert str(caught.value) == "verl is not installed\n  fix: pip install composer-verl"


def test_planning_imports_no_trainer(tmp_path):
    program = (
        "import sys\n"
        "import composer_verl.plugin, composer_verl.upstream\n"
        "composer_verl.upstream.resolved(composer_verl.upstream.composed())\n"
        "print([name for name in ('torch', 'verl', 'ray', 'transformers', 'tensordict') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "[]\n"


def test_fields_are_put_in_without_touching_the_original():
    config = {"a": {"b": 1, "c": 2}, "d": None}
    assert with_fields(config, {"a.b": 3, "d.e.f": 4, "g": {}}) == {
        "a": {"b": 3, "c": 2},
        "d": {"e": {"f": 4}},
        "g": {},
    }
    assert config == {"a": {"b": 1, "c": 2}, "d": None}
