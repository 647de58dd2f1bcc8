import os
import signal
import subprocess
import sys
import textwrap

import pytest

from composer_core.errors import RunFailed
from composer_core.plugins.contributions import Kind
from composer_core.plugins.settings import NoSettings
from composer_core.run.context import Checkpoint, RolloutSample
from composer_core.run.control import Control, StopSignals
from composer_core.run.directory import create_run
from composer_core.run.files import marker, read_jsonl
from composer_core.run.progress import Silent
from composer_core.run.session import RunSession
from composer_core.spec.model import CheckpointSpec, Plugged, RunSpec, TrainSpec

SPEC = RunSpec.model_construct(
    checkpoint=CheckpointSpec(keep=2),
    train=TrainSpec(steps=9),
    backend=Plugged(Kind.BACKEND, "fake", "test 0", NoSettings()),
)


@pytest.fixture
def directory(tmp_path):
    return create_run(tmp_path, "r")


def session(directory, signals=None, **more):
    control = Control(signals or StopSignals(), stop_file=directory.stop_file)
    more = {"display": Silent(), "control": control} | more
    return RunSession(directory, SPEC, upstream={}, rewards=[], objective=None, **more)


def use_everything(run):
    run.log_step(1, {"reward/mean": 1.0})
    run.log_rollouts(1, [RolloutSample("p", "c", {}, None)])
    run.event("note", text="x")
    for step in (1, 2, 3):
        with run.checkpoint(step) as folder:
            (folder / "weights").write_text("w")
    with run.trained_model() as folder:
        (folder / "weights").write_text("w")
    (run.scratch / "upstream.tmp").write_text("t")
    run.close()


def test_the_main_process_writes_everything_and_keeps_the_newest_checkpoints(directory):
    use_everything(session(directory))
    assert [line["reward/mean"] for line in read_jsonl(directory.metrics)] == [1.0]
    assert [line["completion"] for line in read_jsonl(directory.rollouts)] == ["c"]
    events = [line["event"] for line in read_jsonl(directory.events)]
    assert events == ["note", "checkpoint", "checkpoint", "checkpoint", "model"]
    assert [step for step, _ in directory.complete_checkpoints()] == [2, 3]
    assert directory.complete_model() == directory.path / "model"
    assert not (directory.path / "scratch").exists()


def test_another_process_makes_the_same_calls_and_leaves_nothing(directory, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run = session(directory)
    assert not run.is_main
    use_everything(run)
    assert sorted(path.name for path in directory.path.iterdir()) == ["checkpoints", "logs"]
    assert list(directory.checkpoints.iterdir()) == []


def test_a_checkpoint_holds_what_each_rank_wrote(directory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number in (1, 0):  # without torch.distributed nobody waits for the other
        monkeypatch.setenv("RANK", str(number))
        with session(directory).checkpoint(1) as folder:
            (folder / "place").write_text(f"rank {number}")
    ((step, folder),) = directory.complete_checkpoints()
    parts = [Checkpoint(step, folder, rank).own / "place" for rank in (0, 1)]
    assert [part.read_text() for part in parts] == ["rank 0", "rank 1"]
    assert set(marker(folder)["files"]) == {"place", "rank1/place"}  # complete means: with all of it


def test_a_rank_that_writes_elsewhere_fails_the_checkpoint(directory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunFailed) as caught, session(directory).checkpoint(1):
        pass
    assert str(caught.value) == ("rank 1 left no folder for checkpoint 1\n  fix: a run directory that all ranks share")
    assert directory.complete_checkpoints() == []


def test_a_checkpoint_that_fails_is_no_event(directory):
    run = session(directory)
    with pytest.raises(ZeroDivisionError), run.checkpoint(1):
        1 / 0  # noqa: B018
    assert read_jsonl(directory.events) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "sigint"])
def test_a_signal_is_a_reason_to_stop_and_the_first_reason_stays(directory, number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        run = session(directory, signals)
        assert run.stop_reason() is None
        os.kill(os.getpid(), number)
        assert run.stop_reason() == f"received {number.name}"
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_reason() == f"received {number.name}"
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_the_process_at_once():
    code = textwrap.dedent("""
        import os, signal
        from composer_core.run.control import StopSignals
        with StopSignals():
            try:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # what a trainer may do
            finally:
                print("still here")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")


class Gone:
    """A terminal that went away."""

    def step(self, step, metrics):
        raise BrokenPipeError(32, "Broken pipe")

    def close(self):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_terminal_that_is_gone_is_reported_and_the_run_goes_on(directory):
    run = session(directory, display=Gone())
    for step in (1, 2):
        run.log_step(step, {"reward/mean": 1.0})
    run.close()
    assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2]
    reasons = [line["reason"] for line in read_jsonl(directory.events)]
    assert reasons == ["no progress is shown from step 1 on: [Errno 32] Broken pipe"]


def test_what_a_killed_process_left_in_its_scratch_folder_is_gone(directory):
    left = directory.scratch / "rank0" / "checkpoint-3"
    left.mkdir(parents=True)
    run = session(directory)
    assert list(run.scratch.iterdir()) == []


def test_a_checkpoint_remembers_the_prompts_it_was_made_with(directory):
    run = session(directory)
    with run.checkpoint(1) as folder:
        (folder / "weights").write_text("w")
    assert marker(directory.checkpoints / "step_1")["prompts"] == ""  # nobody has asked for them yet


@pytest.mark.parametrize("first", [3, 2, 5], ids=["the-next", "trained-already", "too-late"])
def test_a_resumed_backend_must_log_a_step_of_the_next_interval_first(directory, first):
    run = session(directory, resume_from=Checkpoint(2, directory.path))
    if first == 3:
        run.log_step(3, {})
        run.log_step(9, {})
        return
    with pytest.raises(RunFailed, match=f"backend 'fake' resumed after step 2, but logs step {first} first"):
        run.log_step(first, {})
