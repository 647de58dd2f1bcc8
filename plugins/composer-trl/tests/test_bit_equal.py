"""With the same GRPOConfig and channels of weight 0 the subclass is the stock trainer, to the last bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
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


class Hinted(Sdpo):
    """Every completion, behind a hint at the end of its prompt."""

    def prepare(self, rollout):
        own, begin = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
        tokens = range(begin, len(own))
        hinted = [*rollout.prompt_ids, 90, 91, *rollout.completion_ids]
        return pack([Segment(hinted, tokens, [at + 2 for at in tokens])], rollout)


def both_channels(weight, *, teacher="self-frozen"):
    sdpo, replay = SdpoSettings(teacher=teacher), ReplaySettings(pairs_per_step=3)
    pairs = Replay(replay)
    pairs.take_pairs([pair_row([10], [40 + i], [50, 51], reference=(-4.0, -9.0)) for i in range(4)])
    channels = [
        ActiveChannel("sdpo", weight, Hinted(sdpo), sdpo_needs(sdpo)[0]),
        ActiveChannel("replay", weight, pairs, replay_needs(replay)[0]),
    ]
    return CompositeLoss(channels, None)


def train(base, folder, rows, out, fields, *, model=None, **extra):
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
        model if model is not None else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
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
        ComposerGRPOTrainer,
        tiny_model_folder,
        digits,
        tmp_path / "ours",
        fields,
        loss=both_channels(0.0),
        on_generation=generations.append,
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


@pytest.mark.parametrize("teacher", ["self-frozen", "self-live", "self-ema"])
def test_channels_that_weigh_next_to_nothing_change_no_bit_either(teacher, tiny_model_folder, digits, tmp_path):
    # they run whole, teacher and pairs included, and what they add is lost beside every bit of the stock loss: so the
    # policy's forward, its random numbers and its gradient are TRL's own
    fields = PO_OBJECTIVES["dapo"] | {"num_iterations": 2}
    stock = train(GRPOTrainer, tiny_model_folder, digits, tmp_path / "stock", fields)
    loss = both_channels(1e-30, teacher=teacher)
    ours = train(ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path / "ours", fields, loss=loss)
    assert any(value != 0 for value in stock[0])
    # a micro-batch of equal rewards has a stock loss of 0, beside which nothing is lost
    assert [0.0 if abs(value) < 1e-25 else value for value in ours[0]] == stock[0]
    assert all(torch.equal(ours[1][name], weight) for name, weight in stock[1].items())


def test_an_evaluation_between_steps_changes_no_bit_of_a_run_with_channels(tiny_model_folder, digits, tmp_path):
    fields, runs = PO_OBJECTIVES["dapo"], []
    held_out = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    for out, more, extra in (("without", {}, {}), ("with", held_out, {"eval_dataset": rows_dataset(digits[:4])})):
        loss = both_channels(0.5, teacher="self-ema")
        runs.append(
            train(ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path / out, fields | more, loss=loss, **extra)
        )
    assert runs[1][0] == runs[0][0]
    assert all(torch.equal(runs[1][1][name], weight) for name, weight in runs[0][1].items())


@pytest.mark.parametrize("teacher", ["self-frozen", "self-ema"])
def test_channels_leave_nothing_behind_in_the_model(teacher, tiny_model_folder, digits, tmp_path):
    fields = PO_OBJECTIVES["dapo"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    loss = both_channels(0.5, teacher=teacher)
    train(ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path / "first", fields, model=model, loss=loss)
    assert hooks(model) == []
    # the weights are those it came with, not a teacher's
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == own

    model.save_pretrained(tmp_path / "saved")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    # both trainers patch `forward`: the model that was trained before must train on like the one read from disk
    on = train(GRPOTrainer, tiny_model_folder, digits, tmp_path / "on", fields, model=model)
    fresh = train(GRPOTrainer, tiny_model_folder, digits, tmp_path / "fresh", fields, model=read)
    assert on[0] == fresh[0]
    assert all(torch.equal(on[1][name], weight) for name, weight in fresh[1].items())


def test_an_error_in_a_loss_leaves_no_hook(tiny_model_folder, digits, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    loss = both_channels(0.5)

    def broken(view, batch):
        view.divergence(batch.hints, loss.active[0].channel.divergences(1)[0], teacher="teacher")
        raise KeyError("a mistake in a channel")

    loss.active[0].channel.loss = broken
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError, match="a mistake in a channel"):
        train(ComposerGRPOTrainer, tiny_model_folder, digits, tmp_path, PO_OBJECTIVES["dapo"], model=model, loss=loss)
    assert hooks(model) == []
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == own


def hooks(model):
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]
