import threading

import pytest

from composer_core.run import logs
from composer_core.run.directory import create_run
from composer_core.run.logs import LogReader


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.01)
    return create_run(tmp_path, "run")


def append(directory, text, name="worker.log"):
    with (directory.logs / name).open("a") as file:
        file.write(text)


def test_the_last_lines_of_one_file_have_no_header(directory):
    append(directory, "one\ntwo\nthree\n")
    assert list(LogReader(directory).last(2)) == ["two", "three"]
    assert list(LogReader(directory).last(0)) == []
    assert list(LogReader(directory).last(9)) == ["one", "two", "three"]


def test_several_files_are_told_apart(directory):
    append(directory, "main\n")
    append(directory, "other 1\nother 2\n", "worker-1.log")
    assert list(LogReader(directory).last(1)) == ["==> worker-1.log <==", "other 2", "==> worker.log <==", "main"]


def test_a_run_without_logs_has_no_lines(directory):
    assert list(LogReader(directory).last(5)) == []


def test_following_gives_each_line_once_and_ends_with_the_run(directory):
    directory.lock()
    append(directory, "seen\nhal")
    reader = LogReader(directory)
    assert list(reader.last(5)) == ["seen"]
    found = []

    def follow():
        found.extend(reader.follow())

    thread = threading.Thread(target=follow)
    thread.start()
    append(directory, "f\nnew\n")
    append(directory, "without a line break")
    directory.event("finished", reason="", exit_code=0)
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert found == ["half", "new", "without a line break"]


def test_the_last_line_of_a_run_that_is_over_needs_no_line_break(directory):
    append(directory, "one\ntwo")
    directory.event("failed", reason="", exit_code=4)
    reader = LogReader(directory)
    assert list(reader.last(1)) == ["two"]
    assert list(reader.follow()) == []
