"""Sinks with the real packages where they are installed; trackio and wandb also against doubles of their interface."""

import importlib.util
import math
import sqlite3
import sys
import time
from types import SimpleNamespace

import pytest

from composer_core.errors import MissingError
from composer_core.run import sinks
from composer_core.run.control import Control, StopSignals
from composer_core.run.directory import create_run
from composer_core.run.files import read_jsonl
from composer_core.run.progress import Silent
from composer_core.run.session import RunSession
from composer_core.run.sinks import check_sinks, open_sinks


@pytest.fixture
def directory(tmp_path):
    directory = create_run(tmp_path / "runs", "r")
    directory.write_json("plan.json", {"spec": {"name": "r", "seed": 3}})
    return directory


def events_of(directory):
    """(step, tag, value) of every scalar that TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(s.step, tag, s.value) for tag in shown.Tags()["scalars"] for s in shown.Scalars(tag)]


def test_tensorboard_reads_back_what_was_logged(directory):
    pytest.importorskip("tensorboard")
    (sink,) = open_sinks(["tensorboard"], directory, resumed=False)
    sink.log(1, {"loss/total": 0.5, "reward/mean": 0.25})
    sink.log(3, {"loss/total": math.nan})
    sink.close()
    found = events_of(directory)
    assert found[:2] == [(1, "loss/total", 0.5), (3, "loss/total", pytest.approx(math.nan, nan_ok=True))]
    assert found[2:] == [(1, "reward/mean", 0.25)]


def test_tensorboard_shows_a_step_once_that_was_trained_again(directory):
    pytest.importorskip("tensorboard")
    for resumed, steps, value in ((False, (1, 2, 3), 1.0), (True, (2, 3, 4), 2.0)):
        (sink,) = open_sinks(["tensorboard"], directory, resumed=resumed)
        for step in steps:
            sink.log(step, {"loss/total": value})
        sink.close()
    assert events_of(directory) == [(1, "loss/total", 1.0), *((step, "loss/total", 2.0) for step in (2, 3, 4))]


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError) as caught:
        check_sinks(["wandb"])
    assert str(caught.value) == (
        "sinks: sink 'wandb' needs the package wandb\n  fix: pip install 'composer-core[wandb]'"
    )


def test_looking_for_a_package_does_not_import_it():
    check_sinks(["tensorboard"])
    assert "tensorboard.summary.writer.event_file_writer" not in sys.modules or "tensorboard" in sys.modules


# -- doubles: the part of each client's interface that a sink uses -----------------------------------------------------


class DoubleRun:
    def __init__(self):
        self.rows, self.finished = [], False

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def finish(self):
        self.finished = True


@pytest.fixture
def double(monkeypatch):
    """A module in the client's place that keeps what it is told."""

    def stand_in(name):
        run, asked = DoubleRun(), {}

        def init(**arguments):
            asked.update(arguments)
            return run

        module = SimpleNamespace(init=init, Settings=lambda **settings: settings)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sinks, "check_sinks", lambda names: None)
        return run, asked

    return stand_in


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_a_run_goes_under_its_own_name_with_its_spec(double, directory, name, resumed, monkeypatch):
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    run, asked = double(name)
    (sink,) = open_sinks([name], directory, resumed=resumed)
    sink.log(1, {"loss/total": 0.5})
    sink.close()
    assert (asked["project"], asked["name"], asked["config"]) == ("composer", directory.name, {"name": "r", "seed": 3})
    assert asked["resume"] == ("allow" if name == "wandb" or resumed else "never")
    assert run.rows == [(1, {"loss/total": 0.5})]
    assert run.finished


def test_trackio_is_spared_what_it_cannot_store(double, directory):
    run, _ = double("trackio")
    (sink,) = open_sinks(["trackio"], directory, resumed=False)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert run.rows == [(1, {"c": 1.0})]


def test_a_client_that_cannot_begin_is_an_error_before_training(double, directory):
    sys.modules["wandb"] = SimpleNamespace(init=lambda **_: 1 / 0, Settings=dict)
    double("trackio")
    with pytest.raises(MissingError) as caught:
        open_sinks(["wandb"], directory, resumed=False)
    assert str(caught.value) == (
        "sinks: sink 'wandb' cannot be opened: ZeroDivisionError: division by zero\n"
        "  fix: pip install 'composer-core[wandb]'"
    )
    del sys.modules["wandb"]


class Broken:
    name = "broken"

    def log(self, step, metrics):
        if step == 2:
            raise ConnectionError("no route")

    def close(self):
        raise AssertionError("it is switched off")


def test_a_sink_that_fails_during_the_run_is_switched_off_and_reported(directory):
    spec = SimpleNamespace()
    run = RunSession(
        directory, spec, upstream={}, rewards=[], objective=None, display=Silent(), sinks=[Broken()],
        control=Control(StopSignals(), stop_file=directory.stop_file),
    )  # fmt: skip
    for step in (1, 2, 3):
        run.log_step(step, {"loss/total": 1.0})
    run.close()
    assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2, 3]
    assert [event["reason"] for event in read_jsonl(directory.events)] == [
        "sink broken is switched off at step 2: ConnectionError: no route"
    ]


# -- the real clients --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_keeps_an_offline_run(directory, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = open_sinks(["wandb"], directory, resumed=False)
    sink.log(1, {"loss/total": 0.5})
    sink.close()
    (kept,) = directory.path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30  # its own process writes the file, and ends after us
    while b"loss/total" not in kept.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_trackio_keeps_a_local_run(directory, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when it is imported
    pytest.importorskip("trackio")
    (sink,) = open_sinks(["trackio"], directory, resumed=False)
    sink.log(1, {"loss/total": 0.5})
    sink.close()
    assert capsys.readouterr().out == ""
    (database,) = (tmp_path / "trackio").glob("composer*.db")
    rows = sqlite3.connect(database).execute("select run_name, step, metrics from metrics").fetchall()
    assert [(name, step) for name, step, _ in rows] == [(directory.name, 1)]
