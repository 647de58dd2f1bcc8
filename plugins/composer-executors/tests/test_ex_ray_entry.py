"""What is submitted to Ray, what its answers mean, and what its refusals say; without Ray."""

import getpass
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.jobs import JobHandle, JobState, JobStatus
from composer_executors.ray import RayService, status_of
from composer_executors.ray_entry import body_of, entrypoint, label, read_label, request, sweep
from composer_executors.service import Replica
from composer_executors.settings import RaySettings


def replica(**changes):
    values = {
        "env": {"COMPOSER_RANK": "1", "ODD": "a ${HOME} 'b'"},
        "folder": Path("/runs/run-7/replicas/1/attempt_2"),
        "time_limit_s": None,
        "gpu": None,
    }
    return Replica("run-7", 1, 2, 2, ("/opt/python", "-c", "two\nlines"), **{**values, **changes})


def job(status, **facts):
    plain = {"driver_exit_code": None, "message": "as Ray says it", "error_type": None, "metadata": {}}
    return {"submission_id": "run-7-1-2", "status": status, **plain, **facts}


# -- what is submitted -------------------------------------------------------------------------------------------------


def test_the_whole_request():
    settings = RaySettings(
        stop_seconds=9.5, num_cpus=4, memory_gb=2, resources={"disk": 1.5}, label_selector={"market": "spot"}
    )
    asked = replica(gpu=("H200", 8), time_limit_s=3600.0, secrets={"HF_TOKEN": "s3cr3t"})
    missing = (
        "'the environment variable HF_TOKEN is not set on this node: executor ray sends no secrets, since Ray would "
        "show them; export HF_TOKEN where `ray start` runs'"
    )
    assert request(asked, settings) == {
        "submission_id": "run-7-1-2",
        "entrypoint": f'if [ -z "${{HF_TOKEN+x}}" ]; then echo {missing} >&2; exit 3; fi; '
        "exec env COMPOSER_RANK=1 'ODD=a ${HOME} '\"'\"'b'\"'\"'' COMPOSER_RAY_JOB=run-7-1-2 "
        "timeout --foreground --kill-after=9.5 3590.5 /opt/python -c 'two\nlines'",
        "metadata": {
            "composer-run": "run-7",
            "user": getpass.getuser(),
            "rank": "1",
            "attempt": "2",
            "limit_s": "3600",
        },
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "10"}},
        "entrypoint_num_gpus": 8,
        "entrypoint_num_cpus": 4,
        "entrypoint_memory": 2_000_000_000,
        "entrypoint_resources": {"disk": 1.5, "accelerator_type:H200": 0.001},
        "entrypoint_label_selector": {"market": "spot"},
    }
    assert "s3cr3t" not in "".join(RayService(settings).render([asked]).values())


def run(asked, **environment):
    line = entrypoint(asked, RaySettings(stop_seconds=1))
    return subprocess.run(["sh", "-c", line], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True)


def test_a_secret_that_the_node_does_not_have_ends_the_replica_with_3():
    code = "import os; print(os.environ['HF_TOKEN'])"
    asked = replica(secrets={"HF_TOKEN": ""})
    asked = Replica(**{**asked.__dict__, "command": (sys.executable, "-c", code)})
    without = run(asked)
    assert (without.returncode, without.stdout) == (3, b"")
    assert b"HF_TOKEN is not set on this node" in without.stderr
    assert run(asked, HF_TOKEN="of the node").stdout == b"of the node\n"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import time; time.sleep(60)", 124),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", 137),
        ("import os; os.kill(os.getpid(), 9)", -9),  # not `timeout`'s doing, and told apart
        ("raise SystemExit(3)", 3),
    ],
    ids=["asked-to-end", "killed", "killed-by-another", "ended-by-itself"],
)
def test_a_time_limit_shows_in_the_exit_code(code, ended):
    asked = Replica(**{**replica(time_limit_s=1.5).__dict__, "command": (sys.executable, "-c", code)})
    assert run(asked).returncode == ended


