"""Interrupted runs through the whole program, on the toy trainer: killed, resumed, side by side."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from composer_core.run.directory import RunDirectory, find_run
from composer_core.run.files import read_jsonl

PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
MARKER = "marker-5f4dcc3b5aa7"
SPEC = """\
version: 1
name: toy
model: {builtin: tiny}
data:
  prompts: {builtin: digits, limit: 5}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train: {steps: 8, prompts_per_step: 2, group_size: 4, max_completion_tokens: 6, learning_rate: 3.0e-3}
backend: {use: toy}
executor: {use: inline, threads: 1}
"""
TIMES = ("time", "step_time", "tokens_per_s")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def start(folder, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "MY_API_KEY": MARKER}
    pipe = subprocess.PIPE
    return subprocess.Popen([*PROGRAM, *arguments], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def composer_run(folder, *arguments, expect=0):
    with start(folder, *arguments) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == expect, err
    return out, err


def lines(run):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_jsonl(run.metrics)]


def weights(run):
    return (run.complete_model() / "model.safetensors").read_bytes()


def test_a_run_in_two_parts_is_the_run_in_one(folder):
    # an odd half, so that the second optimiser step of a generation is still to come
    options = ["train.iterations=2", "checkpoint.every=3"]
    composer_run(folder, "spec.yaml", *options, "--runs", "whole")
    composer_run(folder, "spec.yaml", *options, "train.steps=3", "--runs", "parts")
    out, err = composer_run(folder, "resume", "latest", "train.steps=8", "--runs", "parts")
    assert out.startswith("done: 8 of 8 steps")
    assert "resuming after step 3\n" in err
    whole, parts = (find_run("latest", folder / name) for name in ("whole", "parts"))
    assert lines(parts) == lines(whole)
    assert weights(parts) == weights(whole)
    leaks = [path for path in parts.path.rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]
    assert leaks == []


def test_two_runs_at_once_in_one_folder_do_not_touch_each_other(folder):
    both = [start(folder, "spec.yaml", f"seed={seed}", "train.steps=4") for seed in (1, 1)]
    for process in both:
        _, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
    found = [RunDirectory(path) for path in (folder / "runs").iterdir() if not path.is_symlink()]
    assert len(found) == 2
    assert lines(found[0]) == lines(found[1])
    assert weights(found[0]) == weights(found[1])
    assert (folder / "runs" / "latest").resolve() in [run.path for run in found]


@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments_change_nothing(folder):
    """Whatever the moment: reading the checkpoint, a step, half a checkpoint, the model, the report."""
    options = ["train.steps=200", "checkpoint.every=1", "checkpoint.keep=2"]
    composer_run(folder, "spec.yaml", *options, "--quiet", "--runs", "whole")
    whole = find_run("latest", folder / "whole")
    moments = random.Random(0)
    process = start(folder, "spec.yaml", *options, "--quiet", "--runs", "killed")
    _wait(lambda: list((folder / "killed").glob("latest/checkpoints/step_*/COMPLETE")), process)
    run = find_run("latest", folder / "killed")
    kills = 0
    while kills < 20:
        # half of them early, while a worker still starts and puts lines aside; the others while it trains
        steps_before = len(read_jsonl(run.metrics))
        if moments.random() < 0.5:
            _wait(lambda before=steps_before: len(read_jsonl(run.metrics)) != before, process)
        time.sleep(moments.uniform(0, 0.6))
        pid = json.loads((run.path / "lock.json").read_text())["pid"]
        if process.poll() is None and _is_child(pid, process.pid):
            os.kill(pid, signal.SIGKILL)
            kills += 1
        process.communicate(timeout=120)
        if run.state().state == "done":
            break
        process = start(folder, "resume", "latest", "--quiet", "--runs", "killed")
        _wait(lambda p=process: _is_child(json.loads((run.path / "lock.json").read_text())["pid"], p.pid), process)
    _, err = process.communicate(timeout=280)
    assert run.state().state == "done", err
    assert kills == 20, f"the run was done after {kills} kills: make it longer"
    assert lines(run) == lines(whole)
    assert weights(run) == weights(whole)
    assert not (run.path / "scratch").exists()


def _is_child(pid, parent):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1]) == parent
    except FileNotFoundError:
        return False


def _wait(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        if process.poll() is not None:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)
