"""Two processes of one worker: they start, stop and end together, whoever falls first. All with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_core.plugins.registry import Registry
from composer_core.run.directory import RunState, create_run
from composer_core.run.files import read_jsonl, write_text
from composer_core.run.processes import process_start
from composer_core.run.resume import plan_resume, write_resume
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

pytestmark = pytest.mark.slow

SPEC = """\
version: 1
name: two
plugins: [{plugin}]
model: {{builtin: tiny}}
data:
  prompts: {{builtin: digits}}
  rewards: [{{use: regex, pattern: "[0-9]"}}]
loss:
  objective: {{use: grpo}}
train: {{steps: 2}}
checkpoint: {{keep: 9}}
backend: {{use: ranks, do: {do}}}
"""
TIMEOUT = 120


@pytest.fixture
def planned(tmp_path):
    def plan(do, *overrides):
        spec = tmp_path / "spec.yaml"
        spec.write_text(SPEC.format(plugin=Path(__file__).with_name("rank_backend.py"), do=do))
        registry = Registry.discover()
        loaded = load_spec(spec, registry, overrides=overrides)
        directory = create_run(tmp_path / "runs", loaded.spec.name)
        directory.write_json("plan.json", make_plan(loaded, registry).to_json())
        return directory

    return plan


@pytest.fixture
def start():
    """Start a worker; whatever is left of it in the end is killed."""
    started = []

    def worker(directory, *arguments, launcher=(), **environment):
        command = [sys.executable, *launcher, "-m", "composer_core.run.worker", str(directory.plan), *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(
            command, env={**inherited, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append((directory, process))
        return process

    yield worker
    for directory, process in started:
        process.kill()
        process.communicate()
        for pid in pids(directory).values():
            if process_start(pid):
                os.kill(pid, signal.SIGKILL)


def pids(directory):
    return {int(file.name): int(file.read_text()) for file in (directory.path / "pids").glob("?")}


def wait_until(true, *, seconds=TIMEOUT):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def up(directory):
    """Both are in their first step and have saved it."""
    wait_until(lambda: len(pids(directory)) == 2 and directory.complete_checkpoints())
    return pids(directory)


def all_gone(directory):
    found = pids(directory)
    assert set(found) == {0, 1}
    wait_until(lambda: not any(process_start(pid) for pid in found.values()), seconds=20)
    return True


def ending(directory):
    last = read_jsonl(directory.events)[-1]
    return {name: value for name, value in last.items() if name != "time"}


def test_one_worker_becomes_two_processes_and_leaves_one_run(planned, start):
    directory = planned("finish")
    worker = start(directory)
    out, err = worker.communicate(timeout=TIMEOUT)
    assert (worker.returncode, out) == (0, "")
    assert err == "step 1/2  reward 0.1\nstep 2/2  reward 0.2\n"
    assert [event["event"] for event in read_jsonl(directory.events)] == [
        "started", "checkpoint", "checkpoint", "model", "finished",
    ]  # fmt: skip
    assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2]
    assert (directory.path / "model" / "weights").read_text() == "trained by 0"
    for step, folder in directory.complete_checkpoints():
        assert (folder / "mine").read_text() == f"0 at {step}"
        assert (folder / "rank1" / "mine").read_text() == f"1 at {step}"
    assert sorted(path.name for path in directory.logs.iterdir()) == ["worker-1.log", "worker.log"]
    assert not directory.scratch.exists()
    assert all_gone(directory)
    # and each goes on from its own part
    write_resume(directory, plan_resume(directory, Registry.discover(), ["train.steps=3"]))
    worker = start(directory, "--quiet", "--resume", "2")
    assert (worker.communicate(timeout=TIMEOUT), worker.returncode) == (("", ""), 0)
    assert [step for step, _ in directory.complete_checkpoints()] == [1, 2, 3]


@pytest.mark.parametrize("do", ["killed", "killed-unheard"], ids=["in-a-collective", "while-rank-0-hears-nothing"])
def test_a_rank_that_is_killed_fails_the_run_with_its_name_and_log(planned, start, do):
    directory = planned(do)
    worker = start(directory, "--quiet")
    _, err = worker.communicate(timeout=TIMEOUT)
    reason = (
        "rank 1 was killed by SIGKILL (by the system when memory runs out); "
        "last complete checkpoint: checkpoints/step_1\n  its log: logs/worker-1.log"
    )
    assert (worker.returncode, err) == (4, f"{reason}\n")
    assert ending(directory) == {"event": "failed", "reason": reason, "exit_code": 4}
    assert directory.state() == RunState("failed", reason)
    assert directory.report.is_file()
    assert all_gone(directory)


@pytest.mark.parametrize(
    ("do", "code", "reason"),
    [
        ("one-wrong", 2, "rank 1: tasks.jsonl:7: no column 'answer'\n  fix: add it\n  its log: logs/worker-1.log"),
        ("one-broken", 4, "rank 1: internal error: KeyError: 'x'\n  its log: logs/worker-1.log"),
        # found by both: said once, by rank 0
        ("all-wrong", 2, "tasks.jsonl:3: no column 'answer'\n  fix: add it"),
    ],
)
def test_what_a_rank_fails_of_is_said_once(planned, start, do, code, reason):
    directory = planned(do)
    worker = start(directory, "--quiet")
    _, err = worker.communicate(timeout=TIMEOUT)
    assert (worker.returncode, err) == (code, f"{reason}\n")
    assert ending(directory) == {"event": "failed", "reason": reason, "exit_code": code}
    if "its log" in reason:
        assert "Traceback (most recent call last)" in (directory.logs / "worker-1.log").read_text()
    assert all_gone(directory)


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGTERM)],
    ids=["0-term", "0-int", "1-term"],
)
def test_a_signal_to_one_rank_stops_both_at_the_same_step(planned, start, rank, number):
    directory = planned("wait")
    worker = start(directory, "--quiet")
    os.kill(up(directory)[rank], number)
    assert (worker.communicate(timeout=TIMEOUT), worker.returncode) == (("", ""), 5)
    assert directory.state() == RunState("stopped", f"received {number.name}")
    assert [step for step, _ in directory.complete_checkpoints()] == [1]
    assert all_gone(directory)


def test_a_stop_file_stops_both_and_ctrl_c_is_for_rank_0_alone(planned, start):
    directory = planned("wait")
    worker = start(directory, "--quiet")
    os.kill(up(directory)[1], signal.SIGINT)  # as a terminal sends it, to all of them
    os.kill(up(directory)[1], signal.SIGINT)
    write_text(directory.stop_file, "enough")  # whole or not at all, as `composer-run stop` leaves it
    assert worker.wait(timeout=TIMEOUT) == 5
    assert directory.state() == RunState("stopped", "enough")
    assert all_gone(directory)


def test_nobody_survives_rank_0(planned, start):
    directory = planned("wait")
    worker = start(directory, "--quiet")
    up(directory)
    worker.kill()
    worker.wait(timeout=TIMEOUT)
    assert all_gone(directory)


def test_nobody_survives_a_second_ctrl_c(planned, start):
    directory = planned("killed-unheard")  # both sleep, and would not see a first one
    worker = start(directory, "--quiet")
    wait_until(lambda: 1 in pids(directory) and not process_start(pids(directory)[1]))
    worker.send_signal(signal.SIGINT)
    time.sleep(0.1)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=TIMEOUT) == 130
    assert all_gone(directory)


def test_a_launcher_may_start_the_processes_instead(planned, start):
    directory = planned("finish")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = start(directory, "--quiet", launcher=launcher)
    assert worker.wait(timeout=TIMEOUT) == 0
    assert directory.state() == RunState("done")
    assert [step for step, _ in directory.complete_checkpoints()] == [1, 2]
    assert all_gone(directory)


def test_a_launcher_with_another_number_of_processes_is_refused(planned, start):
    directory = planned("finish")
    worker = start(directory, "--quiet", RANK="0", WORLD_SIZE="3")
    _, err = worker.communicate(timeout=TIMEOUT)
    assert (worker.returncode, err) == (
        2,
        "a launcher started 3 processes (WORLD_SIZE), and the plan is for 2\n"
        "  fix: let it start 2; or start the run without a launcher, it starts its processes itself\n",
    )
