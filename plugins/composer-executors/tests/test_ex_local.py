import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Thread

import pytest

from composer_core.errors import RunFailed, UsageError
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_core.run.doctor import Finding, Level
from composer_core.run.processes import process_start
from composer_executors.local import LocalService
from composer_executors.service import Replica
from composer_executors.settings import LocalSettings

PATIENCE_SECONDS = 30


def wait_for(condition, seconds=PATIENCE_SECONDS):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return found


def is_gone(pid):
    return process_start(pid) == ""


def number_in(path):
    """What a process wrote there with a line break behind it."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


def keeper_of(handle):
    """The guard's one child."""
    children = Path(f"/proc/{handle.id}/task/{handle.id}/children")
    return int(wait_for(children.read_text).split()[0])


class Place:
    """A service with what a test starts on it."""

    def __init__(self, folder):
        self.folder = folder
        self.job = f"job-{os.getpid()}-{folder.name}"
        self.service = self.make()
        self.handles = []

    def make(self, **settings):
        return LocalService(LocalSettings(**{"stop_seconds": 0.3, **settings}))

    def replica(self, command, *, rank=0, world=1, env=None, time_limit_s=None, secrets=None):
        folder = self.folder / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
        env, secrets = env or {}, secrets or {}
        return Replica(self.job, rank, world, 0, tuple(command), env, folder, time_limit_s, None, secrets)

    def python(self, code, *arguments, **fields):
        return self.replica((sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)), **fields)

    def start(self, *replicas, service=None):
        started = list((service or self.service).submit(replicas))
        self.handles += started
        return started[0] if len(started) == 1 else started

    def status(self, handle):
        return self.service.poll([handle])[0]

    def end(self, handle):
        def over():
            status = self.status(handle)
            return status if status.state.over else None

        return wait_for(over)

    def log(self, handle):
        log = b""
        while more := self.service.log(handle, len(log)):
            log += more
        return log.decode()


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for handle in made.handles:
        if handle.facts["start"]:
            made.service.kill(handle)
    assert [made.service.remains(handle) for handle in made.handles] == [""] * len(made.handles)
    assert made.service.leftovers(made.job) == []


# -- how a replica ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", JobStatus(JobState.SUCCEEDED, 0)),
        ("raise SystemExit(3)", JobStatus(JobState.FAILED, 3)),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            JobStatus(JobState.FAILED, -9, "was killed by SIGKILL (by the system when memory runs out)"),
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            JobStatus(JobState.FAILED, -11, "was killed by SIGSEGV"),
        ),
    ],
    ids=["success", "exit-3", "killed", "crashed"],
)
def test_the_status_says_how_the_command_ended(place, code, status):
    assert place.end(place.start(place.python(code))) == status


