"""Every preset equals TRL 1.16's own loss on one fixed batch, in value and in each parameter's gradient.

The batch is made by hand: ragged prompts and completions, and old log-probs away from the current ones, so that
ratios leave 1 and every clip rule engages.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss import policy as objectives
from composer_core.loss.presets import PRESETS
from composer_core.loss.reduce import global_count
from composer_core.loss.views import ModelView
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS

LIMIT = 6
PROMPTS = [[10, 11, 12], [13, 14], [15, 16, 17, 18], [19, 20]]
COMPLETIONS = [[30, 31, 32, 33, 34, 1], [35, 36, 1], [37, 38, 39, 40], [41, 1]]
ADVANTAGES = [1.3, -0.7, 0.4, -1.1]

# preset -> what GRPOConfig calls it
TRL = {
    "grpo": {"loss_type": "grpo"},
    "dr-grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}
# a cap that these ratios reach; the preset's own 5.0 would never bind here
OURS = {"cispo": {"epsilon_high": 1.2}}


# not GRPOTrainer's: their official vectors are in tests/data/golden; maxrl and composer2 differ in advantages only
ELSEWHERE = {"gspo-token", "gmpo", "dppo", "maxrl", "composer2"}


def test_the_table_covers_every_preset():
    assert set(TRL) | ELSEWHERE == set(PRESETS)


@pytest.mark.parametrize("preset", TRL)
def test_preset_equals_trl_in_value_and_gradients(preset, tiny_model_folder, tmp_path):
    _compare(preset, tiny_model_folder, tmp_path, trl=TRL[preset], ours=OURS.get(preset, {}))


def test_grpo_with_a_kl_to_the_reference_equals_trl(tiny_model_folder, tmp_path):
    _compare("grpo", tiny_model_folder, tmp_path, trl={"loss_type": "grpo", "beta": 0.3}, ours={"kl_coef": 0.3})


def test_gspo_with_a_kl_multiplies_it_by_the_sequence_ratio_like_trl(tiny_model_folder, tmp_path):
    _compare("gspo", tiny_model_folder, tmp_path, trl={**TRL["gspo"], "beta": 0.3}, ours={"kl_coef": 0.3})


def test_two_sided_clipping_equals_trl(tiny_model_folder, tmp_path):
    _compare("grpo", tiny_model_folder, tmp_path, trl={"loss_type": "grpo", "delta": 1.3}, ours={"delta": 1.3})


def test_a_kl_without_the_ratio_equals_trl(tiny_model_folder, tmp_path):
    trl = {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}
    _compare("grpo", tiny_model_folder, tmp_path, trl=trl, ours={"kl_coef": 0.3, "kl_corrected": False})


def _compare(preset, folder, tmp_path, *, trl, ours):
    reference = _trl_trainer(folder, tmp_path, trl)
    batch = _padded_batch(reference)
    expected = reference._compute_loss(reference.model, batch)
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in reference.model.named_parameters()}

    model = load_policy(folder, dtype="float32")
    objective = getattr(objectives, preset.replace("-", "_"))(OBJECTIVE_SETTINGS[preset](**ours))
    packed = _packed_batch(batch)
    term = objective.loss(ModelView(model, rollouts=packed.rollouts.seqs), packed)
    loss = term.sum / global_count(packed.counts, term.count)
    loss.backward()

    # abs: terms of size 1 nearly cancel in some of these losses
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert wanted.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        error = (parameter.grad - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, name
    if ours.get("kl_coef"):
        assert {"kl"} <= set(term.metrics)


def _trl_trainer(folder, tmp_path, options):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=len(PROMPTS),
        gradient_accumulation_steps=1,
        num_generations=len(PROMPTS),
        max_completion_length=LIMIT,
        report_to="none",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **options,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=load_tokenizer(folder),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # the training loop sets it
    return trainer


def _padded_batch(trainer):
    """TRL's batch: prompts padded on the left, completions on the right."""
    prompts = max(len(ids) for ids in PROMPTS)
    completions = max(len(ids) for ids in COMPLETIONS)
    mask = torch.tensor([[1] * len(c) + [0] * (completions - len(c)) for c in COMPLETIONS])
    batch = {
        "prompt_ids": torch.tensor([[0] * (prompts - len(p)) + p for p in PROMPTS]),
        "prompt_mask": torch.tensor([[0] * (prompts - len(p)) + [1] * len(p) for p in PROMPTS]),
        "completion_ids": torch.tensor([c + [0] * (completions - len(c)) for c in COMPLETIONS]),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], mask], 1)
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, completions)
    generator = torch.Generator().manual_seed(0)
    batch["old_per_token_logps"] = logps + 0.4 * torch.randn(logps.shape, generator=generator)
    batch["ref_per_token_logps"] = logps + 0.4 * torch.randn(logps.shape, generator=generator)
    return batch


def _packed_batch(batch):
    """The same, packed; what stands outside a completion is NaN, so that it would show."""
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    nothing = torch.full(batch["prompt_ids"].shape, torch.nan)

    def per_token(completion):
        return torch.cat([nothing, completion], 1)[mask]

    rollouts = Rollouts(
        seqs=Seqs.from_padded(torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1), mask),
        action=per_token(batch["completion_mask"].float()).nan_to_num().bool(),
        advantages=per_token(batch["advantages"][:, None].expand_as(batch["completion_ids"])),
        old_logps=per_token(batch["old_per_token_logps"]),
        ref_logps=per_token(batch["ref_per_token_logps"]),
    )
    sequences = len(PROMPTS)
    counts = {
        "tokens": float(batch["completion_mask"].sum()),
        "sequences": float(sequences),
        "max_tokens": float(sequences * LIMIT),
        "micro_batches": 1.0,
    }
    return Batch(rollouts=rollouts, counts=counts)
