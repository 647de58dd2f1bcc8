import os
import re
import socket
import subprocess
import sys

import pytest

from composer_core.errors import UsageError
from composer_core.run.directory import RunState, create_run, find_run, runs_root
from composer_core.run.files import MARKER


def make(root, name="fix-traces"):
    run = create_run(root, name)
    run.write_json("plan.json", {})
    return run


def fill(run, *steps, keep=3):
    for step in steps:
        with run.checkpoint(step, keep=keep) as folder:
            (folder / "weights").write_text(str(step))


def test_a_run_is_named_by_spec_time_and_chance_and_latest_points_at_it(tmp_path):
    run = create_run(tmp_path / "runs", "fix-traces")
    assert re.fullmatch(r"fix-traces-\d{8}-\d{6}-[0-9a-f]{4}", run.name)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]
    assert os.readlink(tmp_path / "runs" / "latest") == run.name
    second = create_run(tmp_path / "runs", "other")
    assert os.readlink(tmp_path / "runs" / "latest") == second.name


def test_two_runs_that_draw_the_same_name_get_directories_of_their_own(tmp_path, monkeypatch):
    # per run: the four digits of its name, then those of the temporary link; the second run's first draw clashes
    drawn = iter(["aaaa", "link1", "aaaa", "bbbb", "link2"])
    monkeypatch.setattr("composer_core.run.directory.secrets.token_hex", lambda n: next(drawn))
    monkeypatch.setattr("composer_core.run.directory.time.strftime", lambda form: "20250102-030405")
    assert [create_run(tmp_path, "r").name for _ in range(2)] == ["r-20250102-030405-aaaa", "r-20250102-030405-bbbb"]


def test_a_folder_that_cannot_hold_runs_is_a_usage_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError) as caught:
        create_run(tmp_path / "runs", "r")
    assert (
        str(caught.value) == f"{tmp_path}/runs: cannot make a run directory: File exists\n  fix: --runs another folder"
    )


def test_the_option_beats_the_variable_which_beats_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPOSER_RUNS", raising=False)
    assert runs_root(None) == tmp_path / "runs"
    monkeypatch.setenv("COMPOSER_RUNS", "/elsewhere")
    assert str(runs_root(None)) == "/elsewhere"
    assert runs_root(tmp_path / "mine") == tmp_path / "mine"


def test_a_run_is_found_by_latest_name_beginning_and_path(tmp_path):
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    assert find_run("latest", tmp_path) == second
    assert find_run(first.name, tmp_path) == first
    assert find_run("fir", tmp_path) == first
    assert find_run(str(first.path), tmp_path / "elsewhere") == first


def test_no_run_and_several_runs_are_told_apart(tmp_path):
    fix = "\n  fix: --runs DIR, or COMPOSER_RUNS, names the folder that holds runs"
    with pytest.raises(UsageError) as caught:
        find_run("latest", tmp_path)
    assert str(caught.value) == f"{tmp_path}: no run yet{fix}"
    names = sorted(make(tmp_path).name for _ in range(2))
    with pytest.raises(UsageError) as caught:
        find_run("nonesuch", tmp_path)
    assert str(caught.value) == f"{tmp_path}: no run is called 'nonesuch'{fix}"
    with pytest.raises(UsageError) as caught:
        find_run("fix", tmp_path)
    expected = f"{tmp_path}: several runs begin with 'fix': {', '.join(names)}\n  fix: give the whole name"
    assert str(caught.value) == expected


def test_only_complete_checkpoints_are_listed_oldest_first_by_number(tmp_path):
    run = make(tmp_path)
    fill(run, 9, 10, 100)
    (run.checkpoints / "step_11").mkdir()
    (run.checkpoints / ".step_12.partial").mkdir()
    (run.checkpoints / "step_10" / MARKER).unlink()
    assert run.complete_checkpoints() == [(9, run.checkpoints / "step_9"), (100, run.checkpoints / "step_100")]


def test_a_new_checkpoint_clears_old_ones_and_what_killed_writers_left(tmp_path):
    run = make(tmp_path)
    fill(run, 1, 2)
    for leftover in ("step_3", ".step_4.partial", ".step_2.old"):
        (run.checkpoints / leftover).mkdir()
        (run.checkpoints / leftover / "weights").write_text("half")
    fill(run, 5, keep=2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_2", "step_5"]
    assert (run.checkpoints / "step_2" / "weights").read_text() == "2"


def test_a_checkpoint_moved_aside_by_a_killed_writer_is_listed_and_put_back(tmp_path):
    run = make(tmp_path)
    fill(run, 2)
    (run.checkpoints / "step_2").rename(run.checkpoints / ".step_2.old")
    assert run.complete_checkpoints() == [(2, run.checkpoints / ".step_2.old")]
    fill(run, 4)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_2", "step_4"]


def test_the_trained_model_is_there_once_it_is_complete(tmp_path):
    run = make(tmp_path)
    assert run.complete_model() is None
    with run.trained_model() as folder:
        (folder / "weights").write_text("w")
        assert run.complete_model() is None
    assert run.complete_model() == run.path / "model"


def test_a_run_that_no_worker_took_is_new(tmp_path):
    assert make(tmp_path).state() == RunState("new")


@pytest.mark.parametrize(
    ("event", "state"), [("finished", "done"), ("stopped", "stopped"), ("failed", "failed")], ids=lambda word: word
)
def test_the_last_end_event_is_the_state(tmp_path, event, state):
    run = make(tmp_path)
    run.lock()
    run.event("started")
    run.event(event, reason="why")
    run.event("warning", reason="the report came later")
    assert run.state() == RunState(state, "why")


def test_a_run_started_again_is_running_while_its_process_lives(tmp_path):
    run = make(tmp_path)
    run.event("stopped", reason="first time")
    run.lock()
    run.event("started")
    assert run.state() == RunState("running")


def test_a_run_whose_process_is_gone_has_failed(tmp_path):
    run = make(tmp_path)
    code = "import sys; from pathlib import Path; from composer_core.run.directory import RunDirectory as R;"
    subprocess.run([sys.executable, "-c", code + "R(Path(sys.argv[1])).lock()", str(run.path)], check=True)
    run.event("started")
    assert run.state() == RunState("failed", "its process ended without a word (killed, or the machine went down)")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_that_nobody_reaps_has_failed(tmp_path):
    # PID 1 of a container need not reap, and then the dead process stays in the table for good
    run = make(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from composer_core.run.directory import RunDirectory as R;"
        "R(Path(sys.argv[1])).lock(); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        run.event("started")
        assert run.state() == RunState("running")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # over, and left as it is
        assert run.state().state == "failed"


def test_a_process_id_taken_over_by_another_process_is_not_the_run(tmp_path):
    run = make(tmp_path)
    run.event("started")
    run.write_json("lock.json", {"pid": os.getpid(), "process_start": "1", "host": socket.gethostname(), "time": 0})
    assert run.state().state == "failed"
