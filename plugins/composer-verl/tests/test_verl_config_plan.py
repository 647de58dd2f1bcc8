"""A spec with all three channels on verl, from its text to a plan and to what verl itself says of the configuration."""

import json

import pytest

from composer_core.cli.main import main
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import Plan, make_plan

SPEC = """\
version: 1
name: verl-all-channels
seed: 3
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
  pairs: {path: pairs.jsonl}
loss:
  objective: {use: grpo}
  channels:
    - {use: sdpo, weight: 0.1, divergence: jsd, beta: 0.5}
    - {use: replay, weight: 0.05, variant: simpo}
train: {steps: 4, prompts_per_step: 4, group_size: 4, max_completion_tokens: 16, learning_rate: 1.0e-3}
backend: {use: verl, options: {actor_rollout_ref.rollout.gpu_memory_utilization: 0.6}}
"""


@pytest.fixture
def spec_file(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("")
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def plan(spec_file):
    registry = Registry.discover()
    return lambda *overrides: make_plan(load_spec(spec_file, registry, overrides=overrides), registry)


def test_all_three_channels_are_planned_the_best_way(plan):
    made = plan()
    assert made.objective == "native"
    assert {channel.name: channel.reason for channel in made.channels} == {
        "sdpo": "backend 'verl' provides it",
        "replay": "backend 'verl' provides it",
    }
    assert made.processes == 1  # ranks are Ray's actors, not the worker's
    assert {"composer-core", "composer-verl"} <= set(made.versions)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_the_plan_and_the_configuration_agree_on_whose_code_it_is(plan):
    for kl_coef, whose, mode in (("0", "native", "vanilla"), ("0.01", "core", "composer_grpo")):
        made = plan(f"loss.objective.kl_coef={kl_coef}")
        actor = made.upstream["actor_rollout_ref"]["actor"]
        assert (made.objective, actor["policy_loss"]["loss_mode"]) == (whose, mode)


def test_the_plan_shows_the_whole_configuration_section_by_section(spec_file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(spec_file)])
    assert ended.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    def section(name):
        rows = lines[lines.index(name) + 1 :]
        return rows[: next(number for number, row in enumerate(rows) if " " not in row)]

    # every section of it, in verl's order; one row for each key that is no section itself
    assert section("actor_rollout_ref.actor.optim")[3:6] == [
        "lr 0.001",
        "lr_warmup_steps_ratio 0.0",
        "total_training_steps 4",
    ]
    assert "gpu_memory_utilization 0.6" in section("actor_rollout_ref.rollout")
    assert section("actor_rollout_ref.actor.policy_loss")[1] == "loss_mode vanilla"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("loss.objective.kl_coef=0.01", "loss.objective.use=dr-grpo", "backend.processes=2"),
        ("model.lora={rank: 4}", "model.dtype=bfloat16", "train.iterations=2", "backend.advantages=rloo"),
    ],
    ids=["plain", "reference", "adapters"],
)
def test_verl_accepts_the_configuration(plan, overrides):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = OmegaConf.create(dict(plan(*overrides).upstream))
    reference, critic = need_reference_policy(config), need_critic(config)
    assert (reference, critic) == ("loss.objective.kl_coef=0.01" in overrides, False)
    validate_config(config, use_reference_policy=reference, use_critic=critic)
    # what workers make of their sections, but for the model, which reads its files
    sections = config.actor_rollout_ref
    assert omega_conf_to_dataclass(sections.rollout).name == "composer_hf"
    for engine in (sections.actor, sections.ref):
        if engine is sections.ref:  # as verl's worker does before it
            for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
                value = engine.pop(f"log_prob_{name}")
                engine[name if name.startswith("use") else f"ppo_{name}"] = value
        made = omega_conf_to_dataclass(engine).engine
        assert (made.strategy, made.model_dtype) == ("fsdp2", "fp32")
        assert made.mixed_precision["param_dtype"] == ("bf16" if "model.dtype=bfloat16" in overrides else "fp32")
