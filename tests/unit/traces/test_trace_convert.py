"""What is written in another format says the same when it is read again."""

from __future__ import annotations

import json

import pytest
from trace_files import DATA, EXPECTED, read, write_lines

from composer_core.traces.convert import to_atif, to_chat
from composer_core.traces.convert import write_lines as write_rows
from composer_core.traces.messages import to_messages
from composer_core.traces.model import Observation, Step, ToolCall, Trace


def said(trace):
    """What a conversion must keep; only ids that were missing are made up."""
    return [
        (m["role"], m["content"] or None, m.get("reasoning_content"), m.get("is_error"), m.get("exit_code"), _calls(m))
        for m in to_messages(trace.steps)
    ]


def _calls(message):
    return [call["function"] for call in message.get("tool_calls", [])]


def ids(trace):
    return [call.id for step in trace.steps for call in step.tool_calls]


@pytest.mark.parametrize("file", EXPECTED)
def test_atif_documents_say_what_the_trace_said(file, tmp_path):
    for trace in read(DATA / file, EXPECTED[file]["format"])[0]:
        path = write_lines(tmp_path / "t.json", json.dumps(to_atif(trace)))
        [again], tally = read(path, "atif")
        assert said(again) == said(trace)
        assert all(new == old for new, old in zip(ids(again), ids(trace), strict=True) if old)
        assert [step.copied for step in again.steps] == [step.copied for step in trace.steps]
        assert (tally.records, tally.malformed_lines, dict(tally.lost)) == (len(trace.steps), 0, {})


@pytest.mark.parametrize("file", EXPECTED)
def test_chat_lines_say_what_the_trace_said(file, tmp_path):
    traces, _ = read(DATA / file, EXPECTED[file]["format"])
    assert write_rows((to_chat(trace) for trace in traces), tmp_path / "c.jsonl") == len(traces)
    again, _ = read(tmp_path / "c.jsonl", "openai-chat")
    assert [to_messages(trace.steps) for trace in again] == [to_messages(trace.steps) for trace in traces]
    assert [trace.tools for trace in again] == [trace.tools for trace in traces]


def test_an_atif_document_has_the_fields_the_format_asks_for():
    call, broken = ToolCall("c1", "ls", {"path": "."}), ToolCall("", "rm", "{oops", "{oops")
    step = Step(
        source="agent",
        reasoning="hm",
        tool_calls=(call, broken),
        observations=(Observation("c1", "a.txt", is_error=False),),
        token_ids=(5, 6),
        logprobs=(-0.1, -0.2),
    )
    trace = Trace(id="t", steps=[Step(source="user", message="go"), step], format="codex", extra={"version": "1"})
    assert to_atif(trace) == {
        "schema_version": "ATIF-v1.7",
        "session_id": "t",
        "agent": {"name": "codex", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "go"},
            {
                "step_id": 2,
                "source": "agent",
                "message": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"tool_call_id": "c1", "function_name": "ls", "arguments": {"path": "."}},
                    {"tool_call_id": "call_2_1", "function_name": "rm", "arguments": {}},
                ],
                "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
                "metrics": {"completion_token_ids": [5, 6], "logprobs": [-0.1, -0.2]},
                "extra": {
                    "composer": {
                        "arguments": {"call_2_1": "{oops"},
                        "results": [{"is_error": False}],
                        "no_message": True,
                    }
                },
            },
        ],
    }


def test_nothing_is_left_of_a_file_whose_rows_fail(tmp_path):
    def rows():
        yield {"a": 1}
        raise RuntimeError("broken")

    (tmp_path / "out.jsonl").write_text("old\n")
    with pytest.raises(RuntimeError, match="broken"):
        write_rows(rows(), tmp_path / "out.jsonl")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "old\n")]
