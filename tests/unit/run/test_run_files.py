import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from composer_core.errors import RunFailed
from composer_core.run.directory import RunDirectory
from composer_core.run.files import (
    MARKER,
    JsonLines,
    fill_folder,
    find_complete,
    is_complete,
    marker,
    read_jsonl,
    settle,
    write_json,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed) as caught:
        write_text(path, "new")
    assert str(caught.value) == (
        f"{path}: the disk is full\n  fix: free some room, then `composer-run resume` goes on from the checkpoint"
    )
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_lines_come_back_as_they_were_written(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    values = [{"text": "two\nlines, ünïcode, <b>"}, {"n": 1.5, "none": None}]
    for value in values:
        lines.write(value)
    lines.close()
    assert read_jsonl(tmp_path / "a.jsonl") == values


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_jsonl(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize(
    "rest", [b'{"n": 2', b'{"n"', b"\x00\x00\x00", b"\xff"], ids=["open", "key", "zeros", "no-utf8"]
)
def test_an_incomplete_last_line_is_dropped(tmp_path, rest):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + rest)
    assert read_jsonl(path) == [{"n": 1}]


def test_a_last_line_that_only_lacks_its_line_break_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    assert read_jsonl(path) == [{"n": 1}, {"n": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n":\n{"n": 3}\n')
    with pytest.raises(RunFailed) as caught:
        read_jsonl(path)
    assert caught.value.at == f"{path}:2"


def test_a_writer_that_follows_a_killed_one_does_not_append_to_its_half_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    lines = JsonLines(path)
    lines.write({"n": 3})
    lines.close()
    assert path.read_bytes() == b'{"n": 1}\n{"n": 3}\n'


def test_values_that_json_lacks_are_refused(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(ValueError):
        lines.write({"n": float("nan")})
    lines.close()
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_a_filled_folder_is_complete_and_its_marker_lists_every_file(tmp_path):
    with fill_folder(tmp_path / "model", step=7) as folder:
        (folder / "sub").mkdir()
        (folder / "a.bin").write_bytes(b"12345")
        (folder / "sub" / "b.bin").write_bytes(b"")
        assert not (tmp_path / "model").exists()
    assert names(tmp_path) == ["model"]
    facts = json.loads((tmp_path / "model" / MARKER).read_text())
    assert facts["step"] == 7
    assert facts["files"] == {"a.bin": 5, "sub/b.bin": 0}
    assert is_complete(tmp_path / "model")


def test_nothing_remains_of_a_folder_whose_filling_failed(tmp_path):
    with pytest.raises(FileNotFoundError), fill_folder(tmp_path / "model") as folder:
        (folder / "no" / "a.bin").write_bytes(b"1")
    assert names(tmp_path) == []


def test_a_failed_replacement_leaves_the_earlier_folder(tmp_path):
    with fill_folder(tmp_path / "model") as folder:
        (folder / "a.bin").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), fill_folder(tmp_path / "model"):
        1 / 0  # noqa: B018
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a.bin").read_bytes() == b"old"
    assert is_complete(tmp_path / "model")


def test_a_replacement_holds_nothing_of_the_earlier_folder(tmp_path):
    for name in ("old.bin", "new.bin"):
        with fill_folder(tmp_path / "model") as folder:
            (folder / name).write_bytes(b"1")
    assert names(tmp_path / "model") == [MARKER, "new.bin"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text("{"),
        lambda folder: (folder / MARKER).write_text("[]"),
        lambda folder: (folder / "a.bin").unlink(),
        lambda folder: (folder / "a.bin").write_bytes(b"1234"),
    ],
    ids=["no-marker", "half-marker", "other-marker", "file-gone", "file-short"],
)
def test_a_damaged_folder_is_not_complete(tmp_path, damage):
    with fill_folder(tmp_path / "model") as folder:
        (folder / "a.bin").write_bytes(b"12345")
    damage(tmp_path / "model")
    assert marker(tmp_path / "model") is None


def test_a_kill_between_the_two_renames_loses_neither_folder(tmp_path):
    with fill_folder(tmp_path / "model") as folder:
        (folder / "a.bin").write_bytes(b"old")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    (tmp_path / "model").mkdir()  # the new one, without a marker yet
    assert find_complete(tmp_path / "model") == tmp_path / ".model.old"
    settle(tmp_path / "model")
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a.bin").read_bytes() == b"old"


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from composer_core.run.directory import RunDirectory
    run, step = RunDirectory(Path(sys.argv[1])), int(sys.argv[2])
    while True:
        step += 1
        with run.checkpoint(step % 7, keep=3) as folder:  # steps come again: replaced as well as made
            for name in range(4):
                (folder / str(name)).write_text(f"{step % 7} " * (2000 + name))
        print(step, flush=True)
""")


@pytest.mark.slow
def test_every_listed_checkpoint_is_whole_whenever_the_writer_is_killed(tmp_path):
    chance = random.Random(0)
    run = RunDirectory(tmp_path)
    step = 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        child.send_signal(signal.SIGKILL)
        rest = child.communicate()[0].split()
        step = int(rest[-1]) if rest else step + 1
        found = run.complete_checkpoints()
        assert found
        for number, path in found:
            for name in range(4):
                assert (path / str(name)).read_text() == f"{number} " * (2000 + name)


def test_a_document_that_is_not_there_is_none_and_one_that_is_comes_back(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.read_json("plan.json") is None
    write_json(tmp_path / "plan.json", {"a": [1, None]})
    assert run.read_json("plan.json") == {"a": [1, None]}
