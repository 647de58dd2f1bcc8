"""The run's own Ray cluster, with doubles for Ray's start and end; and what is said of processes that are gone."""

import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray.exceptions import RayError

from composer_core.errors import MissingError, RunFailed, Stopped
from composer_verl import cluster as module
from composer_verl.cluster import cluster
from composer_verl.watch import gone


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What `ray.init` was called with; like the real one it opens its folder and takes SIGTERM for itself."""
    calls = []

    def init(**options):
        calls.append(options)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if "_temp_dir" in options:
            Path(options["_temp_dir"]).chmod(0o777)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module.ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = signal.getsignal(signal.SIGTERM)
    yield calls
    signal.signal(signal.SIGTERM, before)


def own(logs):
    return cluster({"address": "local"}, logs=logs, environment={"A": "1"})


def test_a_cluster_of_our_own_stays_on_the_loopback_in_a_folder_of_its_own(started, tmp_path):
    with own(tmp_path / "logs"):
        (options,) = started
        folder = Path(options["_temp_dir"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert options["_node_ip_address"] == "127.0.0.1"
        assert not ray_constants.ENABLE_RAY_CLUSTER  # else Ray makes an interface's address of it
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        assert options["runtime_env"] == {"env_vars": {"A": "1"}}
    assert started[1:] == ["shutdown"]
    assert not folder.exists()


def test_sigterm_is_the_runs_own_again_once_ray_is_up(started, tmp_path):
    def handler(number, frame):
        pass

    signal.signal(signal.SIGTERM, handler)
    with own(tmp_path / "logs"):
        assert signal.getsignal(signal.SIGTERM) is handler


def test_a_sigterm_while_ray_starts_stops_the_run(started, tmp_path, monkeypatch):
    monkeypatch.setattr(module.ray, "init", lambda **options: sys.exit(signal.SIGTERM))
    with pytest.raises(Stopped, match=r"^received SIGTERM before the first step$"), own(tmp_path / "logs"):
        pass
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_ray_that_does_not_start_is_one_sentence(started, tmp_path, monkeypatch):
    def late(**options):
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(module.ray, "init", late)
    with pytest.raises(RunFailed) as caught, own(tmp_path / "logs"):
        pass
    assert str(caught.value) == (
        "Ray did not start: The current node timed out during startup\n"
        "  fix: start it again; a machine that is too busy makes Ray give up after 30 s"
    )


def test_what_a_killed_worker_of_the_same_run_left_is_removed_and_nothing_else(started, tmp_path):
    with own(tmp_path / "a" / "logs"):
        left = Path(started[0]["_temp_dir"])
    left.mkdir()
    (left / "session").write_text("")
    with own(tmp_path / "b" / "logs"):
        assert left.exists()
    with own(tmp_path / "a" / "logs"):
        assert not left.exists()


def test_what_processes_said_is_kept_when_the_run_fails(started, tmp_path):
    def fail(*, said):
        with own(tmp_path / "logs"):
            folder = Path(started[-1]["_temp_dir"], "session_2026", "logs")
            folder.mkdir(parents=True)
            for name, text in {"worker-1.err": said, "worker-2.err": "", "raylet.out": "chatter"}.items():
                (folder / name).write_text(text)
            raise RuntimeError("x")

    with pytest.raises(RuntimeError, match=r"^x$"):
        fail(said="Traceback")
    assert [(path.name, path.read_text()) for path in (tmp_path / "logs" / "ray").iterdir()] == [
        ("worker-1.err", "Traceback")
    ]


def test_an_address_where_nothing_listens_is_refused_at_once(started, tmp_path):
    with pytest.raises(MissingError) as caught, cluster({"address": "127.0.0.1:1"}, logs=tmp_path, environment={}):
        pass
    assert str(caught.value) == (
        "backend.ray: no Ray cluster answers at 127.0.0.1:1: Connection refused\n  fix: ray: local"
    )
    assert started == []


def test_a_process_that_is_gone_is_named():
    error = RayError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: HFServer\n\tactor_id: 0a\n\tpid: 12\n"
        "The actor is dead because its worker process has died. Some common causes include: ..."
    )
    assert gone(error) == "one of verl's processes is gone: HFServer, process 12"


def test_another_error_of_rays_is_its_first_line():
    assert gone(RayError("out of memory\nhelp: ...")) == "Ray failed: RayError: out of memory"