def test_a_replica_is_found_by_its_metadata_and_only_by_its_user():
    metadata = label(replica())
    handle = JobHandle("ray", 1, "run-7-1-2", 2, {"job": "run-7"})
    assert read_label(job("RUNNING", metadata=metadata)) == handle
    assert read_label(job("RUNNING", metadata={**metadata, "user": "somebody-else"})) is None
    assert read_label(job("RUNNING", metadata=None)) is None


def test_a_sweep_ends_what_left_its_group_and_nothing_else():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(sleep, env={"COMPOSER_RAY_JOB": "run-7-1-2"}, start_new_session=True)
    other = subprocess.Popen(sleep, env={"COMPOSER_RAY_JOB": "run-7-1-20"}, start_new_session=True)
    body = sweep(job("RUNNING", driver_node_id="abc"))
    try:
        assert body["entrypoint_label_selector"] == {"ray.io/node-id": "abc"}
        assert subprocess.run(["sh", "-c", body["entrypoint"]]).returncode == 0
        assert ours.wait(10) == -9
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_rays_own_lines_are_no_part_of_the_log():
    known = job("RUNNING", entrypoint="exec env A=1 python -c 'two\nlines'")
    head = "12:00 INFO job_manager.py:581 -- Runtime env is setting up.\nCollecting a-package\n"
    assert body_of(head, known) == ""
    head += "Running entrypoint for job run-7-1-2: exec env A=1 python -c 'two\nlines'\n"
    assert body_of(head + "mine\nRunning entrypoint for job x: y\n", known) == "mine\nRunning entrypoint for job x: y\n"


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "status"),
    [
        (job("PENDING"), JobStatus(JobState.PENDING, None, "as Ray says it")),
        (job("RUNNING"), JobStatus(JobState.RUNNING)),
        (job("STOPPED"), JobStatus(JobState.CANCELLED, None, "cancelled")),
        (job("SUCCEEDED", driver_exit_code=0), JobStatus(JobState.SUCCEEDED, 0)),
        (job("FAILED", driver_exit_code=3), JobStatus(JobState.FAILED, 3)),
        (
            job("FAILED", driver_exit_code=-9),
            JobStatus(JobState.FAILED, -9, "was killed by SIGKILL (by the system when memory runs out)"),
        ),
        (
            job("FAILED", driver_exit_code=127),
            JobStatus(JobState.FAILED, 127, "no such program on its node: see executor.python"),
        ),
        (job("FAILED", driver_exit_code=124, metadata={"limit_s": "9"}), JobStatus(JobState.FAILED, 124, "timeout")),
        # without a limit of ours, 124 is the program's own
        (job("FAILED", driver_exit_code=124), JobStatus(JobState.FAILED, 124)),
        (
            job("FAILED", message="a trace\nActorDied: of old age\n"),
            JobStatus(JobState.FAILED, None, "ActorDied: of old age"),
        ),
        (job("FAILED", message="", error_type="X"), JobStatus(JobState.FAILED, None, "X")),
        (job("DREAMING"), JobStatus(JobState.UNKNOWN, None, "Ray says DREAMING")),
    ],
    ids=lambda value: value["status"] if isinstance(value, dict) else "",
)
def test_what_rays_states_mean(known, status):
    assert status_of(known) == status


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard():
    """A server whose answers a test sets: path -> (status, text); it notes the tokens that it got."""
    answers, tokens = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            tokens.append(self.headers.get("Authorization"))
            status, text = answers.get(self.path, (404, f"{self.path} does not exist"))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.answers, server.tokens = answers, tokens
    server.service = RayService(RaySettings(address=f"http://127.0.0.1:{server.server_port}/"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_token(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


TRACE = (
    "Traceback (most recent call last):\n  File x\nValueError: Job with submission_id run-7-1-2 already exists.\n.\n"
)
LETS_IN = "export RAY_AUTH_TOKEN=..., or RAY_AUTH_TOKEN_PATH=FILE, with the cluster's token"


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            (401, "Unauthorized: Missing authentication token"),
            MissingError,
            "executor ray: Ray does not let us in: Unauthorized: Missing authentication token\n  fix: " + LETS_IN,
        ),
        ((400, "ValueError: a label is wrong"), UsageError, "executor ray: Ray refuses: ValueError: a label is wrong"),
        (
            (500, TRACE),
            RunFailed,
            "executor ray: Ray says: ValueError: Job with submission_id run-7-1-2 already exists.",
        ),
        ((302, ""), RunFailed, "executor ray: Ray says: status 302"),
        (
            (200, "<html>"),
            MissingError,
            "executor.address: what answers at {address} is no Ray dashboard\n  fix: the URL that `ray start --head` "
            "shows: http://HOST:8265",
        ),
    ],
    ids=["no-token", "wrong-request", "name-taken", "elsewhere", "no-ray"],
)
def test_refusals_name_the_field_and_the_way_out(dashboard, answer, kind, message):
    dashboard.answers["/api/jobs/"] = answer
    with pytest.raises(kind) as caught:
        list(dashboard.service.submit([replica()]))
    assert str(caught.value) == message.format(address=f"http://127.0.0.1:{dashboard.server_port}")


