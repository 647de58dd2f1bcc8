"""Both channels through the whole program: hints from a data column, pairs from a file, on the toy trainer."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

SPEC = """\
version: 1
name: channels
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: exact-match, extract: whole}]
  pairs: {path: pairs.jsonl}
loss:
  objective: {use: dr-grpo}
  channels:
    - {use: sdpo, weight: 1.0, hints: {column: tip, at: prompt-end}, target: {use: taid, start: 0.5}}
    - {use: replay, weight: 0.5, variant: simpo, pairs_per_step: 3}
train: {steps: 4, prompts_per_step: 2, group_size: 2, max_completion_tokens: 6, learning_rate: 1.0e-3}
checkpoint: {every: 2}
backend: {use: toy}
executor: {use: inline, threads: 1}
"""
PAIR = {"n_agreeing": 2, "teachers": ["a", "b"], "ref": None, "meta": {}}


def _write(folder, spec=SPEC):
    (folder / "spec.yaml").write_text(spec)
    prompts = [{"prompt": f"n{i}", "answer": str(i), "tip": f"It is {i}."} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    pairs = [
        {
            **PAIR,
            "state_id": str(i),
            "messages": [{"role": "user", "content": f"n{i}"}],
            "chosen": {"role": "assistant", "content": str(i)},
            "rejected": {"role": "assistant", "content": "none"},
        }
        for i in range(5)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def _run(folder):
    program = "import sys; from composer_core.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-c", program, "spec.yaml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_both_channels_train_and_log_what_they_did(tmp_path):
    pytest.importorskip("transformers")
    _write(tmp_path)
    done = _run(tmp_path)
    assert done.returncode == 0, done.stderr
    run = find_run("latest", tmp_path / "runs")
    metrics = read_jsonl(run.metrics)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for line in metrics:
        assert line["active/sdpo"] == 1.0  # a random model never answers right
        assert line["active/replay"] == 1.0
        assert line["tokens/replay"] == 3 * (1 + 4) + 6  # digit and `none`, each with its end token
        assert line["grad_norm/sdpo"] > 0
        assert line["grad_norm/replay"] > 0
        assert line["loss/total"] == pytest.approx(
            line["loss/policy"] + line["loss/sdpo"] + 0.5 * line["loss/replay"], rel=1e-5
        )
        assert "sdpo/hint_gain" in line
    # the first update only remembers the loss, then t follows the line of steps / 4
    assert [line["sdpo/t"] for line in metrics] == pytest.approx([0.5, 0.5, 0.75, 0.875], abs=2e-3)
    assert metrics[-1]["loss/replay"] < metrics[0]["loss/replay"]
    (fed,) = [event for event in read_jsonl(run.events) if event["event"] == "pairs"]
    assert (fed["read"], fed["kept"], fed["dropped"]) == (5, 5, {})


@pytest.mark.slow
def test_pairs_that_are_not_there_end_the_run_before_the_first_step(tmp_path):
    pytest.importorskip("transformers")
    _write(tmp_path, SPEC.replace("  pairs: {path: pairs.jsonl}\n", ""))
    done = _run(tmp_path)
    assert done.returncode == 2
    assert (
        "data.pairs: channel 'replay' learns from preference pairs, and the spec names no file of them" in done.stderr
    )
