"""A spec through the whole program: the toy trainer on the built-in tiny model."""

import os
import subprocess
import sys

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

SPEC = """\
version: 1
name: toy
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: dr-grpo}
train: {steps: 6, prompts_per_step: 2, group_size: 4, max_completion_tokens: 8, learning_rate: 1.0e-3, log_every: 2}
checkpoint: {every: 3}
backend: {use: toy}
executor: {use: inline, threads: 1}
"""


@pytest.mark.slow
def test_a_spec_trains_and_leaves_what_the_readme_promises(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "spec.yaml").write_text(SPEC)
    program = "import sys; from composer_core.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-c", program, "spec.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    run = find_run("latest", tmp_path / "runs")
    assert done.stdout.startswith("done: 6 of 6 steps, reward ")

    metrics = read_jsonl(run.metrics)
    assert [line["step"] for line in metrics] == [2, 4, 6]
    promised = {"reward/mean", "reward/std", "loss/total", "loss/policy", "tokens_per_s", "step_time"}
    assert [promised - set(line) for line in metrics] == [set()] * 3
    assert {line["step"] for line in read_jsonl(run.rollouts)} == {2, 4, 6}
    assert [step for step, _ in run.complete_checkpoints()] == [3, 6]
    assert (run.complete_model() / "model.safetensors").is_file()
    assert run.report.read_text().count("<svg") == 4  # reward, loss, gradient norm, step time
    missing = [
        name for name in run.read_json("plan.json")["files"] if "step_N" not in name and not (run.path / name).exists()
    ]
    assert missing == []
