"""Commands on runs of the executor `local`, with a backend that trains nothing: --detach, status, logs, stop, reap."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from composer_core.cli.main import main
from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

PLUGIN = Path(__file__).parents[3] / "tests" / "unit" / "run" / "fake_backend.py"
SPEC = f"""\
version: 1
name: fake
plugins: [{PLUGIN}]
model: {{builtin: tiny}}
data: {{prompts: {{builtin: digits}}, rewards: [{{use: regex, pattern: "[0-9]"}}]}}
loss: {{objective: {{use: grpo}}}}
train: {{steps: 4}}
backend: {{use: fake}}
executor: {{use: local, threads: 1, poll_seconds: 0.1}}
"""
PATIENCE_S = 60


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("status")` -> (exit code, stdout, stderr), in a folder of its own; what it left running is ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPOSER_RUNS", raising=False)
    (tmp_path / "spec.yaml").write_text(SPEC)

    def run(*words):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    yield run
    for ledger in tmp_path.glob("runs/*/jobs.json"):
        if not ledger.parent.is_symlink():
            run("stop", ledger.parent.name, "--kill")


def until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def waiting_run(composer, tmp_path):
    """A detached run that has made its first step and waits to be stopped."""
    code, out, err = composer("run", "spec.yaml", "backend.do=wait", "--detach")
    directory = find_run("latest", tmp_path / "runs")
    name = directory.name
    commands = [f"composer-run {words}" for words in (f"status {name}", f"logs {name} --follow", f"stop {name}")]
    assert (code, out) == (0, "\n".join(["launched", *commands]) + "\n"), err
    until(lambda: len(read_jsonl(directory.metrics)) == 1)
    return directory


def replicas(composer, name="latest"):
    _, out, _ = composer("status", name, "--json")
    return json.loads(out)[0]["replicas"]


def test_a_run_ends_as_under_inline_and_leaves_its_ledger(composer):
    code, out, err = composer("run", "spec.yaml")
    assert code == 0
    assert out.startswith("done: 4 of 4 steps, reward 0.25 -> 0.25\nreport: ")
    assert "step 4/4" in err  # the worker's own lines
    (replica,) = replicas(composer)
    assert (replica["state"], replica["exit_code"], replica["executor"]) == ("succeeded", 0, "local")


@pytest.mark.slow
def test_a_worker_that_is_killed_goes_on_from_its_checkpoint(composer, tmp_path):
    code, _, err = composer("run", "spec.yaml", "backend.do=die", "executor.restarts=1")
    assert code == 0, err
    assert "started again (1 of 1) from the checkpoint of step 2\n" in err
    directory = find_run("latest", tmp_path / "runs")
    assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2, 3, 4]
    kinds = [event["event"] for event in read_jsonl(directory.events)]
    assert [kind for kind in kinds if kind != "checkpoint"] == ["started", "resumed", "model", "finished"]
    assert [(one["rank"], one["attempt"], one["state"]) for one in replicas(composer)] == [(0, 1, "succeeded")]


def test_a_worker_that_is_killed_once_too_often_has_failed(composer, tmp_path):
    assert composer("run", "spec.yaml", "backend.do=die")[0] == 4
    end = read_jsonl(find_run("latest", tmp_path / "runs").events)[-1]
    assert (end["event"], end["exit_code"]) == ("failed", 4)
    assert end["reason"].startswith("replica 0 failed (was killed by SIGKILL")
    assert end["reason"].endswith("; last complete checkpoint: checkpoints/step_2")


def test_a_mistake_is_not_tried_again(composer):
    code, _, err = composer("run", "spec.yaml", "backend.do=usage", "executor.restarts=2")
    assert code == 2
    assert "tasks.jsonl:3: no column 'answer'\n  fix: add it" in err
    assert [one["attempt"] for one in replicas(composer)] == [0]


def test_a_detached_run_is_shown_followed_and_stopped_by_later_commands(composer, waiting_run):
    name = waiting_run.name
    (replica,) = replicas(composer)
    assert (replica["state"], replica["rank"], replica["attempt"]) == ("running", 0, 0)
    assert f"replica 0 running; local {replica['id']}\n" in composer("status", name)[1]
    assert "step 1/4" in composer("logs", name, "--replica", "0")[1]
    assert composer("logs", name, "--replica", "3") == (2, "", f"--replica: run {name} has no replica 3; there are 1\n")
    assert composer("stop", name, "--reason", "enough", "--wait")[:2] == (
        0,
        f"{name}: asked to stop after step 2; it saves and ends with exit code 5\nstopped: enough\n",
    )
    until(lambda: replicas(composer)[0]["exit_code"] == 5)


def test_stop_with_kill_ends_it_without_saving(composer, waiting_run):
    name = waiting_run.name
    assert composer("stop", name, "--kill", "--reason", "a mistake") == (
        0,
        f"{name}: ended, nothing of it is left\n",
        "",
    )
    end = read_jsonl(waiting_run.events)[-1]
    assert (end["event"], end["reason"], end["exit_code"]) == ("stopped", "a mistake", 5)
    assert replicas(composer)[0]["state"] == "cancelled"


def test_a_worker_that_died_alone_is_reported_by_the_next_command(composer, waiting_run):
    os.kill(waiting_run.read_json("lock.json")["pid"], signal.SIGKILL)
    until(lambda: replicas(composer)[0]["state"] == "failed")
    end = read_jsonl(waiting_run.events)[-1]
    assert (end["event"], end["exit_code"]) == ("failed", 4)
    assert end["reason"].startswith("replica 0 failed (was killed by SIGKILL")


def test_reap_leaves_a_run_that_goes_on_and_ends_one_that_is_over(composer, waiting_run, tmp_path, monkeypatch):
    (replica,) = replicas(composer)
    what = f"local {replica['id']}: replica 0 of {waiting_run.name}"
    assert composer("reap") == (0, f"{what}: goes on, its run is not over\n", "")
    elsewhere = tmp_path / "elsewhere"
    out = composer("reap", "--executor", "local", "--runs", str(elsewhere))[1]
    assert f"{what}: left alone, its run is not in {elsewhere}: --runs DIR, or --unknown\n" in out
    waiting_run.event("failed", reason="somebody says so", exit_code=4)
    assert composer("reap")[1] == f"{what}: goes on, its run is not over\n"  # it may still draw its report
    monkeypatch.setattr("composer_core.run.launched.LAST_MOMENTS_S", -1.0)
    assert composer("reap", "--dry-run")[1] == f"{what}: its run is over: failed\n"
    assert composer("reap") == (0, f"{what}: its run is over: failed\n  ended, nothing of it is left\n", "")
    assert composer("reap") == (0, "nothing runs\n", "")


def test_an_executor_that_cannot_outlive_the_command_is_refused_before_anything_is_written(composer, tmp_path):
    assert composer("run", "spec.yaml", "executor={use: inline}", "--detach") == (
        2,
        "",
        "--detach: executor 'inline' cannot outlive the command\n"
        "  fix: executor: {use: local}, or another one of `composer-run plugins list`\n",
    )
    assert not (tmp_path / "runs").exists()


def test_doctor_looks_at_one_executor(composer):
    code, out, err = composer("doctor", "--executor", "local")
    assert (code, err) == (0, "")
    assert out.startswith("ok    local processes")
    assert composer("doctor", "--executor", "local", "--set", "poll_seconds=0") == (
        2,
        "",
        "--set: executor.poll_seconds: Input should be greater than 0\n",
    )