def test_without_a_dashboard_nothing_starts_and_all_is_unknown():
    here = RayService(RaySettings(address="http://127.0.0.1:9"))
    said = "no Ray dashboard answers at http://127.0.0.1:9: [Errno 111] Connection refused"
    with pytest.raises(MissingError, match="no Ray dashboard answers"):
        list(here.submit([replica()]))
    handle = JobHandle("ray", 0, "run-7-0-0")
    assert here.poll([handle, handle]) == [JobStatus(JobState.UNKNOWN, None, said)] * 2
    assert here.remains(handle) == f"perhaps job run-7-0-0 of Ray: {said}"
    (finding,) = here.examine()
    assert (finding.level, finding.found) == ("fail", f"executor.address: {said}")


def test_one_question_for_all_replicas_and_none_of_them_forgotten(dashboard):
    dashboard.answers["/api/jobs/"] = (200, json.dumps([job("RUNNING"), job("RUNNING", submission_id=None)]))
    handles = [JobHandle("ray", 1, "run-7-1-2"), JobHandle("ray", 0, "run-7-0-2")]
    unknown = JobStatus(JobState.UNKNOWN, None, "Ray does not know it any more")
    assert dashboard.service.poll(handles) == [JobStatus(JobState.RUNNING), unknown]
    assert len(dashboard.tokens) == 1


@pytest.mark.parametrize(
    ("mode", "variable", "path", "home", "sent"),
    [
        (None, "first", "second", "third", "Bearer first"),
        (None, None, "second", "third", "Bearer second"),
        (None, None, None, "third", "Bearer third"),
        ("token", None, None, "third", "Bearer third"),
        ("disabled", "first", "second", "third", None),
        (None, None, None, None, None),
    ],
)
def test_a_token_is_looked_for_where_ray_looks(dashboard, monkeypatch, tmp_path, mode, variable, path, home, sent):
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if variable:
        monkeypatch.setenv("RAY_AUTH_TOKEN", variable)
    if path:
        (tmp_path / "token").write_text(f"{path}\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    if home:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(home)
    dashboard.answers["/api/jobs/"] = (200, "[]")
    assert dashboard.service.leftovers(None) == []
    assert dashboard.tokens == [sent]


def test_a_token_that_is_not_there_is_said_before_anything_is_sent(dashboard, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(MissingError, match=r"^RAY_AUTH_TOKEN_PATH /nowhere/token: no such file$"):
        list(dashboard.service.submit([replica()]))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(MissingError, match="RAY_AUTH_MODE is token, and there is none"):
        list(dashboard.service.submit([replica()]))
    assert dashboard.tokens == []
