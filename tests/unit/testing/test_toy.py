"""The toy trainer in process, on a run context that keeps everything in memory; from outside it is tests/contract/."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from composer_core.errors import SpecError
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_derive import derive_toy
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, ToySettings
from composer_core.plugins.contributions import Kind
from composer_core.plugins.settings import NoSettings
from composer_core.run.context import Checkpoint, NamedReward
from composer_core.run.state import load_state
from composer_core.spec.model import Plugged, RunSpec
from composer_core.testing.fakes import Brevity
from composer_core.testing.toy import ToyBackend

END = 1
"""The tiny model's end token."""


def _digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


class Memory:
    """A `RunContext` for tests."""

    upstream = {}
    is_main = True
    resume_from = None
    held_out = ()
    """Rows of `eval_prompts`."""

    def __init__(
        self,
        folder,
        tmp_path,
        *,
        preset="grpo",
        objective=None,
        reward=_digits,
        stop_after=None,
        every=None,
        held_out=None,
        **train,
    ):
        settings = OBJECTIVE_SETTINGS[preset](**(objective or {}))
        train = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8} | train
        digits = Plugged(Kind.REWARD, "digits", "test 0", NoSettings())
        self.spec = RunSpec(
            version=1,
            name="toy",
            model={"path": str(folder)},
            data={
                "prompts": {"builtin": "digits"},
                "rewards": [digits],
                "eval": held_out,
            },
            checkpoint={"every": every},
            loss={"objective": Plugged(Kind.OBJECTIVE, preset, "test 0", settings)},
            train=train,
            backend=Plugged(Kind.BACKEND, "toy", "test 0", ToySettings()),
            executor=Plugged(Kind.EXECUTOR, "inline", "test 0", InlineSettings()),
        )
        self.objective = PolicyObjective(PRESETS[preset], settings)
        self.rewards = [NamedReward("digits", 1.0, reward)]
        self.folder, self.tmp_path, self.stop_after = folder, tmp_path, stop_after
        self.lines, self.samples, self.saved = [], [], []

    def model_folder(self):
        return self.folder

    def prompts(self):
        return [{"prompt": f"n{i}", "target": str(i)} for i in range(5)]

    def eval_prompts(self):
        return list(self.held_out)

    def log_step(self, step, metrics):
        self.lines.append({"step": step, **metrics})

    def log_rollouts(self, step, samples):
        self.samples += samples

    def stop_reason(self):
        return "enough" if self.stop_after is not None and len(self.lines) >= self.stop_after else None

    @contextmanager
    def checkpoint(self, step):
        folder = self.tmp_path / f"step_{step}"
        folder.mkdir(exist_ok=True)
        yield folder
        self.saved.append(folder.name)

    @contextmanager
    def trained_model(self):
        folder = self.tmp_path / "model"
        folder.mkdir()
        yield folder
        self.saved.append("model")


@pytest.fixture
def make(tiny_model_folder, tmp_path):
    return lambda **options: Memory(tiny_model_folder, tmp_path, **options)


def _train(run, *channels):
    return ToyBackend(ToySettings()).train(run, CompositeLoss(channels, run.objective))


def test_it_learns_to_write_digits(make):
    run = make(steps=30, prompts_per_step=4, group_size=16, learning_rate=3e-3)
    _train(run)
    rewards = [line["reward/mean"] for line in run.lines]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.7


def test_the_second_pass_over_the_same_rollouts_is_off_policy(make):
    run = make(steps=4, iterations=2, learning_rate=3e-3)
    _train(run)
    first, second, third, _ = run.lines
    assert first["reward/mean"] == second["reward/mean"] != third["reward/mean"]
    # the ratio is 1 in a first pass, so the loss is minus the mean advantage: 0
    assert first["loss/policy"] == pytest.approx(0.0, abs=1e-6)
    assert abs(second["loss/policy"]) > 1e-4


class Seen(Brevity):
    """A channel that keeps the rollouts it was given."""

    def __init__(self):
        self.rollouts = []

    def loss(self, view, batch):
        self.rollouts.append(batch.rollouts)
        return super().loss(view, batch)


@pytest.mark.parametrize(("preset", "dropped"), [("dapo", True), ("grpo", False)])
def test_truncated_completions_are_left_out_where_the_objective_says_so(make, preset, dropped):
    channel = Seen()
    # most completions of a random model are truncated after 20 tokens, some are not
    _train(make(preset=preset, steps=1, group_size=16, max_completion_tokens=20), ActiveChannel("seen", 1.0, channel))
    ended_ones = 0
    for rollouts in channel.rollouts:
        sequences = rollouts.seqs.lengths.tolist()
        for ids, action in zip(rollouts.seqs.ids.split(sequences), rollouts.action.split(sequences), strict=True):
            ended = ids[-1].item() == END
            ended_ones += ended
            assert bool(action.any()) == (ended or not dropped)
            assert action[:2].tolist() == [False, False]  # the prompt, such as n3
    assert 0 < ended_ones < 32


def test_a_stop_request_ends_it_after_the_step_with_a_checkpoint_and_the_model(make):
    run = make(steps=50, stop_after=2)
    result = _train(run)
    assert (result.steps, result.stopped) == (2, "enough")
    assert run.saved == ["step_2", "model"]


def test_rollouts_without_a_reward_do_not_train(make):
    run = make(steps=1, reward=lambda completions, **columns: [None] * len(completions))
    _train(run)
    assert run.lines[0]["grad_norm"] == 0
    assert {sample.rewards["digits"] for sample in run.samples} == {None}
    assert {sample.advantage for sample in run.samples} == {0.0}