def test_any_later_process_reads_the_end(place):
    handle = place.start(place.python("raise SystemExit(7)"))
    place.end(handle)
    text = json.dumps({**vars(handle), "facts": dict(handle.facts)})
    code = """
        import json, sys
        from composer_core.jobs import JobHandle
        from composer_executors.local import LocalService
        from composer_executors.settings import LocalSettings
        status, = LocalService(LocalSettings()).poll([JobHandle(**json.loads(sys.argv[1]))])
        print(status.state, status.exit_code)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), text]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "failed 7\n"


def test_a_program_that_is_not_there_is_a_usage_error(place):
    with pytest.raises(UsageError) as caught:
        place.start(place.replica(["/nonesuch/python", "-V"]))
    assert str(caught.value) == "executor.python: cannot run /nonesuch/python: no such program"


def test_a_program_that_cannot_be_run_is_a_failure_with_the_systems_words(place, tmp_path):
    program = tmp_path / "program"
    program.write_text("no interpreter line, and no program either")
    program.chmod(0o755)
    handle = place.start(place.replica([str(program)]))
    assert place.end(handle) == JobStatus(JobState.FAILED, 127, f"cannot run {program}: Exec format error")


def test_a_second_launch_in_the_same_folder_keeps_the_log_and_takes_no_old_end_for_its_own(place):
    first = place.start(place.python("print('one'); raise SystemExit(3)"))
    place.end(first)
    second = place.start(place.python("import time; print('two', flush=True); time.sleep(600)"))
    wait_for(lambda: place.log(second) == "two\n")
    assert place.status(second) == JobStatus(JobState.RUNNING)
    assert place.log(first) == "one\ntwo\n"
    assert place.status(first).state is JobState.FAILED  # and not RUNNING
    place.service.kill(second)
    assert place.end(second).state is JobState.CANCELLED


# -- its environment ---------------------------------------------------------------------------------------------------


def test_each_replica_gets_its_environment_over_that_of_the_machine(place, monkeypatch):
    monkeypatch.setenv("COMPOSER_PARENT", "1")  # of a run that starts another: not for the other's worker
    monkeypatch.setenv("KEPT", "machine")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = """
        import os
        names = ("COMPOSER_RANK", "COMPOSER_PARENT", "KEPT", "OMP_NUM_THREADS", "SECRET")
        print(*(os.environ.get(name) for name in names), os.nice(0))
    """
    replicas = [
        place.python(code, rank=rank, world=4, env={"COMPOSER_RANK": str(rank)}, secrets={"SECRET": "s"})
        for rank in range(4)
    ]
    handles = place.start(*replicas, service=place.make(threads=2, nice=3))
    assert [place.end(handle).state for handle in handles] == [JobState.SUCCEEDED] * 4
    assert [place.log(handle) for handle in handles] == [
        f"{rank} None machine 2 s {os.nice(0) + 3}\n" for rank in range(4)
    ]


def test_four_replicas_run_at_the_same_time(place, tmp_path):
    code = """
        import pathlib, sys, time
        folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
        (folder / f"up-{rank}").touch()
        while len(list(folder.glob("up-*"))) < 4:
            time.sleep(0.01)
    """
    handles = place.start(*[place.python(code, tmp_path, rank, rank=rank, world=4) for rank in range(4)])
    assert [place.end(handle).state for handle in handles] == [JobState.SUCCEEDED] * 4


def test_a_secret_stands_in_no_file_and_on_no_command_line(place, tmp_path):
    secret = "sesame-9f3a"
    replica = place.python("import time; time.sleep(600)", env={"COMPOSER_RANK": "0"}, secrets={"TOKEN": secret})
    shown = place.service.render([replica])
    handle = place.start(replica)
    keeper = keeper_of(handle)
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (handle.id, keeper)]
    place.service.kill(handle)
    place.end(handle)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2  # the log, the end
    assert not any(secret in text for text in [*lines, *files, *shown.values()])


def test_render_shows_the_command_with_what_is_added_to_the_environment(place):
    replica = place.replica(["python", "-c", "a b"], rank=1, env={"COMPOSER_RANK": "1"}, secrets={"HF_TOKEN": ""})
    text = place.make(threads=1).render([replica])
    assert text == {"rank-1": "OMP_NUM_THREADS=1 COMPOSER_RANK=1 HF_TOKEN=... python -c 'a b'"}


# -- its log -----------------------------------------------------------------------------------------------------------


def test_stdout_and_stderr_come_in_order_and_whole_while_it_writes(place):
    code = """
        import os
        for i in range(100_000):
            os.write(1 + i % 2, b"%d\\n" % i)
    """
    handle = place.start(place.python(code))
    log = b""
    while True:
        over = place.status(handle).state.over  # before reading: what came last is still read
        while more := place.service.log(handle, len(log)):
            log += more
        if over:
            break
        time.sleep(0.01)
    assert log == b"".join(b"%d\n" % i for i in range(100_000))


# -- the end of it all -------------------------------------------------------------------------------------------------

STAY = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
time.sleep(600)
"""
FAMILY = f"""
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def start(name, **options):
    subprocess.Popen([sys.executable, "-c", {STAY!r}, str(folder / name)], **options)
start("child")
start("session", start_new_session=True)
if not os.fork():  # a daemon as in the books: its parents are gone at once
    os.setsid()
    if not os.fork():
        start("daemon")
        os._exit(0)
    os._exit(0)
os.wait()
files = [folder / name for name in ("child", "session", "daemon")]
while not all(file.exists() and file.read_text() for file in files):
    time.sleep(0.01)
(folder / "self").write_text(str(os.getpid()) + chr(10))
"""
NAMES = ("self", "child", "session", "daemon")


