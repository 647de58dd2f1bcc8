import inspect

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from composer_core.errors import MissingError
from composer_trl import surface
from composer_trl.backend import rows_dataset
from composer_trl.trainer import ComposerGRPOTrainer


def config(tmp_path, **fields):
    return GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", num_generations=2, **fields)


def no_reward(completions, **_):
    return [0.0] * len(completions)


def test_the_installed_trl_is_the_expected_one():
    assert surface.problems() == []


def test_a_changed_signature_is_named_with_the_version(monkeypatch):
    def moved(self, inputs, phase):
        return None

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", moved)
    (problem,) = surface.problems()
    assert problem.endswith(
        "GRPOTrainer._generate_and_score_completions takes ('self', 'inputs', 'phase'), expected ('self', 'inputs')"
    )
    assert problem.startswith("trl 1.16.")


def test_a_missing_function_for_chat_templates_is_named(monkeypatch):
    monkeypatch.delattr("trl.chat_template_utils.supports_tool_calling")
    (problem,) = surface.problems()
    assert problem.endswith(": chat_template_utils has no supports_tool_calling")


def test_a_changed_surface_stops_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.delattr(GRPOTrainer, "_generate_and_score_completions")
    with pytest.raises(MissingError, match=r"_generate_and_score_completions takes \(\), expected"):
        ComposerGRPOTrainer("no-such-model", no_reward, config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        # TRL only warns, and weights each sequence by its length
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "weights each sequence by its length"),
        # TRL says nothing at all, and shrinks every on-policy gradient to a fifth
        ({"loss_type": "cispo"}, "epsilon_high is the absolute cap of the ratio"),
        ({"loss_type": "luspo"}, "is defined for importance_sampling_level='sequence'"),
    ],
    ids=["sequence-level-dapo", "relative-cispo", "token-level-luspo"],
)
def test_configurations_that_mislead_are_refused(fields, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        ComposerGRPOTrainer("no-such-model", no_reward, config(tmp_path, **fields))


def test_a_kl_needs_a_model_that_can_be_loaded_again(tiny_model_folder, tmp_path):
    nameless = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model_folder))
    nameless.config._name_or_path = ""
    with pytest.raises(ValueError, match="this model was made in memory"):
        ComposerGRPOTrainer(nameless, no_reward, config(tmp_path, beta=0.1))


def test_an_adapter_on_the_head_is_refused(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="an adapter on lm_head cannot be used"):
        ComposerGRPOTrainer("no-such-model", no_reward, config(tmp_path), peft_config=lora)


def test_the_constructor_is_trls_with_a_loss_and_a_listener_more():
    stock = list(inspect.signature(GRPOTrainer.__init__).parameters)
    ours = list(inspect.signature(ComposerGRPOTrainer.__init__).parameters)
    assert ours == [*stock[:4], "rest", "loss", "native", "own_head", "on_generation", "kwargs"]


def test_a_script_without_a_spec_trains(tiny_model_folder, digits, tmp_path):
    trainer = ComposerGRPOTrainer(
        model=str(tiny_model_folder),
        reward_funcs=[lambda completions, **_: [float(len(c[0]["content"])) for c in completions]],
        args=config(tmp_path, max_steps=1, per_device_train_batch_size=2, max_completion_length=4, use_cpu=True),
        train_dataset=rows_dataset(digits),
        processing_class=AutoTokenizer.from_pretrained(tiny_model_folder, padding_side="left"),
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_rows_come_back_exactly():
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "answer": 1, "only_here": {"x": None}},
        {"prompt": [{"role": "tool", "content": "b", "name": "t"}], "answer": "one"},
    ]
    dataset = rows_dataset(rows)
    # Arrow alone would refuse the mixed answers and put `name: None` into the first message
    assert dataset[0] == rows[0]
    assert dataset[1] == rows[1] | {"only_here": None}
