"""A named teacher through the whole program: a server on loopback scores hinted rollouts of the toy trainer."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl
from composer_core.testing.chat_server import ChatServer, Reply, scored

SPEC = """\
version: 1
name: scored
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: exact-match, extract: whole}]
loss:
  objective: {use: dr-grpo}
  channels:
    - use: sdpo
      weight: 1.0
      teacher: strong
      divergence: kl_student_teacher
      hints: {column: tip, at: prompt-end}
train: {steps: 3, prompts_per_step: 2, group_size: 2, max_completion_tokens: 6, learning_rate: 1.0e-3}
teachers:
  strong: {use: openai, base_url: BASE, model: m, scores: true, key: "${env:STRONG_KEY}", attempts: 1}
backend: {use: toy}
executor: {use: inline, threads: 1}
"""
PROGRAM = "import sys; from composer_core.cli.main import main; sys.exit(main())"
KEY = "sk-not-in-any-file"


def _run(folder, url):
    (folder / "spec.yaml").write_text(SPEC.replace("BASE", url))
    prompts = [{"prompt": f"n{i}", "answer": str(i), "tip": f"It is {i}."} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "COMPOSER_CACHE": str(folder / "cache"), "STRONG_KEY": KEY,
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, "spec.yaml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_a_run_learns_from_a_teachers_log_probs_and_survives_those_it_does_not_give(tmp_path):
    pytest.importorskip("transformers")
    asked = 0

    def reply(body):
        nonlocal asked
        asked += 1
        # the first is the trial before the first step; then four rollouts a step
        return Reply(b"out of memory", status=500) if asked == 3 else Reply(scored(body, lambda token: -0.25))

    with ChatServer(reply) as server:
        done = _run(tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    run = find_run("latest", tmp_path / "runs")
    metrics = read_jsonl(run.metrics)
    assert [line["active/sdpo"] for line in metrics] == [0.75, 1.0, 1.0]
    for line in metrics:
        # a random model finds its own tokens much less likely than e^-0.25: it is pulled up, by exactly that gap
        assert line["sdpo/hint_gain"] > 0.5
        assert line["loss/sdpo"] == pytest.approx(-line["sdpo/hint_gain"], rel=1e-5)
        assert line["grad_norm/sdpo"] > 0
    (facts,) = [event for event in read_jsonl(run.events) if event["event"] == "teacher"]
    assert facts["teacher"] == "strong"
    assert facts["scored"] + facts["cached"] >= 11
    assert facts["failed"] == {"given up after 1 attempts: HTTP 500: out of memory": 1}
    (warning,) = [event["reason"] for event in read_jsonl(run.events) if event["event"] == "warning"]
    assert "did not score rollout" in warning
    assert {header["authorization"] for header in server.headers} == {f"Bearer {KEY}"}
    assert not [path for path in run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_the_run_before_its_first_step(tmp_path):
    pytest.importorskip("transformers")
    with ChatServer(lambda body: Reply()) as server:
        gone = server.url
    done = _run(tmp_path, gone)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "teachers.strong: this teacher scored no text: given up after 1 attempts: ConnectError: All connection "
        "attempts failed"
    )
