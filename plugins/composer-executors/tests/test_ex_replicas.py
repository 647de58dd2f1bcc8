"""`launch_replicas`: a program of one's own, on the executor `local`."""

import json

import pytest

from composer_core.errors import UsageError
from composer_core.jobs import JobState
from composer_executors.replicas import ReplicaHandle, collect, launch_replicas

PROGRAM = "import os, sys\nprint(os.environ['COMPOSER_RANK'], sys.argv[1:], flush=True)\n"


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_file_runs_once_for_each_replica_with_its_arguments(program, tmp_path):
    arguments = {"steps": 3, "name": "a b", "fast": True, "rate": 1e-5}
    handles = launch_replicas(2, program, arguments, run_dir=tmp_path, settings={"poll_seconds": 0.1})
    assert collect(handles) == 0
    expected = "['--steps', '3', '--name', 'a b', '--fast', 'true', '--rate', '1e-05']"
    assert [list(handle.logs()) for handle in handles] == [[f"0 {expected}"], [f"1 {expected}"]]
    assert [(handle.rank, handle.backend_name, handle.poll()) for handle in handles] == [
        (0, "local", JobState.SUCCEEDED),
        (1, "local", JobState.SUCCEEDED),
    ]


def test_a_handle_survives_json_and_cancels(tmp_path):
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    settings = {"stop_seconds": 1}
    (handle,) = launch_replicas(1, str(tmp_path / "sleep.py"), run_dir=tmp_path, settings=settings)
    text = json.dumps([handle.rank, handle.backend_name, dict(handle.metadata)])
    again = ReplicaHandle(*json.loads(text))
    assert again.poll() is JobState.RUNNING
    again.cancel()
    assert again.poll().over


def test_a_function_is_refused_with_the_reason():
    with pytest.raises(TypeError) as caught:
        launch_replicas(1, lambda: None)
    assert str(caught.value) == (
        "entrypoint must be a file or the name of a module, got function: a function would have to be pickled, and a "
        "pickle runs whatever code stands in it"
    )


def test_wrong_arguments_are_refused(program, tmp_path):
    with pytest.raises(TypeError, match=r"^argument 'layers' must be text, a number or a bool, got list$"):
        launch_replicas(1, program, {"layers": [1]}, run_dir=tmp_path)
    with pytest.raises(UsageError, match=r"^n_replicas must be 1 or more, got 0$"):
        launch_replicas(0, program)
    with pytest.raises(UsageError, match=r"nope\.py: no such file$"):
        launch_replicas(1, str(tmp_path / "nope.py"))
    with pytest.raises(UsageError, match=r"^executor\.gpu: Extra inputs are not permitted$"):
        launch_replicas(1, program, gpu="H200:8")
    assert not (tmp_path / "jobs.json").exists()