def family(place, tmp_path, then, **fields):
    """A command with a child, a child in a session of its own and a daemon; their process ids."""
    handle = place.start(place.python(FAMILY + then, tmp_path, **fields))
    wait_for(lambda: number_in(tmp_path / "self"))
    return handle, [number_in(tmp_path / name) for name in NAMES]


SLEEP = "time.sleep(600)\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(folder / 'deaf').touch()\n" + SLEEP


def test_what_a_command_leaves_behind_ends_with_it(place, tmp_path):
    handle, pids = family(place, tmp_path, "raise SystemExit(3)")
    assert place.end(handle) == JobStatus(JobState.FAILED, 3)
    assert all(map(is_gone, pids))
    assert place.service.remains(handle) == ""


def test_kill_leaves_nothing(place, tmp_path):
    handle, pids = family(place, tmp_path, DEAF)
    assert place.service.remains(handle) == f"process {handle.id} on {os.uname().nodename}, with what it started"
    place.service.kill(handle)
    assert all(map(is_gone, pids))
    assert place.service.remains(handle) == ""
    assert place.status(handle) == JobStatus(JobState.CANCELLED, -9, "cancelled")


def test_terminate_asks_the_command_alone_which_may_take_its_time(place, tmp_path):
    then = """
import signal
def stop(number, frame):
    os.kill(int((folder / "child").read_text()), 0)  # raises where it is gone
    raise SystemExit(5)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").touch()
time.sleep(600)
"""
    handle, pids = family(place, tmp_path, then)
    wait_for((tmp_path / "ready").exists)
    place.service.terminate(handle)
    assert place.end(handle) == JobStatus(JobState.CANCELLED, 5, "cancelled")
    assert all(map(is_gone, pids))


def test_a_command_that_ends_well_after_it_was_asked_has_succeeded(place, tmp_path):
    code = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    """
    handle = place.start(place.python(code, tmp_path / "ready"))
    wait_for((tmp_path / "ready").exists)
    place.service.terminate(handle)
    assert place.end(handle) == JobStatus(JobState.SUCCEEDED, 0)


@pytest.mark.parametrize("wish", ["terminate", "kill"])
def test_a_wish_right_after_the_start_is_not_lost(place, wish, tmp_path):
    handles = place.start(*[place.python("import time; time.sleep(600)", rank=rank, world=4) for rank in range(4)])
    for handle in handles:
        getattr(place.service, wish)(handle)
    assert [place.end(handle).state for handle in handles] == [JobState.CANCELLED] * 4


def test_terminate_and_kill_of_one_that_is_over_do_nothing(place):
    handle = place.start(place.python(""))
    place.end(handle)
    place.service.terminate(handle)
    place.service.kill(handle)
    assert place.status(handle) == JobStatus(JobState.SUCCEEDED, 0)


def test_the_time_limit_is_a_wish_first_and_then_the_end(place, tmp_path):
    handle, pids = family(place, tmp_path, DEAF, time_limit_s=1.0)
    assert place.end(handle) == JobStatus(JobState.FAILED, -9, "timeout")
    assert (tmp_path / "deaf").exists()
    assert all(map(is_gone, pids))


def test_a_stop_within_the_grace_keeps_the_exit_code(place):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        time.sleep(600)
    """
    handle = place.start(place.python(code, time_limit_s=0.8), service=place.make(stop_seconds=60))
    assert place.end(handle) == JobStatus(JobState.FAILED, 5, "timeout")


def test_what_was_stopped_can_be_killed_with_all_that_minds_it(place, tmp_path):
    handle, pids = family(place, tmp_path, SLEEP)
    for pid in (pids[0], keeper_of(handle), int(handle.id)):
        os.kill(pid, signal.SIGSTOP)
    place.service.kill(handle)
    assert all(map(is_gone, pids))
    assert place.end(handle).state is JobState.CANCELLED


# -- somebody is killed ------------------------------------------------------------------------------------------------


