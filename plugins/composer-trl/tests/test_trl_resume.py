"""2N steps are N steps, a resume, and N steps: to the last bit of weights and metrics. Evaluation leaves no trace."""

import json

import pytest
import torch

from composer_core.plugins.registry import Registry
from composer_core.run import worker
from composer_core.run.directory import create_run
from composer_core.run.files import read_jsonl
from composer_core.run.resume import plan_resume, write_resume
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

SPEC = """\
version: 1
name: t
model: {builtin: tiny}
data:
  prompts: {builtin: digits, limit: 6}        # three steps once through the data
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train: {steps: 8, prompts_per_step: 2, group_size: 4, micro_batch: 4, max_completion_tokens: 8, learning_rate: 3.0e-3}
checkpoint: {every: 8, keep: 9}
backend: {use: trl}
"""
TIMES = ("time", "tokens_per_s")


@pytest.fixture
def train(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)

    def run(*overrides, expect=0):
        registry = Registry.discover()
        loaded = load_spec(tmp_path / "spec.yaml", registry, overrides=overrides)
        directory = create_run(tmp_path / "runs", "t")
        directory.write_json("plan.json", make_plan(loaded, registry).to_json())
        assert worker.main([str(directory.plan), "--quiet"]) == expect
        return directory

    return run


def resume(directory, *overrides):
    planned = plan_resume(directory, Registry.discover(), overrides)
    write_resume(directory, planned)
    assert worker.main([str(directory.plan), "--quiet", "--resume", str(planned.step)]) == 0


def lines(directory):
    return [
        {name: value for name, value in line.items() if name not in TIMES and "step_time" not in name}
        for line in read_jsonl(directory.metrics)
    ]


def weights(directory):
    (file,) = (directory.path / "model").glob("*.safetensors")
    return file.read_bytes()


PAIR = {
    "state_id": "s", "messages": [{"role": "user", "content": "2+2"}], "n_agreeing": 1, "teachers": ["t"], "meta": {},
    "chosen": {"role": "assistant", "content": "4"}, "rejected": {"role": "assistant", "content": "five"}, "ref": None,
}  # fmt: skip
SDPO = "{use: sdpo, weight: 1.0, success: 2.0, teacher: self-ema, target: {use: taid, steps: 8}}"
REPLAY = "{use: replay, weight: 0.3, variant: simpo, pairs_per_step: 2}"
CHANNELS = [f"loss.channels=[{SDPO}, {REPLAY}]", "data.pairs={path: pairs.jsonl}"]
LORA = ["model.lora={rank: 4, dropout: 0.1}", "train.learning_rate=0.05"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "overrides"),
    [
        # in the middle of the second round through the data: its order comes from a generator that trl makes anew
        (4, []),
        # at the very end of a round
        (3, []),
        # two optimiser steps per generation, between the first and the second
        (3, ["train.iterations=2"]),
        (4, ["train.iterations=2", *LORA]),
        (5, ["loss.objective.kl_coef=0.1", "train.warmup_steps=4"]),
        # a moving average, TAID's schedule, the place among the pairs; rows wait in the generation that is under way
        (3, ["train.iterations=2", *CHANNELS]),
        (4, [*CHANNELS, "train.learning_rate=0.01", "model.lora={rank: 4}"]),
        # the core's own objective, and an advantage that has the KL in it
        (3, ["loss.objective={use: composer2}", "train.iterations=2", *CHANNELS]),
    ],
    ids=["mid-round", "end-of-round", "mid-generation", "lora", "kl-and-warm-up", "channels", "channels-lora", "core"],
)
def test_a_resumed_run_ends_as_if_it_had_never_stopped(train, tmp_path, half, overrides):
    pairs = [{**PAIR, "state_id": f"s{i}", "chosen": {"role": "assistant", "content": str(i)}} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    whole = train(*overrides)
    parts = train(*overrides, f"train.steps={half}")
    resume(parts, "train.steps=8")
    assert [line["step"] for line in lines(parts)] == list(range(1, 9))
    assert lines(parts) == lines(whole)
    assert weights(parts) == weights(whole)


@pytest.mark.slow
def test_new_intervals_of_log_and_checkpoint_hold_after_a_resume(train):
    parts = train("train.steps=2")
    resume(parts, "train.steps=8", "train.log_every=2", "checkpoint.every=3")
    assert [step for step, _ in parts.complete_checkpoints()] == [2, 3, 6, 8]
    # 3 is logged because it is saved
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3], ids=["one-each", "three-each"])
def test_evaluation_leaves_no_trace_in_training(train, tmp_path, group):
    held_out = [{"prompt": f"n{i}"} for i in range(5)]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    plain = train("train.steps=5", "train.iterations=2")
    evaluated = train(
        "train.steps=5", "train.iterations=2", f"data.eval={{path: held-out.jsonl, every: 2, group_size: {group}}}"
    )
    found = lines(evaluated)
    names = {"eval/reward/mean", "eval/reward/std", "eval/rewards/regex"}
    # every second step, and after the last
    assert [line["step"] for line in found if names <= set(line)] == [2, 4, 5]
    assert [{k: v for k, v in line.items() if k not in names} for line in found] == lines(plain)
    assert weights(evaluated) == weights(plain)


def broken_at(step):
    """A loss that is NaN in one step, as an overflow would make it."""

    def compute(self, model, inputs):
        loss = compute.stock(self, model, inputs)
        return loss * float("nan") if self.state.global_step + 1 == step and model.training else loss

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_applied_and_the_one_before_is_saved(train, monkeypatch, what):
    from trl import GRPOTrainer

    whole = train("train.steps=5", "train.iterations=2")
    with monkeypatch.context() as patched:
        if what == "loss":
            compute = broken_at(4)
            compute.stock = GRPOTrainer._compute_loss
            patched.setattr(GRPOTrainer, "_compute_loss", compute)
        else:
            stock = GRPOTrainer._clip_grad_norm
            patched.setattr(
                GRPOTrainer,
                "_clip_grad_norm",
                lambda self, model: torch.tensor(torch.inf) if self.state.global_step == 3 else stock(self, model),
            )
        run = train("train.steps=5", "train.iterations=2", expect=5)
    said = "the loss is nan at step 4" if what == "loss" else "the gradient norm is inf at step 4"
    assert (run.state().state, run.state().reason) == ("stopped", said)
    assert [step for step, _ in run.complete_checkpoints()] == [3]
    assert not (run.path / "model").exists()
    # from there it goes on as if nothing had happened
    resume(run)
    assert lines(run) == lines(whole)
    assert weights(run) == weights(whole)


def test_a_place_between_two_steps_says_what_trl_forgets(tiny_model_folder, digits, tmp_path):
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from composer_trl.backend import rows_dataset
    from composer_trl.trainer import ComposerGRPOTrainer

    config = GRPOConfig(
        output_dir=str(tmp_path), bf16=False, report_to="none", num_generations=2, num_iterations=2, max_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_completion_length=4, use_cpu=True,
    )  # fmt: skip
    trainer = ComposerGRPOTrainer(
        model=str(tiny_model_folder),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=rows_dataset(digits),
        processing_class=AutoTokenizer.from_pretrained(tiny_model_folder, padding_side="left"),
    )
    assert trainer.place()["buffer"] is None
    trainer.train()
    place = trainer.place()
    assert place["micro_step"] == 2  # one step of two micro-batches, of four that share a generation
    assert [batch["completion_ids"].shape[0] for batch in place["buffer"]] == [2, 2]
