"""With the same GRPOConfig the subclass is the stock trainer, to the last bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from composer_trl.backend import rows_dataset
from composer_trl.po_config import PO_OBJECTIVES
from composer_trl.trainer import ComposerGRPOTrainer


def share_of_digits(completions, **_):
    return [sum(ch.isdigit() for ch in c[0]["content"]) / 8 for c in completions]


def recording(base):
    class Recording(base):
        losses: list

        def training_step(self, *args):
            loss = super().training_step(*args)
            self.losses.append(loss.item())
            return loss

    return Recording


def train(base, folder, rows, out, fields, **extra):
    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
        **fields,
    )
    trainer = recording(base)(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        share_of_digits,
        config,
        train_dataset=rows_dataset(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.losses = []
    trainer.train()
    return trainer.losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("objective", sorted(PO_OBJECTIVES))
def test_losses_and_weights_are_those_of_the_stock_trainer(objective, tiny_model_folder, digits, tmp_path):
    # two passes over the same rollouts: ratios leave 1, so that clipping and importance weights are in play
    fields = PO_OBJECTIVES[objective] | {"num_iterations": 2}
    generations = []
    stock = train(GRPOTrainer, tiny_model_folder, digits, tmp_path / "stock", fields)
    ours = train(
        ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path / "ours", fields, on_generation=generations.append
    )
    assert len(stock[0]) == 8  # 4 optimiser steps of 2 micro-batches
    assert any(loss != 0 for loss in stock[0])
    assert ours[0] == stock[0]
    for name, weight in stock[1].items():
        assert torch.equal(ours[1][name], weight), name
    assert [g.step for g in generations] == [1, 3]  # 4 steps, two per generation
    assert len(generations[0].completions) == 8


def test_with_a_kl_to_the_starting_model_too(tiny_model_folder, digits, tmp_path):
    fields = PO_OBJECTIVES["grpo"] | {"beta": 0.05}
    stock = train(GRPOTrainer, tiny_model_folder, digits, tmp_path / "stock", fields)
    ours = train(ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path / "ours", fields)
    assert ours[0] == stock[0]
    assert all(torch.equal(ours[1][name], weight) for name, weight in stock[1].items())
