"""A program that may not end by itself, run to its end or to its limits."""

from __future__ import annotations

import os
import threading
import time

import pytest

from composer_core.run.bounded import Start, in_parallel, run_bounded


def sh(script, *, seconds=20, cap=100_000, **start):
    return run_bounded(Start(("sh", "-c", script), **start), seconds=seconds, output_bytes=cap)


def test_exit_code_and_both_outputs_come_back():
    ended = sh("echo out; echo err >&2; exit 3")
    assert (ended.code, ended.stdout, ended.stderr, ended.timed_out, ended.truncated) == (
        3, b"out\n", b"err\n", False, False,
    )  # fmt: skip


def test_a_signal_is_128_and_its_number():
    assert sh("kill -TERM $$").code == 143


def test_more_than_a_pipe_holds_passes_both_ways():
    data = os.urandom(1 << 20)
    ended = sh("cat", stdin=data, cap=1 << 21)
    assert ended.stdout == data


def test_a_program_that_does_not_read_its_stdin_is_not_waited_for():
    ended = sh("exit 0", stdin=bytes(1 << 20))
    assert (ended.code, ended.timed_out) == (0, False)


def test_time_ends_it_with_its_process_group(tmp_path):
    begin = time.monotonic()
    ended = sh(f"sh -c 'sleep 2; touch {tmp_path}/late' & wait", seconds=0.5)
    assert (ended.code, ended.timed_out) == (137, True)
    assert 0.5 <= time.monotonic() - begin < 2
    time.sleep(2)
    assert not (tmp_path / "late").exists()


def test_time_ends_it_also_when_it_closed_its_outputs():
    ended = sh("exec >&- 2>&-; sleep 30", seconds=0.5)
    assert (ended.code, ended.timed_out) == (137, True)


def test_output_beyond_the_cap_ends_it_and_is_not_kept():
    ended = sh("printf 12345 >&2; sleep 0.2; printf 1234567890; sleep 30", cap=8)
    assert (ended.code, ended.truncated, ended.timed_out) == (137, True, False)
    assert (ended.stderr, ended.stdout) == (b"12345", b"123")


def test_output_of_exactly_the_cap_is_not_too_much():
    ended = sh("printf 12345678", cap=8)
    assert (ended.code, ended.truncated, ended.stdout) == (0, False, b"12345678")


def test_what_it_leaves_behind_does_not_hold_up_its_end():
    begin = time.monotonic()
    ended = sh("sleep 30 & echo done")
    assert (ended.code, ended.stdout, ended.timed_out) == (0, b"done\n", False)
    assert time.monotonic() - begin < 10


def test_a_program_that_cannot_be_started_is_an_error():
    with pytest.raises(FileNotFoundError):
        run_bounded(Start(("/no/such",)), seconds=1, output_bytes=1)


def test_in_parallel_keeps_the_order_and_the_number_of_workers():
    running, most, lock = [], [], threading.Lock()

    def work(n):
        with lock:
            running.append(n)
            most.append(len(running))
        time.sleep(0.02 * (6 - n))
        with lock:
            running.remove(n)
        return n * n

    assert in_parallel(work, list(range(6)), workers=3) == [0, 1, 4, 9, 16, 25]
    assert max(most) == 3
    assert in_parallel(work, [], workers=None) == []


def test_in_parallel_does_not_begin_what_an_error_made_useless():
    begun = []

    def work(n):
        begun.append(n)
        time.sleep(0.05)
        raise ValueError(n)

    with pytest.raises(ValueError, match="0"):
        in_parallel(work, list(range(50)), workers=2)
    assert len(begun) < 10
