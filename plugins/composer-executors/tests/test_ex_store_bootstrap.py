"""The process between a store and a worker, with a small program as the worker: wishes, exit codes, another try."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from composer_core.jobs import Job
from composer_core.run.directory import RunDirectory
from composer_core.run.files import write_json
from composer_executors.bringing import Bringing
from composer_executors.journal import Reader
from composer_executors.shipping import input_of, ship
from composer_executors.store import Store

WORKER = """\
import os, signal, sys, time
from pathlib import Path
from composer_core.run.directory import RunDirectory

directory = RunDirectory(Path(sys.argv[1]).parent)
asked, parent, alone = [], os.getppid(), 0
signal.signal(signal.SIGTERM, lambda number, frame: asked.append("TERM"))
start = int(sys.argv[sys.argv.index("--resume") + 1]) if "--resume" in sys.argv else 0
directory.event("resumed" if start else "started", options=sys.argv[2:])
for step in range(start + 1, 100):
    with directory.metrics.open("a") as file:
        file.write(f'{{"step": {step}, "time": 1}}\\n')
    with directory.checkpoint(step, keep=2) as folder:
        (folder / "w").write_text(str(step))
    time.sleep(0.3)
    if directory.stop_file.exists():
        asked.append(directory.stop_file.read_text())
    alone += os.getppid() != parent
    if asked or alone == 3 or "--end" in sys.argv and step == 3:
        break
directory.event("stopped", reason=asked, step=step)
sys.exit(5 if asked else 7)
"""
PROGRAM = """\
import sys
from composer_executors import bootstrap

bootstrap.WORKER = "small_worker"
sys.exit(bootstrap.main(sys.argv[1:]))
"""


@pytest.fixture
def job(tmp_path):
    """Shipped."""
    (tmp_path / "small_worker.py").write_text(WORKER)
    (tmp_path / "scratch").mkdir()
    run = tmp_path / "runs" / "job-1"
    for folder in ("logs", "checkpoints", "replicas"):
        (run / folder).mkdir(parents=True)
    write_json(run / "plan.json", {"spec": {"checkpoint": {"keep": 2}}, "plugins": []})
    one = Job("job-1", ("-m", "composer_core.run.worker", "plan.json"), run, store=(tmp_path / "store").as_uri())
    ship(one)
    return one


@pytest.fixture
def start(job, tmp_path):
    started = []

    def start(*options, job=job):
        command = [sys.executable, "-c", PROGRAM, job.store, "--input", input_of(job), "--", *options]
        environment = {
            **os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path / "scratch"), "COMPOSER_RUN_ID": "job-1"
        }  # fmt: skip
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(step, job):
    """Until the checkpoint of a step is in the store."""
    until = time.monotonic() + 60
    while f"checkpoints/step_{step}" not in Reader(Store(job.store), 0).trees():
        assert time.monotonic() < until
        time.sleep(0.1)


def brought(job):
    Bringing(job).bring()
    directory = RunDirectory(job.run_dir)
    events = [json.loads(line) for line in directory.events.read_text().splitlines()]
    return directory, events


def steps(directory):
    return [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()]


def test_the_workers_options_and_exit_code_are_handed_through_and_nothing_is_left(job, start, tmp_path):
    process = start("--quiet", "--end")
    assert process.wait(60) == 7
    directory, events = brought(job)
    assert events[0]["options"] == ["--quiet", "--end"]
    assert steps(directory) == [1, 2, 3]
    assert [step for step, _ in directory.complete_checkpoints()] == [2, 3]
    assert Store(job.store).read_json("rank=0/writer=0/end.json") == {"exit_code": 7}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_term_is_handed_on_and_what_the_worker_saves_then_is_kept(job, start):
    process = start()
    wait_for(1, job)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5
    directory, events = brought(job)
    assert events[-1]["reason"] == ["TERM"]
    assert directory.complete_checkpoints()[-1][0] == events[-1]["step"]


def test_a_wish_in_the_store_becomes_a_stop_file(job, start):
    process = start()
    wait_for(1, job)
    (job.run_dir / "STOP").write_text("enough\n")
    Bringing(job).bring()
    assert process.wait(60) == 5
    assert brought(job)[1][-1]["reason"] == ["enough\n"]


def test_a_killed_one_goes_on_from_the_newest_checkpoint_in_the_store(job, start):
    first = start()
    wait_for(2, job)
    first.kill()  # the small worker lives on: a worker that was thought dead
    first.wait()
    newest = max(int(name.rpartition("_")[2]) for name in Reader(Store(job.store), 0).trees())
    second = start()
    wait_for(newest + 2, job)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 5
    directory, events = brought(job)
    assert [event["options"] for event in events if event["event"] == "resumed"] == [["--resume", str(newest)]]
    assert steps(directory) == list(range(1, events[-1]["step"] + 1))  # none twice, none left out


@pytest.mark.parametrize("store", ["store", "another"])
def test_a_resumed_run_goes_on_also_in_another_store(store, job, start, tmp_path):
    assert start("--end").wait(60) == 7
    directory, _ = brought(job)
    directory.event("command")
    argv = ("-m", "composer_core.run.worker", str(directory.plan), "--resume", "2")  # the newest one is broken, say
    again = replace(job, argv=argv, store=(tmp_path / store).as_uri())
    ship(again)
    assert start("--end", "--resume", "2", job=again).wait(60) == 7
    directory, events = brought(again)
    assert [event["event"] for event in events if event["event"] != "checkpoint"] == [
        "started", "stopped", "command", "resumed", "stopped"
    ]  # fmt: skip
    assert steps(directory) == [1, 2, 3]
    dropped = (job.run_dir / "metrics.dropped.jsonl").read_text()
    assert dropped == '{"step": 3, "time": 1}\n'
    assert [step for step, _ in directory.complete_checkpoints()] == [2, 3]
    # made anew; another store got the one that it goes on from first
    newest = Reader(Store(again.store), 0).trees()["checkpoints/step_3"].prefix
    assert newest == {"store": "rank=0/writer=1/tree=1", "another": "rank=0/writer=0/tree=2"}[store]


def test_an_input_that_is_not_there_is_named(job, start):
    job.run_dir.joinpath("replicas", "input.json").write_text('{"input": "17"}')
    process = start()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 4
    assert said == f"{job.store}: nothing was put there as input 17\n"
