"""`composer-run status | logs | stop`, on runs of a backend that trains nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.cli.main import main
from composer_core.run.directory import create_run, find_run
from composer_core.run.files import read_jsonl

PLUGIN = Path(__file__).parents[1] / "unit" / "run" / "fake_backend.py"
SPEC = f"""\
version: 1
name: fake
plugins: [{PLUGIN}]
model: {{builtin: tiny}}
data: {{prompts: {{builtin: digits}}, rewards: [{{use: regex, pattern: "[0-9]"}}]}}
loss: {{objective: {{use: grpo}}}}
train: {{steps: 4}}
backend: {{use: fake, do: wait}}
"""


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("status")` -> (exit code, stdout, stderr), in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPOSER_RUNS", raising=False)

    def run(*words):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """One done an hour ago, one that goes on in this process; `time.time()` is 10,000."""
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    made = []
    for name, state in (("first", "finished"), ("second", "started")):
        directory = create_run(tmp_path / "runs", name)
        directory.write_json("plan.json", {"spec": {"train": {"steps": 20}}})
        start = 6000.0 if state == "finished" else 9900.0
        events = [{"event": "started", "time": start}]
        if state == "finished":
            events.append({"event": "stopped", "time": 6400.0, "reason": "received SIGTERM\nmore"})
        directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        lines = [{"step": step, "time": start + 10 * step, "reward/mean": 0.25} for step in (1, 2, 3)]
        directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        directory.lock()
        os.utime(directory.path / "plan.json", (start, start))
        made.append(directory)
    return made


def test_status_is_a_table_of_all_runs(composer, two_runs):
    first, second = two_runs
    width = len(second.name)
    expected = [
        f"{'RUN':{width}}  STATE    STEP  REWARD  AGE    LEFT",
        f"{first.name:{width}}  stopped  3/20  0.25    1h06m  -",  # 4000 s ago
        "  received SIGTERM",
        f"{second.name:{width}}  running  3/20  0.25    1m40s  2m50s",  # 17 steps of 10 s
    ]
    assert composer("status") == (0, "\n".join(expected) + "\n", "")


def test_status_of_one_run_is_in_detail(composer, two_runs):
    code, out, err = composer("status", "sec")
    assert (code, err) == (0, "")
    lines = {line[:9].strip(): line[10:] for line in out.splitlines()}
    started = lines.pop("started")
    assert started.endswith(" (1m40s ago)")
    assert lines == {
        "run": two_runs[1].name,
        "state": "running",
        "step": "3 of 20",
        "reward": "0.25",
        "step time": "10 s",
        "last sign": "1m10s ago",
        "left": "2m50s",
        "folder": f"runs/{two_runs[1].name}",
    }


def test_status_json_is_a_list(composer, two_runs):
    code, out, err = composer("status", "--json", "first")
    assert (code, err) == (0, "")
    assert json.loads(out) == [
        {
            "run": two_runs[0].name,
            "path": str(two_runs[0].path),
            "state": "stopped",
            "reason": "received SIGTERM\nmore",
            "step": 3,
            "total_steps": 20,
            "reward": 0.25,
            "started": 6000.0,
            "updated": 6400.0,
            "step_s": 10.0,
            "left_s": None,
        }
    ]
    assert len(json.loads(composer("status", "--json")[1])) == 2


def test_status_of_an_empty_folder(composer):
    assert composer("status") == (0, "no runs in runs\n", "")
    assert composer("status", "--json") == (0, "[]\n", "")


def test_logs_shows_the_last_lines(composer, two_runs):
    (two_runs[1].logs / "worker.log").write_text("one\ntwo\nthree\n")
    assert composer("logs", "--lines", "2") == (0, "two\nthree\n", "")


def test_stop_refuses_a_run_that_is_over(composer, two_runs):
    expected = f"run {two_runs[0].name} is over already: stopped\n  fix: composer-run status shows what still runs\n"
    assert composer("stop", "first") == (2, "", expected)
    assert not two_runs[0].stop_file.exists()


def test_stop_says_when_it_acts_and_leaves_the_reason(composer, two_runs):
    name = two_runs[1].name
    expected = f"{name}: asked to stop after step 4, which takes about 10s; it saves and ends with exit code 5\n"
    assert composer("stop", "--reason", "reward collapsed") == (0, expected, "")
    assert two_runs[1].stop_file.read_text() == "reward collapsed\n"


def test_a_run_that_is_asked_to_stop_ends_with_5_and_the_reason(composer, tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*program, "spec.yaml"], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    while not process.stderr.readline().startswith("step 1/4"):
        assert process.poll() is None
    code, out, err = composer("stop", "latest", "--reason", "enough of it", "--wait")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "stopped: enough of it"
    process.communicate(timeout=60)
    assert process.returncode == 5
    end = read_jsonl(find_run("latest", tmp_path / "runs").events)[-1]
    assert (end["event"], end["reason"], end["exit_code"]) == ("stopped", "enough of it", 5)
