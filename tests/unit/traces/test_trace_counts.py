"""Every recorded file: its format is recognised, and its counts are those counted from the raw JSON."""

from __future__ import annotations

import pytest
from trace_files import DATA, EXPECTED, READERS, read

NAMES = {  # in expected_counts.json -> in a tally
    "records": "records",
    "turns": "assistant_turns",
    "tool_use": "tool_calls",
    "tool_result": "tool_results",
    "is_error": "tool_errors",
    "sidechain": "sidechain_records",
    "branches": "branches",
    "malformed": "malformed_lines",
}


@pytest.mark.parametrize("file", EXPECTED)
def test_counts_are_those_of_the_raw_json(file):
    expected = dict(EXPECTED[file])
    _, tally = read(DATA / file, expected.pop("format"))
    assert {name: getattr(tally, NAMES[name]) for name in expected} == expected


@pytest.mark.parametrize("file", EXPECTED)
def test_one_reader_knows_the_file_by_its_content(file, tmp_path):
    head = (DATA / file).read_bytes()[: 1 << 16]
    renamed = tmp_path / f"renamed{(DATA / file).suffix}"
    claims = [name for name, reader in READERS.items() if reader.recognises(renamed, head)]
    assert claims == [EXPECTED[file]["format"]]


@pytest.mark.parametrize("file", EXPECTED)
def test_no_call_and_no_result_is_lost_on_the_way_into_steps(file):
    expected = EXPECTED[file]
    steps = [step for trace in read(DATA / file, expected["format"])[0] for step in trace.steps if not step.copied]
    # the last action of SWE-agent 0.x submits: its observation is in the trajectory, but the model never saw it
    unseen = 1 if file.endswith("test-repo-i1.traj") else 0
    assert sum(len(step.tool_calls) for step in steps) == expected["tool_use"]
    assert sum(len(step.observations) for step in steps) == expected["tool_result"] - unseen


@pytest.mark.parametrize("file", [file for file in EXPECTED if file.startswith("claude-code/")])
def test_turns_of_claude_code_are_steps_of_its_traces(file):
    traces, _ = read(DATA / file, "claude-code")
    assert sum(len(trace.turns) for trace in traces) == EXPECTED[file]["turns"]
    seen = [s.is_error is True for t in traces for step in t.steps for s in step.observations]
    assert sum(seen) == EXPECTED[file]["is_error"]
