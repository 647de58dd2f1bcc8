import pytest
from trl import GRPOConfig

from composer_core.errors import SpecError
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, RegexSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged, RunSpec
from composer_trl.config import OWNED, derive, grpo_config_fields
from composer_trl.objectives import NATIVE, config_fields
from composer_trl.po_config import PO_OBJECTIVES, make_po_config
from composer_trl.settings import TrlSettings


def spec(*, objective="grpo", options=None, model=None, checkpoint=None, held_out=None, **train):
    def plugged(kind, use, settings, weight=1.0):
        return Plugged(kind, use, "composer-core 0.1.0", settings, weight)

    return RunSpec(
        version=1,
        name="t",
        model=model or {"builtin": "tiny"},
        data={
            "prompts": {"builtin": "digits"},
            "rewards": [plugged(Kind.REWARD, "regex", RegexSettings(pattern="[0-9]"), 0.5)],
            "eval": held_out,
        },
        loss={"objective": plugged(Kind.OBJECTIVE, objective, OBJECTIVE_SETTINGS[objective]())},
        train={"steps": 10} | train,
        backend=plugged(Kind.BACKEND, "trl", TrlSettings(options=options or {})),
        executor=plugged(Kind.EXECUTOR, "inline", InlineSettings()),
        checkpoint=checkpoint or {},
    )


def test_three_numbers_of_the_spec_become_trls_four():
    derived = derive(spec(prompts_per_step=6, group_size=4, micro_batch=8, iterations=2))
    # 6 prompts x 4 completions = 24 sequences; 24 / 8 = 3 accumulated micro-batches, all from one generation
    assert {k: derived.upstream[k] for k in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations",
        "num_iterations",
    )} == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 3,
        "num_generations": 4,
        "num_iterations": 2,
    }  # fmt: skip
    assert derived.numbers["sequences per step"] == 24
    assert derived.numbers["prompts seen in the run"] == 30  # 10 steps, 2 per generation: 5 generations of 6 prompts


@pytest.mark.parametrize(
    ("prompts", "group", "micro"),
    # the largest divisor up to 8: of 64, of 30, of 22, of 26
    [(8, 8, 8), (5, 6, 6), (11, 2, 2), (13, 2, 2)],
)
def test_the_default_micro_batch_divides_the_step(prompts, group, micro):
    assert spec(prompts_per_step=prompts, group_size=group).train.micro_batch_size == micro


def test_what_derive_gives_is_a_valid_grpo_config(tmp_path):
    for objective in NATIVE:
        upstream = derive(spec(objective=objective)).upstream
        config = GRPOConfig(**upstream, output_dir=str(tmp_path))
        assert {name: getattr(config, name) for name in PO_OBJECTIVES[objective]} == PO_OBJECTIVES[objective]


@pytest.mark.parametrize(("group", "batch"), [(1, 8), (3, 6), (16, 16)], ids=["one", "whole-groups", "one-large-group"])
def test_held_out_prompts_are_evaluated_in_whole_groups_near_the_micro_batch(group, batch, tmp_path):
    held_out = {"builtin": "digits", "every": 7, "group_size": group}
    upstream = derive(spec(held_out=held_out, prompts_per_step=2, group_size=4)).upstream  # a micro-batch of 8
    config = GRPOConfig(**upstream, output_dir=str(tmp_path))
    assert (config.eval_strategy, config.eval_steps) == ("steps", 7)
    assert (config.num_generations_eval, config.per_device_eval_batch_size) == (group, batch)


def test_every_key_that_derive_sets_is_owned_by_the_spec():
    derived = derive(spec(held_out={"builtin": "digits"})).upstream
    sets = set(derived) | {key for name in NATIVE for key in PO_OBJECTIVES[name]}
    # defaults that options may replace
    assert sets - set(OWNED) == {"report_to", "gradient_checkpointing_kwargs"}


def test_all_problems_of_the_options_come_at_once():
    options = {"epsilon_high": 0.2, "top_entropy_quantil": 0.2, "use_vllm": "yes", "entropy_coef": 0.01}
    with pytest.raises(SpecError) as caught:
        derive(spec(options=options, prompts_per_step=3, group_size=2, micro_batch=4))
    assert str(caught.value) == (
        "train.micro_batch: 4 does not divide the 6 sequences of a step (prompts_per_step x group_size)\n"
        "  fix: one of 1, 2, 3, 6\n"
        "backend.options.epsilon_high: another part of the spec decides this\n"
        "  fix: set loss.objective.epsilon_high\n"
        "backend.options.top_entropy_quantil: trl.GRPOConfig has no such field\n"
        "  fix: did you mean 'top_entropy_quantile'?\n"
        "backend.options.use_vllm: trl.GRPOConfig wants bool, got 'yes'"
    )


def test_good_options_reach_the_configuration():
    assert derive(spec(options={"top_entropy_quantile": 0.2})).upstream["top_entropy_quantile"] == 0.2


def test_the_fields_read_from_the_source_are_the_real_ones():
    assert set(grpo_config_fields()) == set(GRPOConfig.__dataclass_fields__)


def test_on_policy_steps_are_explained():
    assert any("clipping never engages" in note for note in derive(spec()).notes)
    assert not any("clipping never engages" in note for note in derive(spec(iterations=2)).notes)


def test_full_fine_tuning_in_bfloat16_at_a_small_rate_is_warned_of():
    small = derive(spec(model={"builtin": "tiny", "dtype": "bfloat16"}, learning_rate=1e-6))
    assert any("lose updates" in note for note in small.notes)
    lora = derive(spec(model={"builtin": "tiny", "dtype": "bfloat16", "lora": {}}, learning_rate=1e-6))
    assert not any("lose updates" in note for note in lora.notes)


def test_gspo_is_grpo_at_sequence_level():
    # Qwen's defaults, two orders of magnitude below GRPO's: the ratio is a geometric mean
    assert config_fields("gspo", OBJECTIVE_SETTINGS["gspo"]()) == {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "scale_rewards": "group",
        "beta": 0.0,
        "mask_truncated_completions": False,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "delta": None,
    }


def test_make_po_config_applies_the_preset_and_the_overrides(tmp_path):
    config = make_po_config("dr_grpo", output_dir=str(tmp_path), beta=0.02, bf16=False)
    assert (config.loss_type, config.scale_rewards, config.beta) == ("dr_grpo", "none", 0.02)


def test_make_po_config_names_the_menu():
    with pytest.raises(ValueError, match=r"unknown objective 'ppo'; one of bnpo, cispo, dapo, dr-grpo, grpo, gspo, "):
        make_po_config("ppo")


def test_a_knob_that_trl_changes_is_reported(monkeypatch, tmp_path):
    from composer_trl import po_config

    class Deaf(GRPOConfig):
        def __post_init__(self):
            super().__post_init__()
            self.importance_sampling_level = "token"

    monkeypatch.setattr(po_config, "GRPOConfig", Deaf)
    with pytest.raises(RuntimeError, match=r"changed \{'importance_sampling_level': 'token'\} of gspo"):
        make_po_config("gspo", output_dir=str(tmp_path), bf16=False)
