import signal
import textwrap

import pytest

from composer_core.errors import UsageError
from composer_core.jobs import Job, JobHandle, JobState, JobStatus
from composer_core.plugins.builtin_settings import InlineSettings
from composer_core.run.directory import RunState, create_run
from composer_core.run.inline import InlineExecutor


@pytest.fixture
def directory(tmp_path):
    return create_run(tmp_path, "r")


def job(directory, code, **env):
    return Job(name="r", argv=("-c", textwrap.dedent(code)), run_dir=directory.path, env=env)


def executor(**settings):
    return InlineExecutor(InlineSettings(**settings))


def test_render_shows_the_command_and_what_is_added_to_the_environment(directory):
    plan = Job(
        name="r", argv=("-m", "composer_core.run.worker", "a b/plan.json"), run_dir=directory.path, env={"A": "1"}
    )
    text = executor(python="py", threads=2).render(plan)
    assert text == {"command": "A=1 OMP_NUM_THREADS=2 py -m composer_core.run.worker 'a b/plan.json'"}


@pytest.mark.parametrize("code", [0, 2, 5], ids=str)
def test_the_exit_code_is_the_workers(directory, code):
    inline = executor()
    assert inline.collect(inline.launch(job(directory, f"import sys; sys.exit({code})"))) == code


def test_the_worker_gets_the_jobs_environment_the_threads_and_quiet_libraries(directory, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")  # what the user sets wins
    code = """
        import os, sys
        names = ("A", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY")
        sys.exit([os.environ[name] for name in names] != ["1", "3", "false", "info"])
    """
    inline = executor(threads=3)
    assert inline.collect(inline.launch(job(directory, code, A="1"))) == 0


def test_an_interpreter_that_is_not_there_is_a_usage_error(directory):
    with pytest.raises(UsageError) as caught:
        executor(python="/nonesuch/python").launch(job(directory, ""))
    assert str(caught.value) == "executor.python: cannot run /nonesuch/python: No such file or directory"


def test_a_killed_worker_is_a_failure_that_names_the_last_checkpoint(directory, capsys):
    for step in (10, 20):
        with directory.checkpoint(step, keep=3) as folder:
            (folder / "weights").write_text("w")
    inline = executor()
    code = "import os; os.kill(os.getpid(), 9)"
    assert inline.collect(inline.launch(job(directory, code))) == 4
    message = (
        "the worker was killed by SIGKILL (by the system when memory runs out); "
        "last complete checkpoint: checkpoints/step_20"
    )
    assert capsys.readouterr().err == message + "\n"
    assert directory.state() == RunState("failed", message)


def test_a_worker_that_is_killed_after_the_run_was_done_has_not_failed(directory, capsys):
    directory.event("finished", reason="", exit_code=0)
    inline = executor()
    code = "import os; os.kill(os.getpid(), 9)"
    assert inline.collect(inline.launch(job(directory, code))) == 0
    assert capsys.readouterr().err == (
        "the worker was killed by SIGKILL (by the system when memory runs out) after the run was done; the report may "
        "be missing\n"
    )
    assert directory.state() == RunState("done", "")


def test_a_job_is_running_until_it_is_cancelled(directory):
    inline = executor()
    (handle,) = inline.launch(job(directory, "import time; time.sleep(60)"))
    assert inline.poll(handle) == JobStatus(JobState.RUNNING)
    inline.cancel(handle)
    assert inline.collect([handle]) == 5
    assert inline.poll(handle) == JobStatus(JobState.CANCELLED, -signal.SIGTERM)
    assert directory.state() == RunState("stopped", "stopped before the worker was up; last complete checkpoint: none")


@pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (4, JobState.FAILED)], ids=["done", "failed"])
def test_poll_reads_the_exit_code(directory, code, state):
    inline = executor()
    handles = inline.launch(job(directory, f"import sys; sys.exit({code})"))
    inline.collect(handles)
    assert inline.poll(handles[0]) == JobStatus(state, code)


def test_a_job_of_another_process_is_unknown():
    assert executor().poll(JobHandle("inline", 0, "1")).state is JobState.UNKNOWN


def test_the_log_comes_whole_and_once_while_it_is_written(directory):
    code = """
        import sys, time
        with open(sys.argv[1], "w") as log:
            for text in ("one\\n", "tw", "o\\nthr", "ee"):
                log.write(text)
                log.flush()
                time.sleep(0.3)
    """
    inline = executor()
    log = str(directory.logs / "worker.log")
    started = Job(name="r", argv=("-c", textwrap.dedent(code), log), run_dir=directory.path)
    (handle,) = inline.launch(started)
    assert list(inline.stream_logs(handle)) == ["one", "two", "three"]


def test_an_interrupt_of_this_process_alone_reaches_the_worker_as_a_wish_to_stop(directory):
    code = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    """
    inline = executor()
    handles = inline.launch(job(directory, "import time; time.sleep(0.3)\n" + textwrap.dedent(code)))
    assert inline.collect(handles) == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_kills_a_worker_that_does_not_stop(directory, capsys):
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.3)
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.2)
        time.sleep(60)
    """
    inline = executor()
    assert inline.collect(inline.launch(job(directory, code))) == 130
    assert capsys.readouterr().err == "interrupted twice; last complete checkpoint: none\n"
    assert directory.state().state == "failed"
