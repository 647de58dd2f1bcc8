"""What would do nothing, or something else than it says, beside channels or an objective of the core is refused."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer

from composer_core.errors import SpecError, UsageError
from composer_core.loss.composite import CompositeLoss
from composer_core.loss.policy import gmpo
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, RegexSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged, RunSpec
from composer_trl.config import derive, grpo_config_fields
from composer_trl.objectives import OWN_LOSS_ONLY, ignored_fields
from composer_trl.settings import TrlSettings

BATCH = {"prompts": [[10]], "completions": [[30, 1], [31, 1]], "rewards": [0.0, 1.0]}


def test_the_table_names_fields_of_trl_and_their_defaults_ask_for_nothing():
    from trl import GRPOConfig

    assert OWN_LOSS_ONLY.keys() <= grpo_config_fields().keys()
    defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in OWN_LOSS_ONLY}
    assert ignored_fields(defaults) == []


@pytest.mark.parametrize(
    "given",
    [{"entropy_coef": 0.01}, {"top_entropy_quantile": 0.2}, {"use_bias_correction_kl": False}],
    ids=lambda given: next(iter(given)),
)
def test_the_trainer_refuses_what_would_be_ignored(given, tiny_model_folder, tmp_path):
    loss = CompositeLoss([], gmpo(OBJECTIVE_SETTINGS["gmpo"]()))
    with pytest.raises(ValueError, match="only trl's own loss reads it, and the core computes the objective") as caught:
        fixed_trainer(tiny_model_folder, tmp_path, **BATCH, loss=loss, native=False, **given)
    assert str(caught.value).startswith(f"{next(iter(given))}: ")
    fixed_trainer(tiny_model_folder, tmp_path, **BATCH, loss=None, **given)  # its own loss takes it


def test_the_plan_says_so_before_anything_starts():
    def plugged(kind, use, settings):
        return Plugged(kind, use, "composer-core 0.1.0", settings, 1.0)

    def spec(objective):
        return RunSpec(
            version=1,
            name="t",
            model={"builtin": "tiny"},
            data={
                "prompts": {"builtin": "digits"},
                "rewards": [plugged(Kind.REWARD, "regex", RegexSettings(pattern="[0-9]"))],
            },
            loss={"objective": plugged(Kind.OBJECTIVE, objective, OBJECTIVE_SETTINGS[objective]())},
            train={"steps": 10},
            backend=plugged(Kind.BACKEND, "trl", TrlSettings(options={"entropy_coef": 0.01})),
            executor=plugged(Kind.EXECUTOR, "inline", InlineSettings()),
        )

    assert derive(spec("grpo")).upstream["entropy_coef"] == 0.01
    with pytest.raises(SpecError) as caught:
        derive(spec("gmpo"))
    assert str(caught.value) == (
        "backend.options.entropy_coef: only trl's own loss reads it, and the core computes gmpo: it would do nothing\n"
        "  fix: leave it out"
    )


def test_an_objective_of_the_core_must_be_there(tiny_model_folder, tmp_path):
    with pytest.raises(ValueError, match="native=False lets the core compute the objective, and this loss has none"):
        fixed_trainer(tiny_model_folder, tmp_path, **BATCH, loss=CompositeLoss([], None), native=False)


def test_a_step_is_counted_before_its_first_forward_so_its_rows_must_be_there(tiny_model_folder, tmp_path):
    loss = CompositeLoss([], gmpo(OBJECTIVE_SETTINGS["gmpo"]()))
    with pytest.raises(ValueError, match="steps_per_generation=1 must be a multiple of gradient_accumulation_steps=2"):
        fixed_trainer(
            tiny_model_folder,
            tmp_path,
            **BATCH,
            loss=loss,
            native=False,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
        )


def test_a_mixture_of_experts_would_lose_its_load_balancing_loss(tiny_model_folder, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=103, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_experts=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts_per_tok=1,
        pad_token_id=0, eos_token_id=1, router_aux_loss_coef=0.001,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    loss = CompositeLoss([], gmpo(OBJECTIVE_SETTINGS["gmpo"]()))
    with pytest.raises(ValueError, match=r"load-balancing loss.*weight 0\.001.*set router_aux_loss_coef=0"):
        fixed_trainer(tiny_model_folder, tmp_path, **BATCH, model=model, loss=loss, native=False)
    fixed_trainer(tiny_model_folder, tmp_path, **BATCH, model=model, loss=loss, native=False, router_aux_loss_coef=0.0)


def test_a_model_whose_log_probs_depend_on_padding_is_refused(tiny_model_folder, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2", vocab_size=103, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0, eos_token_id=1
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.transformer.wpe.weight.data.normal_()
    plain, padded = torch.tensor([[10, 11]]), torch.tensor([[0, 0, 10, 11]])
    logits = [model(ids, attention_mask=(ids != 0).long()).logits[0, -1] for ids in (plain, padded)]
    assert not torch.allclose(*logits, atol=1e-2)  # if this fails, there is no reason left to refuse it
    loss = CompositeLoss([], gmpo(OBJECTIVE_SETTINGS["gmpo"]()))
    with pytest.raises(UsageError) as caught:
        fixed_trainer(tiny_model_folder, tmp_path, **BATCH, model=model, loss=loss, native=False)
    assert str(caught.value) == (
        "model: trl pads prompts on the left, and gpt2 counts its positions from the first column: the same rollout "
        "would have other log-probs in another batch, and a teacher would disagree with itself\n"
        "  fix: a model with rotary positions, such as Qwen3 or Llama"
    )