def test_the_same_seed_gives_the_same_run(make, tiny_model_folder, tmp_path):
    twice = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run = Memory(tiny_model_folder, tmp_path / name)
        _train(run)
        twice.append([{k: v for k, v in line.items() if k not in ("step_time", "tokens_per_s")} for line in run.lines])
    assert twice[0] == twice[1]


def _lines(run):
    return [{k: v for k, v in line.items() if k not in ("step_time", "tokens_per_s")} for line in run.lines]


def _weights(tmp_path):
    return load_file(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize(("half", "iterations"), [(2, 1), (3, 2)], ids=["on-policy", "mid-generation"])
def test_steps_in_two_parts_are_those_in_one(tiny_model_folder, tmp_path, half, iterations):
    options = {"iterations": iterations, "learning_rate": 3e-3}
    runs = {}
    for name, steps in (("whole", 5), ("first", half), ("second", 5)):
        (tmp_path / name).mkdir()
        run = runs[name] = Memory(tiny_model_folder, tmp_path / name, steps=steps, every=half, **options)
        if name == "second":
            run.resume_from = Checkpoint(half, tmp_path / "first" / f"step_{half}")
        _train(run, ActiveChannel("brevity", 0.01, Brevity()))
    assert _lines(runs["first"]) + _lines(runs["second"]) == _lines(runs["whole"])
    whole, parts = (_weights(tmp_path / name) for name in ("whole", "second"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_evaluation_leaves_no_trace_in_training(tiny_model_folder, tmp_path):
    runs = []
    for name, held_out in (("plain", None), ("evaluated", {"builtin": "digits", "every": 2, "group_size": 3})):
        (tmp_path / name).mkdir()
        run = Memory(tiny_model_folder, tmp_path / name, steps=3, iterations=2, held_out=held_out)
        run.held_out = [{"prompt": f"n{i}"} for i in range(3)]
        _train(run)
        runs.append(run)
    plain, evaluated = map(_lines, runs)
    names = {"eval/reward/mean", "eval/reward/std", "eval/rewards/digits"}
    assert [line["step"] for line in evaluated if names <= set(line)] == [2, 3]
    assert [{k: v for k, v in line.items() if k not in names} for line in evaluated] == plain
    first, second = (_weights(tmp_path / name) for name in ("plain", "evaluated"))
    assert all(torch.equal(first[name], second[name]) for name in first)


class Overflow(Brevity):
    """Not finite from a step on."""

    def __init__(self, step):
        self.step = step

    def loss(self, view, batch):
        term = super().loss(view, batch)
        return replace(term, sum=term.sum * (torch.inf if batch.step >= self.step else 1.0))


def test_a_step_that_is_not_finite_is_not_applied_and_the_one_before_is_saved(tiny_model_folder, tmp_path):
    for name, channel in (("sound", Brevity()), ("bad", Overflow(3))):
        (tmp_path / name).mkdir()
        run = Memory(tiny_model_folder, tmp_path / name, steps=2 if name == "sound" else 9, every=2)
        result = _train(run, ActiveChannel("brevity", 0.01, channel))
    assert result.steps == 2
    assert result.stopped.startswith("the loss of 'brevity' is ")
    assert run.lines[-1]["step"] == 2
    sound, bad = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("sound", "bad"))
    assert all(torch.equal(sound[name], bad[name]) for name in sound)
    places = [load_state(tmp_path / name / "step_2", "toy") for name in ("sound", "bad")]
    assert torch.equal(places[0]["generator"], places[1]["generator"])
    assert places[0]["prompts"]["order"] == places[1]["prompts"]["order"]


def test_a_kl_pulls_towards_the_starting_model(make):
    run = make(steps=2, objective={"kl_coef": 0.5}, learning_rate=3e-3)
    _train(run)
    assert run.lines[0]["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert run.lines[1]["policy/kl"] > 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_p", 0.9), ("top_k", 5), ("schedule", "cosine"), ("warmup_steps", 1), ("gradient_checkpointing", True)],
)
def test_what_it_would_have_to_ignore_is_refused_by_the_plan(make, key, value):
    with pytest.raises(SpecError) as caught:
        derive_toy(make(**{key: value}).spec)
    assert str(caught.value) == (
        f"train.{key}: the toy trainer does not have this\n  fix: leave it out, or use another backend"
    )


def test_two_ranks_share_the_prompts_compare_over_all_and_end_with_the_same_weights(tiny_model_folder, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(tmp_path), str(tiny_model_folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (tmp_path / str(rank) for rank in (0, 1))
    assert (first / "lines.json").read_text() == (second / "lines.json").read_text()
    assert (first / "prompts.json").read_text() != (second / "prompts.json").read_text()
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _as_rank(folder, model, rank):
    """One of two processes; the second is asked to stop after two steps, and both must."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    own = Path(folder) / str(rank)
    own.mkdir()
    run = Memory(Path(model), own, steps=4, objective={"scale_rewards": "batch"}, stop_after=2 if rank == 1 else None)
    result = _train(run, ActiveChannel("brevity", 0.01, Brevity()))
    assert result.steps == 2
    lines = [{k: v for k, v in line.items() if k not in ("step_time", "tokens_per_s")} for line in run.lines]
    (own / "lines.json").write_text(json.dumps(lines))
    (own / "prompts.json").write_text(json.dumps([sample.prompt for sample in run.samples]))
    dist.destroy_process_group()


if __name__ == "__main__":
    _as_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
