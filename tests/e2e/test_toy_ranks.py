"""The toy trainer in two processes, through the whole program: stopped half-way, it ends as if it had not been."""

import os
import subprocess
import sys

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

SPEC = """\
version: 1
name: two
model: {builtin: tiny}
data:
  prompts: {builtin: digits, limit: 6}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train:
  steps: 4
  prompts_per_step: 2
  group_size: 2
  iterations: 2
  max_completion_tokens: 6
  learning_rate: 3.0e-3
checkpoint: {every: 3}
backend: {use: toy, processes: 2}
executor: {use: inline, threads: 1}
"""
TIMES = ("time", "tokens_per_s", "step_time")


def composer_run(folder, *arguments):
    program = "import sys; from composer_core.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *arguments, "--quiet"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    return find_run("latest", folder / "runs")


def lines(run):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_jsonl(run.metrics)]


@pytest.mark.slow
def test_two_ranks_go_on_bit_for_bit_from_the_middle_of_a_generation(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "spec.yaml").write_text(SPEC)
    whole = composer_run(tmp_path, "spec.yaml")
    parts = composer_run(tmp_path, "spec.yaml", "train.steps=3")
    composer_run(tmp_path, "resume", parts.name, "train.steps=4")
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 4]
    assert lines(parts) == lines(whole)
    models = [(run.path / "model" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert models[0] == models[1]
