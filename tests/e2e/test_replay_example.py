"""examples/replay-toy.yaml from the recorded session to the trained model, on a copy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]


@pytest.fixture
def composer(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COMPOSER_CACHE": str(tmp_path / "cache")}
    environment.pop("COMPOSER_RUNS", None)

    def run(*arguments):
        done = subprocess.run(
            [*PROGRAM, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
            timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def pairs(folder):
    return [json.loads(line) for line in (folder / "runs" / "replay-toy-pairs.jsonl").read_text().splitlines()]


def test_two_of_five_steps_become_pairs(composer, tmp_path):
    out = composer("replay", "examples/replay-toy.yaml")
    assert out.splitlines()[0] == ("2 pairs of 5 states: 1 like the agent, 2 without agreement, 0 tied, 0 unanswered")
    assert [pair["state_id"] for pair in pairs(tmp_path)] == ["toy-session#1::0000", "toy-session#1::0004"]
    assert [pair["chosen"]["content"] for pair in pairs(tmp_path)] == [
        "Let me look: ls",
        "Let me try read_file instead.",
    ]


@pytest.mark.slow
def test_the_pairs_train_and_with_stored_log_probs_so_does_dpo(composer, tmp_path):
    pytest.importorskip("transformers")
    from composer_core.hf.tiny import make_tiny

    composer("replay", "examples/replay-toy.yaml")
    composer("examples/replay-toy.yaml")
    lines = read_jsonl(find_run("latest", tmp_path / "runs").metrics)
    assert [line["active/replay"] for line in lines] == [1.0] * 4
    assert lines[-1]["loss/replay"] < lines[0]["loss/replay"]

    make_tiny(tmp_path / "tiny", seed=0)
    composer("replay", "examples/replay-toy.yaml", "--ref-model", "tiny")
    assert {pair["ref"]["model"] for pair in pairs(tmp_path)} == {"tiny"}
    composer(
        "examples/replay-toy.yaml",
        "model={path: tiny}",
        "loss.channels.replay.variant=dpo",
        "loss.channels.replay.reference=stored",
    )
    first, *_, last = read_jsonl(find_run("latest", tmp_path / "runs").metrics)
    assert first["loss/replay"] == pytest.approx(0.6931, abs=1e-3)  # policy == reference: log 2
    assert last["loss/replay"] < first["loss/replay"]
