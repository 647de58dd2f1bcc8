"""The executor over a scripted service: launch, ledger, restarts, deadlines, verdicts, lines."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_place import DONE, RUNNING, FakePlace

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_core.run.directory import RunDirectory
from composer_executors import executor as executor_module
from composer_executors import waiting
from composer_executors.again import prepare_again
from composer_executors.executor import ServiceExecutor
from composer_executors.ledger import Ledger
from composer_executors.lines import Lines, stream
from composer_executors.settings import JobSettings
from composer_executors.verdict import worst

PENDING = JobStatus(JobState.PENDING, reason="Resources")
UNKNOWN = JobStatus(JobState.UNKNOWN, reason="connection refused")


def failed(code=None, reason=""):
    return JobStatus(JobState.FAILED, code, reason)


@pytest.fixture
def place():
    return FakePlace()


@pytest.fixture
def make(place):
    def make(**settings):
        quick = {"poll_seconds": 0.02, "stop_seconds": 0.3, "unknown_minutes": 0.003, **settings}
        return ServiceExecutor(place, JobSettings(**quick))

    return make


@pytest.fixture
def job(tmp_path):
    def job(**more):
        return Job(**{"name": "job-1", "argv": ("-c", "pass"), "run_dir": tmp_path, **more})

    return job


# -- launch ------------------------------------------------------------------------------------------------------------


def test_a_replica_gets_command_contract_settings_and_secrets(place, make, job, monkeypatch, tmp_path):
    monkeypatch.setenv("KEY", "s3cret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    executor = make(python="/opt/py", env={"A": "settings", "B": "2"}, secrets=["KEY"])
    executor.launch(job(replicas=2, env={"A": "job"}, time_limit_s=60, store="s3://bucket/run"))
    second = place.submitted[1]
    assert (second.job, second.rank, second.world, second.attempt) == ("job-1", 1, 2, 0)
    assert second.command == ("/opt/py", "-c", "pass")
    assert second.secrets == {"KEY": "s3cret"}
    assert second.time_limit_s == 60.3  # and stop_seconds to save
    assert second.folder == tmp_path / "replicas" / "1" / "attempt_0"
    assert second.folder.is_dir()
    assert {name: second.env.get(name) for name in ("A", "B", "KEY", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED")} == {
        "A": "job", "B": "2", "KEY": None, "TOKENIZERS_PARALLELISM": None, "PYTHONUNBUFFERED": "1"
    }  # fmt: skip
    assert {name: value for name, value in second.env.items() if name.startswith("COMPOSER_")} == {
        "COMPOSER_RUN_ID": "job-1",
        "COMPOSER_RANK": "1",
        "COMPOSER_WORLD_SIZE": "2",
        "COMPOSER_ATTEMPT": "0",
        "COMPOSER_STORE_URI": "s3://bucket/run",
    }
    assert "s3cret" not in (tmp_path / "jobs.json").read_text() + repr(second)


def test_a_secret_that_is_not_set_is_named_before_anything_starts(place, make, job, monkeypatch):
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(MissingError) as caught:
        make(secrets=["KEY"]).launch(job())
    assert str(caught.value) == "executor: the environment variable KEY is not set\n  fix: export KEY=..."
    assert place.submitted == []


def test_a_launch_that_fails_ends_what_it_had_started(place, make, job, tmp_path):
    place.fail_at = 2
    with pytest.raises(RunFailed, match=r"^no room$"):
        make().launch(job(replicas=3))
    assert place.ended == [("KILL", 0, 0), ("KILL", 1, 0)]
    entries = Ledger(tmp_path).read().entries
    assert [(entry.state, entry.reason) for entry in entries] == [
        (JobState.CANCELLED, "not all replicas could be started")
    ] * 3


def test_a_launch_that_cannot_be_undone_says_what_is_left(place, make, job, monkeypatch):
    monkeypatch.setattr(executor_module, "GONE_S", 0.0)
    place.fail_at, place.lasting = 1, "process 7"
    with pytest.raises(RunFailed) as caught:
        make().launch(job(replicas=2))
    assert str(caught.value) == "no room; still there: process 7\n  fix: composer-run reap"


def test_the_ledger_knows_of_a_replica_before_it_is_submitted(place, make, job, tmp_path):
    seen = []
    real = place.submit

    def submit(replicas):
        seen.append([(entry.rank, entry.id) for entry in Ledger(tmp_path).read().entries])
        yield from real(replicas)

    place.submit = submit
    make().launch(job(replicas=2))
    assert seen == [[(0, ""), (1, "")]]
    assert [entry.id for entry in Ledger(tmp_path).read().entries] == ["f1", "f2"]


def test_a_run_that_is_not_over_is_not_launched_again(place, make, job, tmp_path):
    place.script[1, 0] = [RUNNING]
    make().launch(job(replicas=2))
    with pytest.raises(UsageError) as caught:
        make().launch(job(replicas=2))
    assert str(caught.value) == (
        f"run {tmp_path.name} is not over: replica 1 of an earlier launch\n"
        f"  fix: composer-run stop {tmp_path.name} --kill"
    )


def test_a_second_launch_counts_attempts_on_and_gets_folders_of_its_own(place, make, job):
    executor = make()
    assert executor.collect(executor.launch(job())) == 0
    (handle,) = executor.launch(job())
    assert (handle.attempt, place.submitted[1].folder.name) == (1, "attempt_1")


def test_a_replica_whose_launcher_was_killed_while_it_was_submitted_is_found_by_its_label(place, make, job, tmp_path):
    code = (
        "import sys; from pathlib import Path; from composer_core.jobs import Job\n"
        "from composer_executors.ledger import Ledger\n"
        "path = Path(sys.argv[1]); Ledger(path).begin('fake', Job('job-1', ('-c', 'pass'), path), ranks=[0, 1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)  # it ended before it had an id
    place.leftovers = lambda name: [JobHandle("fake", 1, "f9", 0, {"job": name})]
    place.script[1, 0] = [RUNNING]
    found = make().attach(tmp_path)
    assert [(handle.id, status.state, status.reason) for handle, status in found] == [
        ("", JobState.FAILED, "the launcher ended while it was submitted"),
        ("f9", JobState.RUNNING, ""),
    ]


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_an_end_stays_whatever_the_service_forgets(place, make, job):
    place.script[0, 0] = [DONE, UNKNOWN]
    executor = make()
    (handle,) = executor.launch(job())
    assert [executor.poll(handle).state for _ in range(2)] == [JobState.SUCCEEDED] * 2


def test_many_replicas_are_one_question(place, make, job, tmp_path):
    executor = make()
    executor.launch(job(replicas=40))
    place.asked = 0
    assert len(executor.attach(tmp_path)) == 40
    assert place.asked == 1


def test_nothing_is_written_where_nothing_changed(place, make, job, tmp_path):
    place.script[0, 0] = [RUNNING]
    executor = make()
    (handle,) = executor.launch(job())
    executor.poll(handle)
    before = (tmp_path / "jobs.json").stat().st_ino  # a file that is replaced is another one
    executor.poll(handle)
    assert (tmp_path / "jobs.json").stat().st_ino == before


def test_a_ledger_of_another_version_is_refused_with_its_place(make, tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"version": 2}))
    with pytest.raises(RunFailed) as caught:
        make().attach(tmp_path)
    assert str(caught.value) == (
        f"{path}: not a ledger of version 1: ValueError: version 2\n"
        "  fix: ask the Composer that launched the run, or its service, what still runs"
    )


def test_writers_in_several_processes_lose_nothing(make, job, tmp_path):
    executor = make()
    handles = executor.launch(job(replicas=8))
    threads = [
        threading.Thread(target=lambda h=handle: Ledger(tmp_path).note([(h, failed(h.rank))])) for handle in handles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.exit_code for entry in Ledger(tmp_path).read().entries] == list(range(8))


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([], 0), ([0, 0], 0), ([0, 5], 5), ([5, 2], 2), ([4, 5, 3], 4), ([5, 4], 4)],
    ids=["nobody", "done", "stopped", "mistake-over-stop", "highest-failure", "failure-over-stop"],
)
def test_the_worst_code_is_a_failures_then_a_stops(codes, expected):
    assert worst(codes) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (failed(3), 3), (failed(), 4), (failed(-9), 4), (failed(137, "oom"), 4), (failed(0), 4),
        (JobStatus(JobState.CANCELLED), 5),
    ],
    ids=["its-own", "without-a-code", "signal", "shells-code", "failed-with-0", "cancelled"],
)  # fmt: skip
def test_the_exit_code_of_a_replica(place, make, job, status, expected):
    place.script[0, 0] = [RUNNING, status]
    executor = make()
    assert executor.collect(executor.launch(job())) == expected


@pytest.mark.parametrize(
    ("status", "starts"),
    [
        (failed(4), 3), (failed(None, "preempted"), 3), (failed(2), 1), (failed(3), 1), (failed(5), 1),
        (failed(None, "timeout"), 1),
    ],
    ids=["failed", "preempted", "mistake", "missing", "stopped", "timeout"],
)  # fmt: skip
def test_only_what_another_try_can_repair_is_started_again(place, make, job, status, starts):
    place.script = {(0, attempt): [status] for attempt in range(4)}
    executor = make(restarts=2)
    assert executor.collect(executor.launch(job())) != 0
    assert [replica.attempt for replica in place.submitted] == list(range(starts))


def test_the_other_replicas_are_left_in_peace_by_a_restart(place, make, job):
    place.script = {(0, 0): [RUNNING] * 8 + [DONE], (1, 0): [RUNNING, failed(4)], (1, 1): [RUNNING, DONE]}
    executor = make(restarts=1)
    assert executor.collect(executor.launch(job(replicas=2))) == 0
    assert [(replica.rank, replica.attempt) for replica in place.submitted] == [(0, 0), (1, 0), (1, 1)]
    assert place.ended == []


def test_a_run_that_was_asked_to_stop_is_not_started_again(place, make, job, tmp_path):
    place.script[0, 0] = [failed(4)]
    RunDirectory(tmp_path).stop_file.write_text("enough")
    executor = make(restarts=2)
    assert executor.collect(executor.launch(job())) == 4
    assert len(place.submitted) == 1


def test_what_does_not_start_in_time_ends_the_job_with_what_it_waited_for(place, make, job, capsys):
    place.script = {(0, 0): [PENDING], (1, 0): [RUNNING]}
    executor = make(start_minutes=0.002)
    handles = executor.launch(job(replicas=2))
    assert executor.collect(handles) == 4
    assert sorted(place.ended) == [("KILL", 0, 0), ("KILL", 1, 0)]
    assert {executor.poll(handle).reason for handle in handles} == {"did not start within 0.002 minutes: Resources"}
    assert capsys.readouterr().err.splitlines() == [
        "replica 0 waits for fake: Resources",
        "replica 0 failed (did not start within 0.002 minutes: Resources)",
    ]


def test_what_its_service_lets_run_too_long_is_ended(place, make, job, monkeypatch):
    monkeypatch.setattr(waiting, "MARGIN_S", 0.0)
    place.script[0, 0] = [RUNNING]
    executor = make()
    (handle,) = executor.launch(job(time_limit_s=0.1))
    assert executor.collect([handle]) == 4
    assert (executor.poll(handle), place.ended) == (failed(None, "timeout"), [("KILL", 0, 0)])


def test_a_service_that_does_not_answer_for_a_moment_is_borne_with(place, make, job):
    place.script[0, 0] = [RUNNING, UNKNOWN, UNKNOWN, RUNNING, UNKNOWN, DONE]
    executor = make(unknown_minutes=1)
    assert executor.collect(executor.launch(job())) == 0


def test_what_its_service_no_longer_knows_has_failed(place, make, job):
    place.script[0, 0] = [RUNNING, UNKNOWN]
    executor = make()
    (handle,) = executor.launch(job())
    assert executor.collect([handle]) == 4
    assert executor.poll(handle) == failed(None, "fake no longer knows it: connection refused")


def interrupt(after, *signals):
    def send():
        for number in signals:
            time.sleep(after)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_asks_to_stop_and_ends_what_does_not(place, make, job, number):
    place.script[0, 0] = [RUNNING]
    executor = make(stop_seconds=0.2)
    (handle,) = executor.launch(job())
    interrupt(0.2, number)
    assert executor.collect([handle]) == 5
    assert place.ended == [("TERM", 0, 0), ("KILL", 0, 0)]
    assert executor.poll(handle) == JobStatus(JobState.CANCELLED, reason="did not stop within 0.2 s")


def test_the_second_interrupt_ends_at_once(place, make, job):
    place.script[0, 0] = [RUNNING]
    executor = make(stop_seconds=60)
    handles = executor.launch(job())
    interrupt(0.2, signal.SIGINT, signal.SIGINT)
    assert executor.collect(handles) == 130
    assert place.ended == [("TERM", 0, 0), ("KILL", 0, 0)]


def test_what_remains_after_a_cancel_is_said(place, make, job, monkeypatch):
    monkeypatch.setattr(executor_module, "GONE_S", 0.0)
    place.script[0, 0] = [RUNNING]
    place.lasting = "process 7 on this machine"
    executor = make(stop_seconds=0.1)
    (handle,) = executor.launch(job())
    with pytest.raises(RunFailed) as caught:
        executor.cancel(handle)
    assert str(caught.value) == "fake: still there: process 7 on this machine"


# -- a worker ----------------------------------------------------------------------------------------------------------

WORKER = ("-m", "composer_core.run.worker", "plan.json")


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    for step in (10, 20):
        with directory.checkpoint(step, keep=3) as folder:
            (folder / "weights").write_text("w")
    return directory


def test_a_worker_goes_on_from_its_newest_checkpoint(directory, job):
    directory.write_json("lock.json", {"pid": 1, "host": "elsewhere"})
    argv, where = prepare_again(job(argv=(*WORKER, "--quiet", "--resume", "10")))
    assert (argv, where) == ((*WORKER, "--quiet", "--resume", "20"), "the checkpoint of step 20")
    assert not (directory.path / "lock.json").exists()  # else the next one would be refused


def test_a_worker_without_a_checkpoint_begins_anew_and_sets_its_lines_aside(tmp_path, job):
    directory = RunDirectory(tmp_path)
    directory.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    argv, where = prepare_again(job(argv=WORKER))
    assert (argv, where) == (WORKER, "the beginning, as there is no checkpoint")
    assert directory.metrics.read_text() == ""
    assert (tmp_path / "metrics.dropped.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_worker_that_was_killed_has_its_end_written_for_it(place, make, job, directory, capsys):
    place.script[0, 0] = [RUNNING, failed(137, "oom")]
    executor = make()
    assert executor.collect(executor.launch(job(argv=WORKER))) == 4
    event = json.loads(directory.events.read_text().splitlines()[-1])
    reason = "replica 0 failed (oom), exit code 137; last complete checkpoint: checkpoints/step_20"
    assert (event["event"], event["reason"], event["exit_code"]) == ("failed", reason, 4)
    assert capsys.readouterr().err == reason + "\n"


def test_a_worker_that_said_how_it_ended_is_not_contradicted(place, make, job, directory, capsys):
    place.script[0, 0] = [RUNNING, failed(4)]
    executor = make()
    handles = executor.launch(job(argv=WORKER))
    directory.event("failed", reason="the loss is NaN", exit_code=4)
    assert executor.collect(handles) == 4
    assert len(directory.events.read_text().splitlines()) == 1
    assert capsys.readouterr().err == ""


# -- lines -------------------------------------------------------------------------------------------------------------


def test_rank_0_speaks_on_stderr_and_a_failed_rank_says_its_last_lines(place, make, job, capsys):
    place.script[1, 0] = [RUNNING, failed(4)]
    place.logs = {(0, 0): [b"step 1\nst", b"ep 2\n"], (1, 0): [b"starting\nboom"]}
    executor = make()
    assert executor.collect(executor.launch(job(replicas=2, argv=("-c", "x")))) == 4
    assert capsys.readouterr().err == (
        "step 1\nstep 2\nlast lines of replica 1:\n  starting\n  boom\nreplica 1 failed, exit code 4\n"
    )


def test_a_log_that_cannot_be_read_for_a_while_loses_and_repeats_nothing(place):
    place.logs[0, 0] = [b"a\nb", OSError("gone"), RunFailed("still gone"), b"c\n", b"", b"d\n\xc3", b"", b"\xa9\ne"]
    overs = iter([False, False, False, True])
    lines = Lines(place, JobHandle("fake", 0, "f1"))
    slept = []
    found = list(stream(lines, lambda: next(overs), follow=True, last=None, patience_s=60, sleep=slept.append))
    assert found == ["a", "bc", "d", "é", "e"]
    assert slept[:2] == [1.0, 2.0]  # the failures; then it waits for new lines


def test_a_log_that_can_no_longer_be_read_is_a_failure(place):
    place.logs[0, 0] = [OSError("no route to host")] * 9
    lines = Lines(place, JobHandle("fake", 0, "f1"))
    with pytest.raises(RunFailed, match=r"^the log cannot be read any more: no route to host$"):
        list(stream(lines, lambda: False, follow=True, last=None, patience_s=5, sleep=lambda seconds: None))


@pytest.mark.parametrize(("last", "expected"), [(2, ["b", "c"]), (0, []), (9, ["a", "b", "c"])], ids=str)
def test_the_last_lines_of_what_is_over(place, last, expected):
    place.logs[0, 0] = [b"a\nb\nc"]
    lines = Lines(place, JobHandle("fake", 0, "f1"))
    assert list(stream(lines, lambda: True, follow=True, last=last, patience_s=1)) == expected
