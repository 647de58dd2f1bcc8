"""examples/ablation: its task and hints, its arithmetic, its arms, and one seed of it through the whole program."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_core.channels.hinting import Hinting
from composer_core.channels.settings import HintSettings
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText
from composer_core.run.files import read_jsonl
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

ABLATION = Path(__file__).parents[2] / "examples" / "ablation"
START = ABLATION / "start"
START_SEED = 1
MODULES = ("task", "sft", "prepare", "results", "report")


@pytest.fixture(scope="module")
def ablation():
    """The example's modules, which import each other by plain names."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ABLATION)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def tokenizer():
    from composer_core.hf.models import load_tokenizer

    return load_tokenizer(START / "model")


# -- the task ----------------------------------------------------------------------------------------------------------


def test_keys_are_secret_or_public_and_no_letter_of_a_value(ablation):
    task = ablation.task.make_task(3)
    assert len(task.secrets) == 16
    assert sorted([*task.secrets, *task.public]) == sorted(ablation.task.KEYS)
    assert len(set(ablation.task.VALUES)) == 64
    assert not set("".join(ablation.task.VALUES)) & set(ablation.task.KEYS)
    assert ablation.task.make_task(3) == task
    assert ablation.task.make_task(4) != task


def test_prompts_are_those_of_the_chat_template(ablation, tokenizer):
    texts = ablation.task.Texts(tokenizer)
    for told in (None, "it is cd"):
        messages = [{"role": "user", "content": text} for text in ("A=?", told) if text is not None]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert texts.prompt("A", told) == rendered


def test_the_channel_puts_a_hint_where_the_start_model_has_learnt_to_read_it(ablation, tokenizer):
    texts = ablation.task.Texts(tokenizer)
    rollout = RolloutText(
        uid="0",
        prompt_ids=texts.prompt("A"),
        completion_ids=texts.answer("ab"),
        action=[True] * 3,
        reward=0.0,
        columns={"prompt": [{"role": "user", "content": "A=?"}], "hint": "it is cd"},
        tokenizer=tokenizer,
    )
    row = Hinting(HintSettings(column="hint"), success=1.0).row(rollout)
    assert row["teacher_ids"] == [*texts.prompt("A", "it is cd"), *texts.answer("ab")]
    assert row["student"] == [6, 7, 8]  # behind <|user|>, A, =, ?, <|end|>, <|assistant|>


def test_hints_say_as_much_as_their_kind(ablation):
    import random

    rng = random.Random(0)
    for _ in range(20):
        assert "cd" in ablation.task.hint("full", "cd", rng)
        assert ablation.task.hint("partial", "cd", rng).endswith("c?")
        assert ablation.task.hint("void", "cd", rng) in ablation.task.VOID


# -- what the runs start from ------------------------------------------------------------------------------------------


def test_the_stored_model_knows_the_dictionary_reads_hints_and_guesses_secrets(ablation, tokenizer):
    from composer_core.hf.models import load_policy

    measures = ablation.task.Measures(ablation.task.make_task(START_SEED), ablation.task.Texts(tokenizer))
    found = measures.measure(load_policy(START / "model", dtype="float32"))
    assert found.known > 0.97
    assert found.follows > 0.97
    assert found.reward == pytest.approx(1 / 64, abs=0.004)


def test_the_stored_prompts_have_every_kind_of_hint(ablation):
    task = ablation.task.make_task(START_SEED)
    rows = read_jsonl(START / "prompts.jsonl")
    assert {row["prompt"][0]: row["answer"] for row in rows} == task.secrets
    assert all(row["answer"] in row["hint"] for row in rows)
    assert [row["half_hint"] for row in rows] == [row["hint"] for row in rows[:8]] + [None] * 8
    told = [value for row in rows for value in ablation.task.VALUES if value in row["wrong_hint"].split()]
    assert len(told) == 16
    assert all(value != row["answer"] for value, row in zip(told, rows, strict=True))
    assert {row["void_hint"] for row in rows} <= set(ablation.task.VOID)


def test_the_stored_pairs_are_of_teachers_as_right_as_they_should_be(ablation):
    task = ablation.task.make_task(START_SEED)
    pairs, half, wrong = (read_jsonl(START / f"{name}pairs.jsonl") for name in ("", "half-", "never-right-"))
    right = [pair["chosen"]["content"] == task.secrets[pair["state_id"][0]] for pair in pairs]
    assert 0.85 < sum(right) / len(right) < 0.95
    unhinted = [row["prompt"] for row in read_jsonl(START / "prompts.jsonl") if row["half_hint"] is None]
    assert half == [pair for pair in pairs if pair["messages"][0]["content"] in unhinted]
    assert not any(pair["chosen"]["content"] == task.secrets[pair["state_id"][0]] for pair in wrong)
    # three tokens, of which the start model guesses two letters
    assert all(-8 < pair["ref"]["chosen"] < -2 for pair in pairs)


