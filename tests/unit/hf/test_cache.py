from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from composer_core.errors import MissingError, UsageError
from composer_core.hf.cache import cache_root, cached_folder, new_folder


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """Where cached models of this test are."""
    monkeypatch.setenv("COMPOSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_folder_is_made_once(models):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "weights").write_text("w")

    first = cached_folder("a", make=make)
    assert (first, len(made)) == (models / "a", 1)
    assert cached_folder("a", make=make) == first
    assert len(made) == 1
    assert (first / "weights").read_text() == "w"


def test_a_failed_making_leaves_nothing_and_its_error_passes(models):
    def make(folder):
        (folder / "weights").write_text("half")
        raise UsageError("cut short")

    with pytest.raises(UsageError, match=r"^cut short$"):
        cached_folder("a", make=make)
    assert [path.name for path in models.iterdir()] == [".a.lock"]


def test_a_killed_making_leaves_no_model_and_the_next_one_cleans_up(models):
    code = (
        "import os, signal\n"
        "from composer_core.hf.cache import cached_folder\n"
        "def make(folder):\n"
        "    (folder / 'weights').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached_folder('a', make=make)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not (models / "a").exists()
    assert len(list(models.glob(".a.*.part"))) == 1
    cached_folder("a", make=lambda folder: (folder / "weights").write_text("whole"))
    assert sorted(path.name for path in models.iterdir()) == [".a.lock", "a"]
    assert (models / "a" / "weights").read_text() == "whole"


@pytest.fixture
def start():
    """Start a Python program; it is ended with the test, whatever the test's outcome."""
    started = []

    def _start(code):
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield _start
    for process in started:
        process.kill()
        process.communicate()


def test_of_two_processes_one_makes_and_the_other_waits(start, tmp_path):
    ready, go = tmp_path / "ready", tmp_path / "go"
    os.mkfifo(ready)
    os.mkfifo(go)
    first = start(
        "from composer_core.hf.cache import cached_folder\n"
        "def make(folder):\n"
        f"    open({str(ready)!r}, 'w').close()\n"
        f"    open({str(go)!r}).close()\n"
        "    (folder / 'maker').write_text('first')\n"
        "cached_folder('a', make=make)\n"
    )
    with ready.open():  # the first one holds the lock now
        pass
    second = start(
        "from composer_core.hf.cache import cached_folder\n"
        "print((cached_folder('a', make=lambda f: (f / 'maker').write_text('second')) / 'maker').read_text())\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=1.5)  # blocked; had it not waited it would have made its own by now
    with go.open("w"):
        pass
    assert second.communicate(timeout=30)[0] == "first\n"
    assert first.wait(timeout=30) == 0


def test_a_cache_that_cannot_be_written_says_which_and_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_CACHE", str(tmp_path / "file"))
    with pytest.raises(MissingError) as caught:
        cached_folder("a", make=lambda folder: None)
    assert str(caught.value) == (
        f"{tmp_path / 'file' / 'models'}: the model cache cannot be written: Not a directory"
        "\n  fix: free some space, or set COMPOSER_CACHE to a folder you can write"
    )


def test_the_default_root_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("COMPOSER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "composer"


def test_a_new_folder_can_be_read_by_others(tmp_path):
    with new_folder(tmp_path / "a" / "b") as part:
        (part / "x").write_text("x")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755
