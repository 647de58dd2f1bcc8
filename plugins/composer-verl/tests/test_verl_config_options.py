"""`backend.options`: what of verl's configuration a user may set, and what each refusal says."""

import pytest

from composer_core.errors import SpecError
from composer_verl.config import derive, machine_fields, spec_fields
from composer_verl.options import ACTOR, FLOATS, FREE, MODEL, OWNED, REFUSED, ROLLOUT
from composer_verl.upstream import composed, leaves

NOT_IN_VERLS_FILES = {
    "actor_rollout_ref.composer",  # ours, outside of what verl checks
    f"{ACTOR}.fsdp_config.mixed_precision",  # verl's dataclass has it
    "ray_kwargs.ray_init.address",  # an argument of ray.init
}


@pytest.fixture(scope="module")
def stock():
    return composed()


@pytest.fixture(scope="module", autouse=True)
def _composed_once(stock):
    """Composing takes 0.4 s, and nothing changes what it gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer_verl.config.composed", lambda: stock)
        yield


@pytest.fixture
def refused(verl_spec):
    """`refused(options, **spec)`: what is wrong, one (key, problem, fix) each."""

    def _refused(options, **given):
        backend = {"options": options} | given.pop("backend", {})
        with pytest.raises(SpecError) as caught:
            derive(verl_spec(backend=backend, **given))
        return [(problem.key, problem.problem, problem.fix) for problem in caught.value.problems]

    return _refused


@pytest.fixture
def flat(verl_spec):
    """`flat(options)`: verl's whole configuration by dotted keys."""
    return lambda options: dict(leaves(derive(verl_spec(backend={"options": options})).upstream))


def test_dotted_and_nested_keys_are_the_same_option(flat):
    rollout = {"gpu_memory_utilization": 0.6, "engine_kwargs.vllm.max_num_seqs": 8}
    config = flat({"actor_rollout_ref": {"rollout": rollout}, f"{ACTOR}.optim.betas": [0.9, 0.95]})
    assert config[f"{ROLLOUT}.gpu_memory_utilization"] == 0.6
    assert config[f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs"] == 8  # verl has an empty section there: any key goes
    assert config[f"{ACTOR}.optim.betas"] == [0.9, 0.95]
    assert config[f"{ACTOR}.optim.lr"] == 1e-6  # its neighbours stay


def test_where_verl_has_nothing_a_section_is_a_value(flat):
    for options in (
        {f"{ACTOR}.optim.override_optimizer_config": {"eps": 1e-6}},
        {f"{ACTOR}.optim.override_optimizer_config.eps": 1e-6},
    ):
        assert flat(options)[f"{ACTOR}.optim.override_optimizer_config.eps"] == 1e-6


def test_what_verl_takes_over_from_an_option_follows_it(flat):
    config = flat({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 2048})
    followers = (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    assert [config[name] for name in followers] == [True, 2048]
    config = flat({f"{MODEL}.use_remove_padding": True, f"{ACTOR}.use_torch_compile": True})
    assert config[f"{ACTOR}.use_remove_padding"] is config["actor_rollout_ref.ref.use_torch_compile"] is True


def test_an_option_beside_what_the_machine_decides_replaces_only_itself(flat):
    config = flat({f"{MODEL}.override_config": {"rope_theta": 5e5}})
    assert config[f"{MODEL}.override_config.rope_theta"] == 5e5
    assert config[f"{MODEL}.override_config.attn_implementation"] == "sdpa"


def test_arguments_of_ray_init_go_through(flat):
    config = flat({"ray_kwargs.ray_init.object_store_memory": 10**8, "ray_kwargs.ray_init.num_cpus": 30})
    names = ("object_store_memory", "num_cpus", "num_gpus")
    assert [config[f"ray_kwargs.ray_init.{name}"] for name in names] == [10**8, 30, 1]


@pytest.mark.parametrize("value", ["${env:MIRROR}", ["a", "${env:MIRROR}"]], ids=["text", "list"])
def test_a_variable_of_the_environment_stays_a_name(flat, value):
    key = "ray_kwargs.ray_init.runtime_env.py_executable"
    assert flat({key: value})[key] == value


def test_a_mistyped_key_has_a_neighbour(refused):
    assert refused({f"{ROLLOUT}.gpu_memory_utilisation": 0.6, "gpu_memory_utilization": 0.6, "zzz": 1}) == [
        (
            f"backend.options.{ROLLOUT}.gpu_memory_utilisation",
            "verl has no such key",
            f"did you mean '{ROLLOUT}.gpu_memory_utilization'?",
        ),
        (
            "backend.options.gpu_memory_utilization",
            "verl has no such key",
            f"did you mean '{ROLLOUT}.gpu_memory_utilization'?",
        ),
        ("backend.options.zzz", "verl has no such key", ""),
    ]


def test_hydras_signs_are_not_read(refused):
    assert refused({f"+{ACTOR}.optim.eps": 1e-6}) == [
        (
            f"backend.options.+{ACTOR}.optim.eps",
            "a + or ~ belongs to hydra's command line; options change what verl has",
            "the key alone",
        )
    ]


def test_a_section_is_no_value(refused):
    assert refused({f"{ROLLOUT}.engine_kwargs": 3}) == [
        (
            f"backend.options.{ROLLOUT}.engine_kwargs",
            "this is a section of verl's configuration, not a value",
            "one of its keys",
        )
    ]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        (f"{ROLLOUT}.max_num_seqs", "many", "int"),
        (f"{ROLLOUT}.max_num_seqs", True, "int"),
        (f"{ROLLOUT}.max_num_seqs", 8.5, "int"),
        (f"{ROLLOUT}.enforce_eager", 1, "bool"),
        (f"{ROLLOUT}.gpu_memory_utilization", "0.6", "float"),
        (f"{ROLLOUT}.load_format", None, "str"),
        (f"{ACTOR}.optim.betas", 0.9, "list"),
        (f"{ACTOR}.entropy_coeff", "0.1", "float"),
    ],
)
def test_a_value_has_the_type_of_verls(refused, key, value, wanted):
    assert refused({key: value}) == [(f"backend.options.{key}", f"verl wants {wanted} here, got {value!r}", "")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.entropy_coeff", 0.001),
        (f"{ROLLOUT}.gpu_memory_utilization", 1),
        (f"{ROLLOUT}.max_model_len", 4096),
        (f"{ROLLOUT}.tensor_model_parallel_size", 2),
        (f"{ROLLOUT}.agent.num_workers", 2),
        (f"{MODEL}.lora.merge", True),
        (f"{ACTOR}.fsdp_config.param_offload", True),
        ("trainer.balance_batch", False),
        ("transfer_queue.backend.SimpleStorage.num_data_storage_units", 4),
    ],
)
def test_what_is_left_goes_through(flat, key, value):
    assert flat({key: value})[key] == value


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        (f"{ACTOR}.optim.lr", 1e-3, "set train.learning_rate"),
        (f"{ACTOR}.policy_loss.loss_mode", "gspo", "set loss.objective"),
        ("data.train_batch_size", 8, "set train.prompts_per_step"),
        ("data.prompt_key", "question", "set data"),
        (f"{ACTOR}.strategy", "megatron", "set nothing: the backend trains with FSDP2"),
        ("trainer.v1.trainer_mode", "separate_async", "set nothing: the backend has its own loop"),
        ("critic.enable", True, "set nothing: no objective has a critic"),
        ("distillation.enabled", True, "set loss.channels"),
        ("algorithm.gamma", 0.9, "set loss.objective, or backend.advantages"),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent", "set rollout"),
        ("actor_rollout_ref.composer.plan", "x", "set nothing: the plan itself stands there"),
    ],
)
def test_what_the_spec_decides_is_refused_with_its_key(refused, key, value, fix):
    assert refused({key: value}) == [(f"backend.options.{key}", "another part of the spec decides this", fix)]


