import json

import pytest

from composer_core.errors import RunFailed
from composer_core.run.directory import LATEST, RunDirectory, create_run
from composer_core.run.metrics import MetricsLog
from composer_core.run.status import all_runs, seconds_per_step, status_of, status_of_each, tail


@pytest.fixture
def directory(tmp_path):
    directory = create_run(tmp_path, "fix-traces")
    directory.write_json("plan.json", {"spec": {"train": {"steps": 20}}})
    return directory


def write_metrics(directory, times):
    """One line per (step, time), its reward a tenth of the step."""
    text = "".join(
        json.dumps({"step": step, "time": time, "reward/mean": step / 10}) + "\n" for step, time in times.items()
    )
    directory.metrics.write_text(text)


def write_events(directory, *events):
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_planned_run_is_new(directory):
    status = status_of(directory)
    assert (status.run, status.state, status.step, status.total_steps) == (directory.name, "new", 0, 20)
    assert (status.reward, status.started, status.updated, status.step_s, status.left_s) == (None,) * 5


def test_a_run_that_goes_on_says_how_much_is_left(directory):
    directory.lock()
    write_events(directory, {"event": "started", "time": 1000.0})
    write_metrics(directory, {step: 1000.0 + 3 * step for step in range(1, 9)})
    status = status_of(directory)
    assert (status.state, status.step) == ("running", 8)
    assert status.reward == pytest.approx(0.6)  # (0.4 + ... + 0.8) / 5
    assert (status.started, status.updated) == (1000.0, 1024.0)
    assert status.step_s == pytest.approx(3)
    assert status.left_s == pytest.approx(36)  # 12 steps of 3 s


def test_a_run_that_ended_has_nothing_left(directory):
    directory.lock()
    write_events(
        directory,
        {"event": "started", "time": 1000.0},
        {"event": "stopped", "time": 1040.0, "reason": "received SIGTERM", "exit_code": 5},
    )
    write_metrics(directory, {1: 1010.0, 2: 1020.0})
    status = status_of(directory)
    assert (status.state, status.reason) == ("stopped", "received SIGTERM")
    assert (status.updated, status.step_s, status.left_s) == (1040.0, 10.0, None)


def test_the_pause_before_a_resume_is_not_a_step():
    # 1 -> 2 took 10 s, 2 -> 4 took 20 s for two steps, then a day, then 10 s; step 4 was trained again
    lines = [(1, 0.0), (2, 10.0), (4, 30.0), (3, 86430.0), (4, 86440.0)]
    assert seconds_per_step([{"step": step, "time": time} for step, time in lines]) == 10
    assert seconds_per_step([{"step": 1, "time": 0.0}]) is None


def test_the_tail_of_a_long_file_leaves_out_what_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(10, 99)) + '{"step": 99')
    assert tail(path)[0] == {"step": 10}
    # a line has 13 bytes; of the last 35, 11 are the line being written, 24 hold one whole line and the end of one
    assert tail(path, size=35) == [{"step": 98}]
    assert tail(tmp_path / "none") == []


def test_a_line_that_is_not_json_does_not_hide_how_far_a_run_is(directory):
    log = MetricsLog(directory.metrics)
    log.log(1, {"reward/mean": 0.5})
    with directory.metrics.open("a") as file:
        file.write("garbage\n")
    log.log(2, {"reward/mean": 0.7})
    assert (status_of(directory).step, status_of(directory).reward) == (2, pytest.approx(0.6))


def test_a_run_with_a_broken_file_does_not_hide_the_others(tmp_path, directory):
    directory.events.write_text('{"event": "started", "time": 1.0}\n<<<<\n{"event": "finished", "time": 2.0}\n')
    other = create_run(tmp_path, "other")
    broken, fine = status_of_each([directory, other])
    assert (broken.run, broken.state, broken.step) == (directory.name, "unreadable", 0)
    assert broken.reason.startswith(f"{directory.events}:2: not a JSON line")
    assert fine.state == "new"
    with pytest.raises(RunFailed):
        status_of(directory)


def test_all_runs_are_listed_once_the_newest_last(tmp_path, directory):
    second = create_run(tmp_path, "a-later-one")
    second.write_json("plan.json", {})
    create_run(tmp_path, "without-a-plan")
    (tmp_path / "compare.html").write_text("")
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).symlink_to(second.name)
    assert all_runs(tmp_path) == [RunDirectory(directory.path), RunDirectory(second.path)]
    assert all_runs(tmp_path / "none") == []