def test_whatever_runs_dies_with_the_keeper(place, tmp_path):
    handle, pids = family(place, tmp_path, DEAF)
    os.kill(keeper_of(handle), signal.SIGKILL)
    reason = "its keeper was killed by SIGKILL (by the system when memory runs out)"
    assert place.end(handle) == JobStatus(JobState.FAILED, None, reason)
    assert all(map(is_gone, pids))


def test_whatever_runs_dies_with_the_guard(place, tmp_path):
    handle, pids = family(place, tmp_path, DEAF)
    os.kill(int(handle.id), signal.SIGKILL)
    assert place.end(handle) == JobStatus(JobState.FAILED, -9, "its guard was killed")
    assert all(map(is_gone, pids))


def test_the_command_dies_with_guard_and_keeper_and_is_no_success(place, tmp_path):
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n'); time.sleep(600)"
    handle = place.start(place.python(code, tmp_path / "pid"))
    pid = wait_for(lambda: number_in(tmp_path / "pid"))
    keeper = keeper_of(handle)
    os.kill(keeper, signal.SIGSTOP)  # else it could be quicker than the second kill
    os.kill(int(handle.id), signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    reason = "it was killed together with its guard, so nobody wrote how it ended"
    assert place.end(handle) == JobStatus(JobState.FAILED, None, reason)
    wait_for(lambda: is_gone(pid))


LAUNCHER = """
    import dataclasses, json, pathlib, sys, time
    from composer_executors.local import LocalService
    from composer_executors.service import Replica
    from composer_executors.settings import LocalSettings
    detached, folder, job, command = sys.argv[1] == "True", sys.argv[2], sys.argv[3], sys.argv[4:]
    service = LocalService(LocalSettings(stop_seconds=0.3))
    replica = Replica(job, 0, 1, 0, tuple(command), {}, pathlib.Path(folder), None, None, detached=detached)
    print(json.dumps([dataclasses.asdict(handle) for handle in service.submit([replica])]), flush=True)
    time.sleep(600)
"""


def launched_elsewhere(place, tmp_path, *, detached, then):
    """A launcher that was killed after its replica was up: the handle it printed, and the replica's processes."""
    (tmp_path / "rank-0").mkdir()
    command = [sys.executable, "-c", FAMILY + then, str(tmp_path)]
    arguments = [str(detached), str(tmp_path / "rank-0"), place.job, *command]
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        handle = JobHandle(**json.loads(launcher.stdout.readline())[0])
        place.handles.append(handle)
        wait_for(lambda: number_in(tmp_path / "self"))
        if "deaf" in then:
            wait_for((tmp_path / "deaf").exists)
    finally:
        launcher.kill()
        launcher.communicate()
    return handle, [number_in(tmp_path / name) for name in NAMES]


@pytest.mark.parametrize("then", [SLEEP, DEAF], ids=["obedient", "deaf"])
def test_nothing_is_left_of_a_launcher_that_was_killed(place, tmp_path, then):
    handle, pids = launched_elsewhere(place, tmp_path, detached=False, then=then)
    wait_for(lambda: all(map(is_gone, pids)), seconds=2)
    status = place.end(handle)
    assert (status.state, status.reason) == (JobState.FAILED, "the command that started it is gone")


def test_a_detached_replica_outlives_its_launcher_and_obeys_another(place, tmp_path):
    handle, pids = launched_elsewhere(place, tmp_path, detached=True, then=SLEEP)
    time.sleep(0.5)  # as long as its end would take above
    assert not any(map(is_gone, pids))
    assert place.status(handle) == JobStatus(JobState.RUNNING)
    found = place.service.leftovers(place.job)
    assert found == [handle]
    assert place.service.leftovers("another job") == []
    place.service.terminate(found[0])
    assert place.end(handle) == JobStatus(JobState.CANCELLED, -15, "cancelled")
    assert all(map(is_gone, pids))


def test_the_end_of_the_launchers_thread_is_not_the_end_of_the_launcher(place, tmp_path):
    started = []
    thread = Thread(target=lambda: started.append(place.start(place.python("import time; time.sleep(600)"))))
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert place.status(started[0]) == JobStatus(JobState.RUNNING)


# -- whose process it is -----------------------------------------------------------------------------------------------


def test_another_process_with_the_same_id_is_not_the_replica(place, tmp_path):
    handle = place.start(place.python("import time; time.sleep(600)"))
    facts = {**handle.facts, "start": "1", "folder": str(tmp_path / "elsewhere")}
    forged = JobHandle("local", 0, handle.id, 0, facts)
    assert place.status(forged).state is JobState.FAILED
    place.service.terminate(forged)
    place.service.kill(forged)
    assert place.service.remains(forged) == ""
    assert place.status(handle) == JobStatus(JobState.RUNNING)


def test_a_replica_of_another_machine_is_neither_running_nor_over_and_takes_no_signals_here(place):
    handle = place.start(place.python("import time; time.sleep(600)"))
    elsewhere = JobHandle("local", 0, handle.id, 0, {**handle.facts, "host": "node-7"})
    reason = "it was started on node-7, not on this machine"
    assert place.status(elsewhere) == JobStatus(JobState.UNKNOWN, reason=reason)
    here = os.uname().nodename
    assert place.service.remains(elsewhere) == f"a process on node-7, which cannot be seen from {here}"
    with pytest.raises(RunFailed) as caught:
        place.service.kill(elsewhere)
    message = "rank 0 runs on node-7, not on this machine\n  fix: give the command on node-7"
    assert str(caught.value) == message
    assert place.status(handle) == JobStatus(JobState.RUNNING)


# -- odd ones ----------------------------------------------------------------------------------------------------------


def test_processes_that_start_others_faster_than_one_can_look_are_all_ended(place, tmp_path):
    code = """
        import os, pathlib, sys, time
        if os.fork():
            time.sleep(600)
        for _ in range(3000):  # each starts the next one in a session of its own, and is gone
            pathlib.Path(sys.argv[1], "last").write_text(f"{os.getpid()}\\n")
            if os.fork():
                os._exit(0)
            os.setsid()
    """
    handle = place.start(place.python(code, tmp_path))
    wait_for(lambda: number_in(tmp_path / "last"))
    place.service.kill(handle)
    assert place.status(handle).state is JobState.CANCELLED
    assert is_gone(number_in(tmp_path / "last"))
    last = (tmp_path / "last").read_text()
    time.sleep(0.1)
    assert (tmp_path / "last").read_text() == last  # nobody goes on


def test_dead_orphans_are_buried_while_the_command_runs(place, tmp_path):
    code = """
        import os, pathlib, sys, time
        for _ in range(20):
            if not os.fork():
                if not os.fork():
                    os._exit(0)
                os._exit(0)
            os.wait()
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    """
    handle = place.start(place.python(code, tmp_path / "ready"))
    wait_for((tmp_path / "ready").exists)
    keeper = keeper_of(handle)
    children = Path(f"/proc/{keeper}/task/{keeper}/children")
    wait_for(lambda: len(children.read_text().split()) == 1)


def test_the_launcher_buries_its_guards(place):
    handle = place.start(place.python(""))
    wait_for(lambda: is_gone(int(handle.id)))
    place.status(handle)
    assert not Path(f"/proc/{handle.id}").exists()


def test_doctor_starts_a_process_and_sees_that_nothing_is_left(place):
    found = "one was started, left another behind, and both are gone"
    assert list(place.service.examine()) == [Finding("local processes", Level.OK, found)]


def test_doctor_says_that_the_interpreter_is_missing(place):
    found = "executor.python: cannot run /nonesuch: no such program"
    assert list(place.make(python="/nonesuch").examine()) == [Finding("local processes", Level.FAIL, found)]


def test_windows_is_refused_in_words():
    code = """
        import sys
        from composer_core.errors import MissingError
        from composer_executors.plugin import composer_executors
        local = next(one for one in composer_executors() if one.name == "local")
        sys.platform = "win32"
        try:
            local.load()
        except MissingError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == (
        "executor 'local' cannot be loaded from composer_executors.local:local_executor: it needs Linux or macOS\n"
    )