def test_the_same_seed_teaches_the_same_weights(ablation, tmp_path):
    from safetensors.torch import load_file

    task = ablation.task.make_task(0)
    for name in ("a", "b"):
        ablation.sft.write_start_model(tmp_path / name, task, seed=0, steps=2)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all((a[key] == b[key]).all() for key in a)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_costs_count_every_token_that_is_read(ablation):
    results = ablation.results
    sizes = results.Sizes(prompt=6, hint=10.0, sequences=4, pairs=2, sides=2, kl=True)
    line = {
        "step_time": 0.25,
        "upstream/completions/mean_length": 3.0,
        "active/sdpo": 0.5,  # 2 of 4 rollouts, 6 tokens
        "tokens/sdpo": 6.0,
        "active/replay": 1.0,
        "tokens/replay": 12.0,
    }
    # policy and reference: 2 x 4 x (6 + 3); teacher: 2 x (6 + 10) + 6; pairs: 2 x (2 x 6) + 12
    assert results.costs_of([line, line], sizes, teacher_answers=7) == results.Costs(24, 2 * (72 + 38 + 36), 7, 0.5)
    imitation = results.Sizes(prompt=6, hint=0.0, sequences=4, pairs=2, sides=1, kl=False)
    plain = {key: value for key, value in line.items() if "sdpo" not in key}
    assert results.costs_of([plain], imitation, teacher_answers=0).forward_tokens == 36 + 12 + 6


def outcome(ablation, arm, seed, goal):
    """Reaches 0.8 at step `goal`, or never."""
    reached = [(0, 0.02), (5, 0.1), (goal, 0.85)] if goal else [(0, 0.02), (5, 0.6)]
    measured = ablation.task.Measured(0.8, 0.5, 0.9)
    costs = ablation.results.Costs(1000, 2000, 0, 3.0)
    return ablation.results.Outcome(arm, seed, "", reached, measured, measured, costs)


def outcomes(ablation, **steps):
    return [
        outcome(ablation, arm.replace("_", "-"), seed, goal)
        for arm, goals in steps.items()
        for seed, goal in enumerate(goals)
    ]


def test_medians_are_compared_with_the_better_learning_rate(ablation):
    made = outcomes(ablation, grpo_2e_4=[200, 300, 0], grpo_4e_4=[250, 260, 500], sdpo=[130, 100, 150])
    rows = {row.arm: row for row in ablation.results.rows(made)}
    assert (rows["grpo-2e-4"].goal, rows["grpo-2e-4"].goals) == (300, [200, 300, math.inf])
    assert rows["sdpo"].ratio == 130 / 260
    assert rows["grpo-2e-4"].half_way == 200  # 200, 300, 5
    half, per_seed = ablation.results.checks(made)
    assert (half.says, half.found, half.met) == ("sdpo: median steps <= 0.5x", "0.50x", True)
    # 130/200, 100/260, 150/500
    assert per_seed.found == "2 of 3: 0.30x, 0.38x, 0.65x"
    assert not per_seed.met


def test_a_control_that_never_gets_there_has_met_its_target(ablation):
    made = outcomes(ablation, grpo_4e_4=[200], wrong_hint=[0], void_hint=[170])
    assert [(check.found, check.met) for check in ablation.results.checks(made)] == [("never", True), ("0.85x", False)]
    assert ablation.results.checks(outcomes(ablation, sdpo=[100])) == []  # nothing to compare with


def test_there_is_no_ratio_to_what_never_happened(ablation):
    made = outcomes(ablation, grpo_4e_4=[0, 0], sdpo=[100, 0], wrong_hint=[0, 0])
    median, per_seed, wrong = ablation.results.checks(made)
    assert (median.found, median.met) == ("neither got there", False)
    assert (per_seed.found, per_seed.met) == ("1 of 2: GRPO never, neither got there", False)
    assert (wrong.found, wrong.met) == ("neither got there", False)
    assert [ablation.report.cells(row)[4] for row in ablation.results.rows(made)] == ["-", "-", "-"]


def test_the_report_shows_what_was_not_reached(ablation, tmp_path):
    made = outcomes(ablation, grpo_4e_4=[200], sdpo=[80], wrong_hint=[0])
    ablation.report.write_report(made, tmp_path, machine="here")
    table = (tmp_path / "report.md").read_text()
    assert "| wrong-hint | 1 | 5 | - (-) | - | 0.60 |" in table
    assert "| sdpo | 1 | 80 | 80 (80) | 0.40 | 0.85 | 1.0k | 2k | 0 | 3.0 | 0.50 | 0.90, 0.90 |" in table
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2  # full coverage, controls
    assert "MISSED" not in page


def test_an_outcome_is_read_as_it_was_written(ablation, tmp_path):
    made = outcome(ablation, "sdpo", 1, 80)
    made.save(tmp_path / "outcome.json")
    assert ablation.results.Outcome.load(tmp_path / "outcome.json") == made


# -- the arms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", sorted(path.stem for path in (ABLATION / "arms").glob("*.yaml")))
def test_every_arm_can_be_planned_as_it_stands(arm):
    registry = Registry.discover()
    loaded = load_spec(ABLATION / "arms" / f"{arm}.yaml", registry)
    assert loaded.spec.name == arm
    assert make_plan(loaded, registry).spec["backend"]["use"] == "trl"


@pytest.mark.slow
def test_hints_get_one_seed_to_half_of_the_reward_before_grpo_is_near(tmp_path):
    pytest.importorskip("trl")
    shutil.copytree(START, tmp_path / "out" / f"seed-{START_SEED}")
    command = [sys.executable, ABLATION / "run.py", "--arms", "grpo-4e-4,sdpo", "--seeds", str(START_SEED)]
    more = ["--out", tmp_path / "out", "--set", "train.steps=120", "--json"]
    environment = {**os.environ, "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *more], env=environment, capture_output=True, text=True, check=False, timeout=900
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a target is missed, as GRPO does not get to 0.8 in 120 steps
    grpo, sdpo = json.loads(done.stdout)["rows"]
    assert (grpo["arm"], sdpo["arm"]) == ("grpo-4e-4", "sdpo")
    assert sdpo["half_way"] <= 120
    assert grpo["best"] < 0.4
    assert sdpo["follows"] > 0.5  # it still reads hints
