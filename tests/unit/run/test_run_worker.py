import logging
import os
import signal
import subprocess
import sys

import pytest

from composer_core.run import report, worker
from composer_core.run.directory import RunState
from composer_core.run.files import read_jsonl


def events(directory):
    return [{name: value for name, value in event.items() if name != "time"} for event in read_jsonl(directory.events)]


def test_a_run_to_the_end_leaves_model_metrics_events_provenance_and_report(planned, capsys):
    directory = planned("finish")
    assert worker.main([str(directory.plan)]) == 0
    assert (directory.path / "model" / "weights").read_text() == "trained"
    assert [line["reward/mean"] for line in read_jsonl(directory.metrics)] == [0.1, 0.2, 0.3, 0.4]
    assert [step for step, _ in directory.complete_checkpoints()] == [2, 3, 4]  # keep: 3
    assert events(directory)[0] == {"event": "started", "pid": os.getpid()}
    assert events(directory)[-1] == {"event": "finished", "reason": "", "exit_code": 0}
    assert directory.state() == RunState("done")
    plugins = [plugin["name"] for plugin in directory.read_json("provenance.json")["worker"]["plugins"]]
    assert plugins == ["composer-core", "fake_backend.py"]
    assert "&lt;script&gt;alert(4)&lt;/script&gt;" in directory.report.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "step 1/4  reward 0.1  loss 1"


@pytest.mark.parametrize(
    ("do", "code", "message"),
    [
        ("usage", 2, "tasks.jsonl:3: no column 'answer'\n  fix: add it"),
        ("check", 3, "backend 'fake' cannot run here: acme 1.2 has no Trainer; acme needs a GPU"),
        ("fail", 4, "the loss is not finite"),
    ],
)
def test_a_known_error_is_its_message_and_its_exit_code(planned, capsys, do, code, message):
    directory = planned(do)
    assert worker.main([str(directory.plan)]) == code
    assert capsys.readouterr().err == message + "\n"
    assert events(directory)[-1] == {"event": "failed", "reason": message, "exit_code": code}
    assert "Traceback (most recent call last)" in (directory.logs / "worker.log").read_text()
    assert directory.report.is_file()
    assert directory.complete_model() is None


@pytest.mark.parametrize(
    ("do", "what"), [("divide", "ZeroDivisionError: division by zero"), ("exit", "SystemExit: 0")], ids=str
)
def test_an_unexpected_error_is_one_line_and_never_success(planned, capsys, do, what):
    directory = planned(do)
    assert worker.main([str(directory.plan)]) == 4
    assert capsys.readouterr().err == f"internal error: {what} (traceback in logs/worker.log)\n"
    assert events(directory)[-1] == {"event": "failed", "reason": f"internal error: {what}", "exit_code": 4}
    assert "fake_backend.py" in (directory.logs / "worker.log").read_text()


def test_debug_shows_the_traceback(planned, capsys, monkeypatch):
    monkeypatch.setenv("COMPOSER_DEBUG", "1")
    assert worker.main([str(planned("divide").plan)]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "internal error: ZeroDivisionError: division by zero (traceback in logs/worker.log)"


def test_a_report_that_cannot_be_made_is_a_warning(planned, capsys, monkeypatch):
    def broken(directory):
        raise KeyError("x")

    monkeypatch.setattr(report, "build_report", broken)
    directory = planned("finish")
    assert worker.main([str(directory.plan), "--quiet"]) == 0
    assert capsys.readouterr().err == "warning: report.html could not be made: KeyError: 'x'\n"
    expected = {"event": "warning", "reason": "report.html could not be made: KeyError: 'x'"}
    assert events(directory)[-1] == expected
    assert directory.state() == RunState("done")


def test_a_plan_that_is_not_there_or_not_json_is_a_usage_error(planned, capsys, tmp_path):
    assert worker.main([str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/plan.json: no such plan\n"
    directory = planned("finish")
    directory.write_text("plan.json", "{")
    assert worker.main([str(directory.plan)]) == 2
    assert capsys.readouterr().err.startswith(f"{directory.plan}: not JSON: ")


def test_only_the_main_process_of_several_writes(planned, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    directory = planned("finish")
    assert worker.main([str(directory.plan)]) == 0
    left = sorted(str(path.relative_to(directory.path)) for path in directory.path.rglob("*") if path.is_file())
    assert left == ["logs/worker-1.log", "plan.json", "spec.yaml"]


def test_logging_is_left_as_it_was(planned):
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    worker.main([str(planned("fail").plan)])
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "sigint"])
def test_a_signal_ends_the_worker_with_exit_code_5_and_a_checkpoint(planned, number):
    directory = planned("wait")
    command = [sys.executable, "-m", "composer_core.run.worker", str(directory.plan)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "step 1/4  reward 0.1  loss 1\n"  # it is up
    process.send_signal(number)
    assert process.wait(timeout=60) == 5
    process.stderr.close()
    assert directory.state() == RunState("stopped", f"received {number.name}")
    assert [step for step, _ in directory.complete_checkpoints()] == [1]
