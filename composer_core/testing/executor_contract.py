# ruff: noqa: D102 - the name of a test is its sentence
"""What every executor must do, seen from outside: small programs are started, watched, ended, found again.

    from composer_core.testing.executor_contract import ExecutorContract

    class TestGrid(ExecutorContract):
        @pytest.fixture()
        def block(self):
            return {"use": "grid", "poll_seconds": 0.2, "stop_seconds": 3, "unknown_minutes": 0.05}

The executor is made from that block through the registry, as a run does it; a second process does the same. So the
plugin must be installed, and the waits in the block should be short. Every job is ended, whatever a test finds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_core.errors import MissingError, RunFailed
from composer_core.jobs import Attaches, Examines, Executor, Job, JobHandle, JobState, Reaps

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
_SAY = (
    "import json, os; names = ('RUN_ID', 'RANK', 'WORLD_SIZE', 'ATTEMPT', 'STORE_URI'); "
    "print(json.dumps([os.environ['COMPOSER_' + name] for name in names]))"
)
_NUMBERS = "import time\nfor n in range(200):\n    print(n, flush=True)\n    time.sleep(1.5 if n == 99 else 0)"
_LAUNCHER = """
import json, sys, time
from pathlib import Path
from composer_core.jobs import Job
from composer_core.testing.executor_contract import made
block, job, run_dir = json.loads(sys.argv[1])
job = Job(**{**job, "argv": tuple(job["argv"]), "run_dir": Path(run_dir)})
made(block).launch(job)
print("launched", flush=True)
time.sleep(600)
"""


def made(block: Mapping[str, Any]) -> Executor:
    """The executor of a block, made as a run makes it."""
    from composer_core.plugins.contributions import Kind
    from composer_core.plugins.registry import Registry

    _, contribution = Registry.discover().get(Kind.EXECUTOR, block["use"])
    settings = contribution.settings(**{name: value for name, value in block.items() if name != "use"})
    executor: Executor = contribution.load()(settings)
    return executor


class ExecutorContract:
    """Give the fixture `block`; override what stands above the first test where the service is slow or differs."""

    patience_s = 30.0
    """How long the service may take for anything a test waits for."""
    unknown_id = "999999"
    """An id that the service never gave."""
    time_limit_s = 1.0

    @pytest.fixture
    def block(self) -> Mapping[str, Any]:
        """The spec's block `executor:`, `use` included."""
        raise NotImplementedError("give the fixture `block`: the spec's block `executor:`, `use` included")

    @pytest.fixture
    def readable(self) -> Sequence[Path]:
        """Folders of the service that other users can read, beside the run directory."""
        return ()

    def bring_time_limit_closer(self, handle: JobHandle) -> None:
        """For a service that counts in minutes; called when the replica runs."""

    def fail_after_first(self, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the service fail once it has started the first replica of a launch."""
        submit = executor.service.submit

        def broken(replicas: Sequence[Any]) -> Iterator[JobHandle]:
            yield next(iter(submit(replicas)))
            raise RunFailed("the service went away")

        monkeypatch.setattr(executor.service, "submit", broken)

    def forget(self, run_dir: Path) -> None:
        """Make a replica that ran, of a run that nobody watched, one that the service does not know."""
        ledger = run_dir / "jobs.json"
        document = json.loads(ledger.read_text())
        gone = {"id": self.unknown_id, "state": "running", "reason": "", "exit_code": None, "ended": None}
        document["replicas"] = [{**entry, **gone} for entry in document["replicas"]]
        ledger.write_text(json.dumps(document))
        shutil.rmtree(run_dir / "replicas")

    # -- what the tests share ------------------------------------------------------------------------------------------

    @pytest.fixture
    def make(self, block: Mapping[str, Any]) -> Callable[..., Any]:
        """The executor, with more settings."""
        return lambda **more: made({**block, **more})

    @pytest.fixture
    def job(self, tmp_path: Path, make: Callable[..., Any]) -> Iterator[Callable[..., Job]]:
        """Makes jobs in `tmp_path`, and ends what is left of them."""
        run_dir = tmp_path / "run"
        run_dir.mkdir()

        def job(code: str, *arguments: str, **more: Any) -> Job:
            return Job(f"contract-{secrets.token_hex(4)}", ("-c", code, *arguments), run_dir, **more)

        yield job
        executor = make()
        for handle, status in executor.attach(run_dir):
            if not status.state.over:
                executor.cancel(handle)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something, with patience."""
        deadline = time.monotonic() + self.patience_s
        while not true():
            assert time.monotonic() < deadline, f"not within {self.patience_s:g} s"
            time.sleep(0.1)

    def until_up(self, executor: Executor, handles: Sequence[JobHandle]) -> None:
        """Wait for the first line of every program."""
        for handle in handles:
            self.until(partial(self._is_up, executor, handle))

    @staticmethod
    def _is_up(executor: Executor, handle: JobHandle) -> bool:
        return "up" in executor.stream_logs(handle, follow=False)

    # -- what commands ask it for --------------------------------------------------------------------------------------

    def test_commands_can_come_back_to_it(self, make: Any) -> None:
        executor = make()
        assert isinstance(executor, Attaches)
        assert isinstance(executor, Reaps)
        assert isinstance(executor, Examines)

    def test_doctor_finds_it_in_order(self, make: Any) -> None:
        findings = list(make().examine())
        assert findings
        assert [finding for finding in findings if finding.level == "fail"] == []

    # -- start and end -------------------------------------------------------------------------------------------------

    def test_two_ranks_get_an_environment_of_their_own(self, make: Any, job: Any) -> None:
        executor, asked = make(), job(_SAY, replicas=2)
        handles = executor.launch(asked)
        assert [handle.rank for handle in handles] == [0, 1]
        assert executor.collect(handles) == 0
        said = [json.loads(next(executor.stream_logs(handle, follow=False, last=1))) for handle in handles]
        uri = asked.run_dir.as_uri()
        assert said == [[asked.name, "0", "2", "0", uri], [asked.name, "1", "2", "0", uri]]

    @pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (3, JobState.FAILED)])
    def test_the_exit_code_comes_back(self, make: Any, job: Any, code: int, state: JobState) -> None:
        executor = make()
        handles = executor.launch(job(f"raise SystemExit({code})"))
        assert executor.collect(handles) == code
        status = executor.poll(handles[0])
        assert (status.state, status.exit_code) == (state, code)

    def test_one_failure_fails_the_job(self, make: Any, job: Any) -> None:
        executor = make()
        code = "import os; raise SystemExit(3 * int(os.environ['COMPOSER_RANK']))"
        assert executor.collect(executor.launch(job(code, replicas=2))) == 3

    def test_arguments_and_variables_arrive_as_they_are(self, make: Any, job: Any) -> None:
        odd = "a b  'c' \"d\" $HOME `e` \\ é # ; & *"
        executor = make(env={"ODD": odd})
        code = "import os, sys\nprint(sys.argv[1] == os.environ['ODD'] == os.environ['SAME'], sys.argv[1])"
        handles = executor.launch(job(code, odd, env={"SAME": odd}))
        assert executor.collect(handles) == 0
        assert list(executor.stream_logs(handles[0], follow=False, last=1)) == [f"True {odd}"]

    def test_over_its_time_it_is_ended(self, make: Any, job: Any) -> None:
        executor = make()
        handles = executor.launch(job(SLEEP, time_limit_s=self.time_limit_s))
        self.until(lambda: executor.poll(handles[0]).state is not JobState.PENDING)
        self.bring_time_limit_closer(handles[0])
        assert executor.collect(handles) != 0
        status = executor.poll(handles[0])
        assert (status.state, status.reason) == (JobState.FAILED, "timeout")

    def test_only_the_replica_that_failed_is_started_again(self, make: Any, job: Any) -> None:
        executor, asked = make(restarts=1), None
        code = (
            "import os; rank, attempt = (os.environ['COMPOSER_' + name] for name in ('RANK', 'ATTEMPT')); "
            "print('attempt', attempt); raise SystemExit(4 if (rank, attempt) == ('1', '0') else 0)"
        )
        asked = job(code, replicas=2)
        assert executor.collect(executor.launch(asked)) == 0
        assert [(handle.rank, handle.attempt) for handle, _ in executor.attach(asked.run_dir)] == [(0, 0), (1, 1)]

    # -- cancel --------------------------------------------------------------------------------------------------------

    def test_one_can_be_cancelled_and_the_other_goes_on(self, make: Any, job: Any) -> None:
        executor = make()
        handles = executor.launch(job(SLEEP, replicas=2))
        self.until_up(executor, handles)
        executor.cancel(handles[1])
        assert executor.poll(handles[1]).state.over
        assert executor.poll(handles[1]).state is not JobState.SUCCEEDED
        assert executor.poll(handles[0]).state is JobState.RUNNING
        executor.cancel(handles[0])
        assert executor.poll(handles[0]).state.over

    def test_cancel_ends_a_program_that_does_not_want_to(self, make: Any, job: Any) -> None:
        executor = make(stop_seconds=1)
        asked = job(STUBBORN)
        handles = executor.launch(asked)
        self.until_up(executor, handles)
        executor.cancel(handles[0])
        assert executor.poll(handles[0]).state.over
        assert asked.name not in [handle.facts["job"] for handle in executor.leftovers()]

    def test_cancelling_what_is_over_changes_nothing(self, make: Any, job: Any) -> None:
        executor = make()
        handles = executor.launch(job("pass"))
        assert executor.collect(handles) == 0
        executor.cancel(handles[0])
        assert executor.poll(handles[0]).state is JobState.SUCCEEDED

    # -- logs ----------------------------------------------------------------------------------------------------------

    def test_logs_come_in_order_while_it_runs_and_afterwards(self, make: Any, job: Any) -> None:
        executor = make()
        handles = executor.launch(job(_NUMBERS))
        stream = executor.stream_logs(handles[0])
        first, state = next(stream), executor.poll(handles[0]).state
        expected = [str(number) for number in range(200)]
        assert [first, *stream] == expected
        assert state is JobState.RUNNING
        assert executor.collect(handles) == 0
        assert list(executor.stream_logs(handles[0], follow=False)) == expected
        assert list(executor.stream_logs(handles[0], last=3)) == expected[-3:]

    # -- across processes ----------------------------------------------------------------------------------------------

    def test_a_launcher_that_dies_leaves_a_job_that_another_attaches_to(
        self, make: Any, job: Any, block: Mapping[str, Any]
    ) -> None:
        asked = job("import time; print('up', flush=True); time.sleep(4); raise SystemExit(3)", detached=True)
        facts = {"name": asked.name, "argv": list(asked.argv), "detached": True}
        argv = [sys.executable, "-c", _LAUNCHER, json.dumps([dict(block), facts, str(asked.run_dir)])]
        launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"launched\n"
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait()
        executor = make()
        ((handle, status),) = executor.attach(asked.run_dir)
        assert status.state in (JobState.PENDING, JobState.RUNNING)
        assert list(executor.stream_logs(handle)) == ["up"]
        assert executor.collect([handle]) == 3

    def test_what_the_service_forgot_is_no_success(self, make: Any, job: Any) -> None:
        executor, asked = make(), job("pass")
        assert executor.collect(executor.launch(asked)) == 0
        self.forget(asked.run_dir)
        ((handle, status),) = executor.attach(asked.run_dir)
        assert status.state in (JobState.UNKNOWN, JobState.FAILED)
        assert executor.collect([handle]) != 0

    def test_a_launch_that_fails_half_way_leaves_nothing(
        self, make: Any, job: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor, asked = make(), job(SLEEP, replicas=2)
        self.fail_after_first(executor, monkeypatch)
        with pytest.raises(RunFailed, match="the service went away"):
            executor.launch(asked)
        self.until(lambda: asked.name not in [handle.facts["job"] for handle in make().leftovers()])
        assert [status.state for _, status in make().attach(asked.run_dir)] == [JobState.CANCELLED] * 2

    # -- names and secrets ---------------------------------------------------------------------------------------------

    def test_what_runs_is_found_by_the_name_of_its_job(self, make: Any, job: Any) -> None:
        executor, asked = make(), job(SLEEP, replicas=2)
        handles = executor.launch(asked)
        self.until_up(executor, handles)
        found = [handle for handle in make().leftovers() if handle.facts["job"] == asked.name]
        assert sorted((handle.rank, handle.attempt) for handle in found) == [(0, 0), (1, 0)]
        for handle in found:  # by what the service told alone, without a ledger
            make().cancel(handle)
        assert asked.name not in [handle.facts["job"] for handle in make().leftovers()]

    def test_a_secret_reaches_the_program_and_nobody_else(
        self, make: Any, job: Any, readable: Sequence[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value = secrets.token_hex(16)
        monkeypatch.setenv("CONTRACT_SECRET", value)
        code = (
            "import hashlib, os, time; print(hashlib.sha256(os.environ['CONTRACT_SECRET'].encode()).hexdigest()); "
            "print('up', flush=True); time.sleep(600)"
        )
        executor, asked = make(), job(code, secrets=("CONTRACT_SECRET",))
        assert value not in "".join(executor.render(asked).values())
        handles = executor.launch(asked)
        self.until_up(executor, handles)
        found = [*_holding(value, [asked.run_dir, *readable]), *_command_lines_with(value)]
        said = list(executor.stream_logs(handles[0], follow=False))
        executor.cancel(handles[0])
        assert said[-2] == hashlib.sha256(value.encode()).hexdigest()
        assert [*found, *_holding(value, [asked.run_dir, *readable])] == []

    def test_without_its_secret_nothing_starts(self, make: Any, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CONTRACT_SECRET", raising=False)
        executor, asked = make(), job(SLEEP, secrets=("CONTRACT_SECRET",))
        with pytest.raises(MissingError, match="CONTRACT_SECRET is not set"):
            executor.launch(asked)
        assert executor.attach(asked.run_dir) == []


def _holding(value: str, folders: Sequence[Path]) -> list[str]:
    """Files in folders that hold a text and that others can read."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if path.stat().st_mode & 0o077 and value.encode() in path.read_bytes()]


def _command_lines_with(value: str) -> list[str]:
    """Processes that show a text to everybody; on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue  # it has ended
        found += [str(path)] if value.encode() in text else []
    return found
