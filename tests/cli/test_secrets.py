"""A secret from the environment is in no file of a run, whether it trains or fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MARKER = "tok-9f8e7d"
SPEC = """\
version: 1
name: secret
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards:
    - {use: regex, pattern: "[0-9]"}
    - {use: contains, text: "${env:COMPOSER_TEST_TOKEN}", weight: 0.5}
loss: {objective: {use: grpo}}
train: {steps: 1, prompts_per_step: 2, group_size: 2, max_completion_tokens: 4}
backend: {use: toy}
executor: {use: inline, threads: 1}
"""


@pytest.fixture
def run(tmp_path):
    """`run(text, **variables)`: the program's whole output, and each file that the run left, by name."""

    def _run(text, **variables):
        (tmp_path / "spec.yaml").write_text(text)
        unset = {name: value for name, value in os.environ.items() if name != "COMPOSER_TEST_TOKEN"}
        done = subprocess.run(
            [sys.executable, "-m", "composer_core.cli.main", "run", "spec.yaml", "--runs", "runs"],
            cwd=tmp_path,
            env={**unset, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return done, files

    return _run


@pytest.mark.slow
def test_a_run_that_trains(run):
    done, files = run(SPEC, COMPOSER_TEST_TOKEN=MARKER)
    assert done.returncode == 0, done.stderr
    assert MARKER not in done.stdout + done.stderr
    assert [name for name, content in files.items() if MARKER.encode() in content] == []
    for name in ("plan.json", "resolved.json", "spec.yaml"):
        assert b"${env:COMPOSER_TEST_TOKEN}" in files[name], name


def test_a_value_that_does_not_fit_is_not_shown(run):
    done, files = run(SPEC.replace("[0-9]", "${env:COMPOSER_TEST_TOKEN}"), COMPOSER_TEST_TOKEN=f"({MARKER}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "data.rewards[0].pattern: does not fit once the environment is filled in (its value is not shown)\n"
        "  fix: check COMPOSER_TEST_TOKEN\n"
    )
    assert list(files) == ["spec.yaml"]


def test_a_variable_that_is_not_set_leaves_no_run(run):
    done, files = run(SPEC)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "data.rewards[1].text: the environment variable COMPOSER_TEST_TOKEN is not set\n"
        "  fix: export COMPOSER_TEST_TOKEN=...\n"
    )
    assert list(files) == ["spec.yaml"]
