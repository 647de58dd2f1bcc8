import os
import signal
import subprocess
import sys
import textwrap

import pytest

from composer_core.run.context import RolloutSample
from composer_core.run.control import StopSignals
from composer_core.run.directory import create_run
from composer_core.run.files import read_jsonl
from composer_core.run.progress import Silent
from composer_core.run.session import RunSession
from composer_core.spec.model import CheckpointSpec, RunSpec

SPEC = RunSpec.model_construct(checkpoint=CheckpointSpec(keep=2))


@pytest.fixture
def directory(tmp_path):
    return create_run(tmp_path, "r")


def session(directory, signals=None):
    signals = signals or StopSignals()
    return RunSession(directory, SPEC, upstream={}, rewards=[], objective=None, signals=signals, display=Silent())


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
