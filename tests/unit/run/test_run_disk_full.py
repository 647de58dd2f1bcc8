"""A full disk, a real one: a tmpfs of some kilobytes, mounted for the test."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from composer_core.errors import RunFailed
from composer_core.plugins.registry import Registry
from composer_core.run.directory import create_run
from composer_core.run.files import JsonLines, disk_full, read_jsonl
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 512 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place):
    """Leave not a byte."""
    with (place / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)


SAID = "the disk is full\n  fix: free some room, then `composer-run resume` goes on from the checkpoint"


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(small_disk):
    lines = JsonLines(small_disk / "metrics.jsonl")
    lines.write({"step": 1})
    fill(small_disk)
    # what is left of the file's own page takes the beginning of the line
    with pytest.raises(RunFailed) as caught:
        lines.write({"step": 2, "text": "y" * 9000})
    assert str(caught.value) == f"{small_disk}/metrics.jsonl: {SAID}"
    assert (small_disk / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (small_disk / "ballast").unlink()
    lines.write({"step": 3})
    assert read_jsonl(small_disk / "metrics.jsonl") == [{"step": 1}, {"step": 3}]


def test_a_library_that_passes_the_system_s_words_on_means_a_full_disk_too(tmp_path):
    from safetensors import SafetensorError

    # room is back by the time it is asked: the tensors that did not fit are gone
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert str(disk_full(error, tmp_path)) == f"{tmp_path}: {SAID}"
    assert disk_full(SafetensorError("Error while serializing: header too large"), tmp_path) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")], ids=type)
def test_a_checkpoint_that_does_not_fit_is_gone_and_the_one_before_stays(small_disk, error):
    run = create_run(small_disk, "r")
    with run.checkpoint(1, keep=3) as folder:
        (folder / "weights").write_text("1")
    # a library for tensors has its own idea of how to say it
    with pytest.raises(RunFailed) as caught, run.checkpoint(2, keep=3) as folder:  # noqa: PT012
        fill(folder)
        raise error
    assert caught.value.problem == "the disk is full"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_1"]
    assert [step for step, _ in run.complete_checkpoints()] == [1]


@pytest.mark.slow
def test_a_run_whose_disk_fills_up_says_so_in_one_line_and_can_go_on(small_disk, write_spec):
    """The worker's every file, the log and the last event included, meets the full disk."""
    registry = Registry.discover()
    loaded = load_spec(write_spec("fill"), registry)
    run = create_run(small_disk, "r")
    run.write_json("plan.json", make_plan(loaded, registry).to_json())
    worker = [sys.executable, "-m", "composer_core.run.worker", "--quiet", str(run.plan)]
    done = subprocess.run(worker, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert f": {SAID}\n" in done.stderr
    assert "Traceback" not in done.stderr
    for path in (run.metrics, run.events, run.rollouts):
        read_jsonl(path)  # every line is whole
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_1"]