@pytest.mark.parametrize("key", [f"{MODEL}.use_fused_kernels", f"{ACTOR}.ulysses_sequence_parallel_size", "skip"])
def test_what_the_adapter_cannot_live_with_is_refused_with_the_reason(refused, key):
    option = {key: 1} if key != "skip" else {"skip.rollout.enable": True}
    assert refused(option) == [(f"backend.options.{next(iter(option))}", REFUSED[key], "leave it out")]


def test_what_verls_advantages_read_is_free_with_them(verl_spec, refused):
    key = "algorithm.gamma"
    backend = {"advantages": "reinforce_plus_plus", "options": {key: 0.9}}
    assert derive(verl_spec(backend=backend)).upstream["algorithm"]["gamma"] == 0.9
    assert [found[0] for found in refused({"algorithm.lam": 0.9}, backend={"advantages": "rloo"})] == [
        "backend.options.algorithm.lam"
    ]


def test_batches_by_length_need_an_average_that_does_not_see_them(refused, objective):
    key = f"{ACTOR}.use_dynamic_bsz"
    assert refused({key: True}, policy=objective("bnpo"), micro_batch=4) == [
        (
            f"backend.options.{key}",
            "bnpo is a mean within micro-batches, which would then hold any number of sequences",
            "leave it out, or objective dapo, whose mean is over the whole step",
        ),
        (
            "train.micro_batch",
            f"with {key} verl fills micro-batches by tokens and would not read it",
            f"leave it out; {ACTOR}.ppo_max_token_len_per_gpu says how many tokens",
        ),
    ]


# -- the tables against the installed verl ----------------------------------------------------------------------------


def sections(config, prefix=""):
    for name, value in config.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from sections(value, f"{prefix}{name}.")


def test_every_key_of_the_tables_is_verls(stock):
    known = set(sections(stock)) | NOT_IN_VERLS_FILES
    assert sorted((set(OWNED) | set(REFUSED) | FREE | FLOATS) - known) == []


def test_every_key_that_the_spec_decides_is_refused_as_an_option(verl_spec, objective):
    lora = {"builtin": "tiny", "lora": {"rank": 4}}
    keys = {
        *spec_fields(verl_spec(model=lora)),
        *(key for name in ("grpo", "sapo", "dr-grpo") for key in spec_fields(verl_spec(policy=objective(name)))),
        *machine_fields(verl_spec(), cuda=False, flash_attention=False),
    }
    free = [key for key in keys if key in FREE or not _covered(key)]
    # defaults that a user may have reasons to replace
    assert sorted(free) == [
        f"{ACTOR}.fsdp_config.use_torch_compile",
        f"{ACTOR}.use_torch_compile",
        f"{MODEL}.override_config.attn_implementation",
        f"{MODEL}.use_remove_padding",
        f"{ROLLOUT}.agent.num_workers",
        f"{ROLLOUT}.dtype",
        f"{ROLLOUT}.max_num_seqs",
        f"{ROLLOUT}.tensor_model_parallel_size",
        "ray_kwargs.ray_init.include_dashboard",
        "ray_kwargs.ray_init.num_cpus",
        "ray_kwargs.ray_init.num_gpus",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units",
    ]


def _covered(key):
    parts = key.split(".")
    return any(".".join(parts[:end]) in {*OWNED, *REFUSED} for end in range(1, len(parts) + 1))
