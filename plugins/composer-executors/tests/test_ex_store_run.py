"""Whole runs whose worker sees nothing of the run directory: what is here afterwards is what was there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3_service import BUCKET, s3_server

from composer_core.run.directory import RunDirectory
from composer_core.run.files import is_complete, read_jsonl
from composer_executors.journal import Reader
from composer_executors.store import Store

SPEC = """\
version: 1
name: travel
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: python, function: "./reward.py:length"}]
loss: {objective: {use: grpo}}
train: {steps: 6, prompts_per_step: 2, group_size: 2, max_completion_tokens: 4, learning_rate: 1.0e-3}
backend: {use: toy}
executor: {use: local, threads: 1, stop_seconds: 60, poll_seconds: 0.3}
checkpoint: {every: 2, keep: 2}
"""
REWARD = """\
import glob, os, signal, time

calls = 0


def length(completions, **columns):
    global calls
    calls += 1
    if os.environ.get("COMPOSER_ATTEMPT") == "0" and calls == 4 and "DIE_AFTER" in os.environ:
        while not any("checkpoints/step_2" in open(path).read() for path in glob.glob(os.environ["DIE_AFTER"])):
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)  # what puts things into the store: no time to do any more
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(str(completion))) for completion in completions]
"""
pytestmark = pytest.mark.slow


def home_in(folder):
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text('{"prompt": "1 2"}\n{"prompt": "3 4"}\n')
    (folder / "scratch").mkdir()
    return folder


@pytest.fixture(scope="module")
def through_s3(tmp_path_factory):
    """A run that nothing disturbs: (home, run directory, its store's content, environment of S3's clients)."""
    home = home_in(tmp_path_factory.mktemp("s3"))
    with s3_server("moto", home) as environment, pytest.MonkeyPatch.context() as patch:
        keys = "executor.secrets=[AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]"
        code, said, directory = run(home, f"executor.store=s3://{BUCKET}/team", keys, **environment)
        assert code == 0, said
        for name, value in environment.items():
            patch.setenv(name, value)
        return home, directory, in_store(Store(f"s3://{BUCKET}/team/{directory.name}"), home), environment


def run(home, *overrides, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(home / "scratch"), **more}
    command = [str(Path(sys.executable).with_name("composer-run")), "run", "spec.yaml", *overrides]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stderr, RunDirectory((home / "runs" / "latest").resolve())


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_store(store, tmp_path):
    """All that is in a store of folders and lines, by name: what the worker had when it ended."""
    reader = Reader(store, 0)
    found = {}
    for name, tree in reader.trees().items():
        store.get_tree(tree.prefix, tree.files, tmp_path / "fetched" / name)
        found[name] = content(tmp_path / "fetched" / name)
    claims = 0
    while store.read(f"rank=0/writer={claims}/claim.json") is not None:
        claims += 1
    newest = claims - 1
    lines = {name: reader.lines(newest, name, 0) for name in reader.growing(newest)}
    return found, lines, newest


def check_all_is_here(directory, stored):
    trees, lines, _ = stored
    assert sorted(trees) == ["checkpoints/step_4", "checkpoints/step_6", "model", "rest"]
    for name in ("checkpoints/step_4", "checkpoints/step_6", "model"):
        assert is_complete(directory.path / name)
        assert content(directory.path / name) == trees[name]
    assert [step for step, _ in directory.complete_checkpoints()] == [4, 6]
    for name, text in lines.items():
        assert (directory.path / name).read_bytes() == text
    assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2, 3, 4, 5, 6]
    assert read_jsonl(directory.events)[-1]["event"] == "finished"
    assert directory.report.read_bytes() == trees["rest"]["report.html"]


def test_a_run_travels_through_s3_there_and_back(through_s3):
    home, directory, stored, environment = through_s3
    check_all_is_here(directory, stored)
    assert stored[2] == 0  # one start of the worker
    assert list((home / "scratch").glob("composer-*")) == []  # where the worker was
    assert environment["AWS_ENDPOINT_URL"].encode() not in b"".join(content(directory.path).values())
    prompts = json.loads(directory.plan.read_text())["spec"]["data"]["prompts"]["path"]
    assert prompts == str(home / "prompts.jsonl")  # the plan here speaks of this machine


def test_a_run_that_is_killed_goes_on_from_the_store(through_s3, tmp_path):
    home = home_in(tmp_path)
    pattern = str(home / "store" / "*" / "rank=0" / "writer=0" / "record=*.json")
    code, said, directory = run(home, "executor.store=./store", "executor.restarts=1", DIE_AFTER=pattern)
    assert code == 0, said
    assert "started again (1 of 1) from its newest checkpoint in the store" in said
    stored = in_store(Store(str(home / "store" / directory.name)), home)
    check_all_is_here(directory, stored)
    assert stored[2] == 1
    kinds = [event["event"] for event in read_jsonl(directory.events)]
    assert kinds.index("started") < kinds.index("resumed") < kinds.index("finished")
    assert [event["step"] for event in read_jsonl(directory.events) if event["event"] == "resumed"] == [2]
    weights = [(one.path / "model" / "model.safetensors").read_bytes() for one in (directory, through_s3[1])]
    assert weights[0] == weights[1]  # as if nothing had happened
