"""`backend: {use: trl, processes: 2}`: two processes on the CPU, through the whole program."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_core.run.directory import RunDirectory, RunState, find_run
from composer_core.run.files import read_jsonl
from composer_core.run.processes import process_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
SPEC = """\
version: 1
name: two
plugins: [{plugin}]
model: {{builtin: tiny}}
data:
  prompts: {{path: prompts.jsonl}}
  rewards: [{{use: regex, pattern: "[a-m]"}}]
  pairs: {{path: pairs.jsonl}}
  eval: {{path: prompts.jsonl, limit: 5, every: 2}}  # two processes cannot share five equally
loss:
  objective: {{use: grpo}}
  channels:
    - {{use: sdpo, weight: 1.0, on: all, hints: {{column: tip, at: prompt-end}}}}
    - {{use: replay, weight: 0.5, variant: simpo, pairs_per_step: 3}}
train:
  steps: 3
  prompts_per_step: 4
  group_size: 2
  micro_batch: 2
  max_completion_tokens: 8
  learning_rate: 1.0e-3
backend: {{use: {backend}, processes: {processes}}}
executor: {{use: inline, threads: 1}}
"""
PAIR = {"n_agreeing": 2, "teachers": ["a", "b"], "ref": None, "meta": {}}
TIMEOUT = 280


@pytest.fixture
def write(tmp_path):
    prompts = [{"prompt": f"n{i}", "tip": f"It is {i}."} for i in range(8)]
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
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def spec(*, processes, backend="trl"):
        plugin = Path(__file__).with_name("fixed_sampling.py")
        path = tmp_path / f"{backend}-{processes}.yaml"
        path.write_text(SPEC.format(plugin=plugin, processes=processes, backend=backend))
        return path

    return spec


@pytest.fixture
def start(tmp_path):
    """Start the program; it and its processes are gone in the end."""
    started = []

    def run(*arguments):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def latest(tmp_path):
    return find_run("latest", tmp_path / "runs")


def lines(run):
    noise = ("time", "tokens_per_s", "step_time", "upstream/step_time")
    return [
        {name: value for name, value in line.items() if name not in noise and "profiling" not in name}
        for line in read_jsonl(run.metrics)
    ]


def pids(run):
    return [int(file.read_text()) for file in run.path.glob("pid-?")]


def all_gone(run):
    found, until = pids(run), time.monotonic() + 20
    while any(process_start(pid) for pid in found) and time.monotonic() < until:
        time.sleep(0.1)
    return len(found) == 2 and not any(process_start(pid) for pid in found)


def test_two_processes_compute_what_one_does(write, start, tmp_path):
    runs = {}
    for processes in (1, 2):
        assert finish(start(write(processes=processes, backend="trl-fixed"), "--quiet")) == (0, "", "")
        runs[processes] = latest(tmp_path)
    one, two = (lines(runs[processes]) for processes in (1, 2))
    assert [set(line) for line in two] == [set(line) for line in one]
    for mine, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
    assert one[0]["active/sdpo"] == 1
    assert one[0]["tokens/replay"] == 3 * (2 + 5)  # digit and `none`, each with its end token
    assert one[0]["grad_norm/sdpo"] > 0
    assert one[0]["grad_norm"] > 0
    assert "eval/reward/mean" in one[1]
    weights = [json.loads((runs[2].path / f"weights-{rank}.json").read_text()) for rank in (0, 1)]
    assert weights[0] == weights[1]
    alone = json.loads((runs[1].path / "weights-0.json").read_text())
    assert weights[0] == pytest.approx(alone, abs=2e-3)  # Adam's first step makes signs of gradients near 0
    assert all_gone(runs[2])


def test_a_resumed_run_of_two_processes_ends_as_if_it_had_never_stopped(write, start, tmp_path):
    # two optimiser steps use one generation, so step 3 stands in the middle of one
    spec = write(processes=2)
    options = ["train.steps=4", "train.iterations=2", "checkpoint.every=3", "--quiet"]
    assert finish(start(spec, *options)) == (0, "", "")
    whole, killed = latest(tmp_path), RunDirectory(tmp_path / "runs" / "killed")
    shutil.copytree(whole.path, killed.path)
    _as_if_killed_after(killed, step=3)
    assert finish(start("resume", "killed", "--quiet")) == (0, "", "")
    assert [line["step"] for line in lines(killed)] == [1, 2, 3, 4]
    assert lines(killed) == lines(whole)
    models = [(run.path / "model" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert models[0] == models[1]
    assert finish(start("resume", "killed", "backend.processes=1", "train.steps=9")) == (
        2,
        "",
        "this would be another run:\n  backend.processes: 2 -> 1\n"
        f"  fix: leave it as it was; or start a new run of {spec}\n",
    )


def _as_if_killed_after(run, *, step):
    """Take away what came after the checkpoint of this step; the metrics of later steps stay, as a kill leaves them."""
    for later, folder in run.complete_checkpoints():
        if later > step:
            shutil.rmtree(folder)
    shutil.rmtree(run.path / "model")
    events = read_jsonl(run.events)
    place = next(i for i, event in enumerate(events) if event["event"] == "checkpoint" and event["step"] == step)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events[: place + 1]))
    (run.path / "lock.json").unlink()


def test_sigterm_to_the_command_saves_and_ends_both(write, start, tmp_path):
    process = start(write(processes=2, backend="trl-fixed"), "train.steps=100000", "--quiet")
    until = time.monotonic() + TIMEOUT
    while not (list(tmp_path.glob("runs/*/metrics.jsonl")) and lines(latest(tmp_path))):
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (5, "", "")
    run = latest(tmp_path)
    assert run.state() == RunState("stopped", "received SIGTERM")
    ((step, folder),) = run.complete_checkpoints()
    assert lines(run)[-1]["step"] == step
    assert (folder / "rank1" / "trl.json").is_file()
    assert all_gone(run)
