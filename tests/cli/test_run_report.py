"""`composer-run run` and `report` as programs, over a backend that trains nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.run.directory import find_run
from composer_core.run.files import read_jsonl

PLUGIN = Path(__file__).parents[1] / "unit" / "run" / "fake_backend.py"
SPEC = """\
version: 1
name: fake
plugins: [{plugin}]
model: {{builtin: tiny}}
data:
  prompts: {{path: {prompts}}}
  rewards: [{{use: regex, pattern: "[0-9]"}}]
loss:
  objective: {{use: grpo}}
train: {{steps: 4}}
backend: {{use: fake, do: {do}}}
"""
MARKER = "marker-098f6bcd4621"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    return tmp_path


def write(folder, do="finish", prompts="tasks.jsonl"):
    (folder / "spec.yaml").write_text(SPEC.format(plugin=PLUGIN, do=do, prompts=prompts))


def start(folder, *arguments):
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = {**os.environ, "MY_API_KEY": MARKER, "OMP_NUM_THREADS": "1"}
    environment.pop("COMPOSER_RUNS", None)
    pipe = subprocess.PIPE
    return subprocess.Popen([*program, *arguments], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def composer_run(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_run_ends_with_where_everything_is_and_report_reads_it(folder):
    write(folder)
    code, out, err = composer_run(folder, "spec.yaml", "train.steps=6")
    assert code == 0, err
    run = find_run("latest", folder / "runs")
    # mean of 0.1 ... 0.5 and of 0.2 ... 0.6
    expected = (
        f"done: 6 of 6 steps, reward 0.3 -> 0.4\nreport: runs/{run.name}/report.html\nmodel: runs/{run.name}/model\n"
    )
    assert out == expected
    assert "step 6/6  reward 0.6  loss 0.1667" in err.splitlines()

    assert (run.path / "spec.yaml").read_text() == (folder / "spec.yaml").read_text()
    resolved = run.read_json("resolved.json")
    assert resolved["train.steps"] == {"value": 6, "source": "command line"}
    assert resolved["backend.use"] == {"value": "fake", "source": "spec.yaml:11:11"}
    assert resolved["train.group_size"] == {"value": 8, "source": "default"}
    provenance = run.read_json("provenance.json")
    assert provenance["control"]["argv"][1:] == ["spec.yaml", "train.steps=6"]
    assert provenance["worker"]["seed"] == 0

    run.report.unlink()
    code, out, err = composer_run(folder, "report", "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert figures.pop("reward_first") == pytest.approx(0.3)
    assert figures.pop("reward_last") == pytest.approx(0.4)
    assert figures == {
        "run": run.name,
        "state": "done",
        "reason": "",
        "steps": 6,
        "total_steps": 6,
        "tokens_per_s": None,
        "report": str(run.report),
        "model": str(run.path / "model"),
        "checkpoints": [4, 5, 6],
    }
    assert run.report.is_file()
    assert composer_run(folder, "report", "fake-") == (0, f"{run.report}\n", "")

    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if MARKER.encode() in path.read_bytes()] == []


def test_quiet_says_nothing_and_runs_go_where_they_are_sent(folder):
    write(folder)
    assert composer_run(folder, "run", "spec.yaml", "--quiet", "--runs", "elsewhere") == (0, "", "")
    assert find_run("latest", folder / "elsewhere").state().state == "done"
    assert not (folder / "runs").exists()


def test_a_failing_run_says_why_once_and_keeps_its_report(folder):
    write(folder, "usage")
    code, out, err = composer_run(folder, "spec.yaml")
    run = find_run("latest", folder / "runs")
    assert code == 2
    assert out == f"failed: 0 of 4 steps\nreport: runs/{run.name}/report.html\n"
    assert err.splitlines()[-2:] == ["tasks.jsonl:3: no column 'answer'", "  fix: add it"]


def test_a_killed_worker_is_told_with_its_last_checkpoint_intact(folder):
    write(folder, "die")
    code, out, err = composer_run(folder, "spec.yaml")
    run = find_run("latest", folder / "runs")
    assert code == 4
    assert err.splitlines()[-1] == (
        "the worker was killed by SIGKILL (by the system when memory runs out); "
        "last complete checkpoint: checkpoints/step_2"
    )
    assert out == "failed: 2 of 4 steps, reward 0.15 -> 0.15\n"
    assert [step for step, _ in run.complete_checkpoints()] == [1, 2]
    assert composer_run(folder, "report")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stop_that_reaches_only_the_command_stops_the_worker_too(folder, number):
    write(folder, "wait")
    process = start(folder, "spec.yaml")
    while not process.stderr.readline().startswith("step 1/4"):
        assert process.poll() is None
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert out.splitlines()[0] == "stopped (received SIGTERM): 1 of 4 steps, reward 0.1 -> 0.1"
    assert read_jsonl(find_run("latest", folder / "runs").events)[-1]["event"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonesuch.yaml"], 2),
        (["spec.yaml", "train.stpes=3"], 2),
        (["spec.yaml", "data.prompts.path=nonesuch.jsonl"], 2),
        (["spec.yaml", "backend.use=nonesuch"], 3),
    ],
    ids=["no-spec", "misspelt-key", "no-data", "no-backend"],
)
def test_bad_input_creates_nothing(folder, arguments, code):
    write(folder)
    before = sorted(folder.iterdir())
    found, out, err = composer_run(folder, *arguments)
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    assert sorted(folder.iterdir()) == before


def test_report_without_a_run_says_where_it_looked(folder):
    expected = f"{folder}/runs: no run yet\n  fix: --runs DIR, or COMPOSER_RUNS, names the folder that holds runs\n"
    assert composer_run(folder, "report") == (2, "", expected)


def test_the_worker_obeys_disabled_plugins_and_debug(folder):
    write(folder, "divide")
    code, _, err = composer_run(folder, "--no-plugins", "--debug", "spec.yaml")
    assert code == 4
    assert re.search(r"^ZeroDivisionError: division by zero$", err, re.MULTILINE)
