"""JSON of strangers, the look at a file's head, and the index of a file's records."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from trace_files import read

from composer_core.traces.decode import dumps, loads
from composer_core.traces.index import StepIndex
from composer_core.traces.readers.base import outline

# -- decode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"a": [1, "é", null]}', "[1e3]", "Infinity", '{"a": 1, "a": 2}'])
def test_what_json_reads_is_read_alike(text):
    assert loads(text.encode()) == json.loads(text)


def test_what_could_not_be_written_again_is_repaired():
    assert loads('"\\ud83d!"') == "?!"
    assert loads(b'{"\xff": 1}') == {"\ufffd": 1}


@pytest.mark.parametrize("text", [b"", b"{", b"{'a': 1}", b"[" * 100_000], ids=["empty", "cut", "python", "deep"])
def test_what_is_no_json_is_one_kind_of_error(text):
    with pytest.raises(ValueError):
        loads(text)


def test_integers_of_any_size_are_written():
    assert dumps({"n": 2**80}) == '{"n":1208925819614629174706176}'


# -- outline -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b'{"type": "a", "n": 1, "x": {"type": "deep"}}\n{"b": 2}', [{"type": "a", "n": "", "x": ""}, {"b": ""}]),
        (b'\xef\xbb\xbf[ {"role": "user"}, {"role": "to', [{"role": "user"}, {"role": "t"}]),
        (b'{\n  "a": [{"b": 1}],\n  "c": "\\"d\\": {"', [{"a": "", "c": '\\"d\\": {'}]),
        (b'{"text": "cut off {\\"messages\\": [1, 2', [{"text": 'cut off {\\"messages\\": [1, '}]),
        (b"PK\x03\x04 no json", []),
        (b'{"a": {"b": "cut\n# {[ a comment\r\n{"c": "d"}', [{"a": ""}, {"c": "d"}]),
    ],
    ids=["lines", "array", "document", "cut inside a string", "binary", "broken lines first"],
)  # fmt: skip
def test_the_head_shows_the_keys_of_the_first_objects(head, expected):
    assert list(outline(head)) == expected


def test_a_head_that_ends_in_a_long_string_is_read_in_one_go():
    head = b'{"text": "' + b'\\" ' * 20_000 + b"\\"
    start = time.perf_counter()
    assert [list(keys) for keys in outline(head)] == [["text"]]
    assert time.perf_counter() - start < 1  # it takes milliseconds; from every quote to the end it took minutes


# -- index -------------------------------------------------------------------------------------------------------------


def test_records_belong_to_their_step_however_late_they_stand():
    index = StepIndex()
    index.begin(0, 10)
    index.begin(1, 20)
    index.add(30)
    index.begin(0, 40)
    index.add(50, step=1)
    assert [index.offsets(step) for step in range(len(index))] == [[10], [20, 30, 50], [40]]
    copy = index.head(2)
    copy.begin(0, 60)
    copy.add(70, step=0)
    assert [copy.offsets(step) for step in range(3)] == [[10, 70], [20, 30, 50], [60]]
    assert [index.offsets(step) for step in range(3)] == [[10], [20, 30, 50], [40]]


def test_reading_every_step_holds_one_step_in_memory(tmp_path):
    record = {"type": "user", "message": {"content": "x" * 4000}}
    with (tmp_path / "s.jsonl").open("w") as file:
        for number in range(2000):
            file.write(json.dumps(record | {"uuid": f"u{number}", "parentUuid": f"u{number - 1}"}) + "\n")
    size = (tmp_path / "s.jsonl").stat().st_size
    tracemalloc.start()
    [trace] = read(tmp_path / "s.jsonl", "claude-code")[0]
    assert sum(1 for _ in trace.steps) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 8_000_000
    assert peak < 2_000_000  # buffers, and 200 bytes a record: no body
