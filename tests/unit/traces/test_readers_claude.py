"""Claude Code sessions: turns, results, branches, compactions, sub-agents, and lines that are none."""

from __future__ import annotations

import pytest
from trace_files import DATA, read, write_lines

from composer_core.errors import UsageError
from composer_core.traces.messages import text_of, to_messages
from composer_core.traces.model import Origin

FOLDER = DATA / "claude-code"


def user(uuid, parent, content, **more):
    return {"type": "user", "uuid": uuid, "parentUuid": parent, "message": {"role": "user", "content": content}, **more}


def turn(uuid, parent, *blocks, id=None, **more):
    message = {"role": "assistant", "id": id or f"msg_{uuid}", "content": list(blocks)}
    return {"type": "assistant", "uuid": uuid, "parentUuid": parent, "message": message, **more}


def says(text):
    return {"type": "text", "text": text}


def use(id, name="Bash", **arguments):
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id, content="ok", **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def told(trace):
    return [text_of(step.message) for step in trace.steps]


@pytest.fixture
def session(tmp_path):
    """`session(*records)` -> its traces and tally."""
    return lambda *records: read(write_lines(tmp_path / "s.jsonl", *records), "claude-code")


# -- turns -------------------------------------------------------------------------------------------------------------


def test_records_of_one_message_id_are_one_turn_with_all_its_results(session):
    [trace], tally = session(
        user("u", None, "go"),
        turn("a", "u", {"type": "thinking", "thinking": "hm"}, id="m"),
        turn("b", "a", says("Both."), id="m"),
        turn("c", "b", use("1", path="x"), id="m"),
        user("r1", "c", [result("1", "one")]),
        turn("d", "c", use("2"), id="m"),  # a second branch of the same parent, and the same turn
        user("r2", "d", [result("2", "two", is_error=True)]),
    )
    [_, step] = trace.steps
    assert (step.reasoning, step.message) == ("hm", "Both.")
    assert [(call.id, call.name, call.arguments) for call in step.tool_calls] == [
        ("1", "Bash", {"path": "x"}),
        ("2", "Bash", {}),
    ]
    assert [(seen.call_id, seen.content, seen.is_error) for seen in step.observations] == [
        ("1", "one", None),
        ("2", "two", True),
    ]
    assert (tally.assistant_turns, tally.tool_calls, tally.tool_errors, tally.branches) == (1, 2, 1, 1)


def test_a_late_result_goes_to_the_turn_that_called(session):
    [trace], _ = session(
        user("u", None, "go"),
        turn("a", "u", use("slow"), use("fast")),
        user("r", "a", [result("fast")]),
        turn("b", "r", says("meanwhile")),
        user("l", "b", [result("slow", "at last")]),
    )
    assert [[seen.call_id for seen in step.observations] for step in trace.steps] == [[], ["fast", "slow"], []]


def test_a_result_without_a_call_is_kept_as_a_step_of_its_own(session):
    [trace], tally = session(user("r", "gone", [result("lost", "?")]), turn("a", "r", says("so")))
    assert trace.steps[0].source == "system"
    assert trace.steps[0].observations[0].call_id == "lost"
    assert tally.tool_results == 1


def test_text_beside_a_result_is_what_the_user_says_next(session):
    [trace], _ = session(
        user("u", None, "go"), turn("a", "u", use("1")), user("r", "a", [result("1"), says("[interrupted]")])
    )
    assert told(trace) == ["go", "", "[interrupted]"]
    assert len(trace.steps[1].observations) == 1


def test_contents_of_every_kind_are_read():
    [trace], _ = read(FOLDER / "cc-2.0.55-image-result.jsonl", "claude-code")
    parts = trace.steps[0].observations[0].content
    assert [part["type"] for part in parts] == ["image_url"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_message_that_the_harness_wrote_is_marked(session):
    record = turn("a", None, says("API Error: 529"))
    record["message"]["model"] = "<synthetic>"
    [trace], tally = session(record)
    assert trace.steps[0].synthetic
    assert tally.assistant_turns == 1


# -- chains ------------------------------------------------------------------------------------------------------------


def test_progress_records_and_parallel_calls_make_no_branch():
    traces, tally = read(FOLDER / "cc-2.1.29-session" / "session.jsonl", "claude-code")
    assert tally.branches == 48  # uuids with several children
    assert [trace.id for trace in traces] == ["session"]


def test_a_prompt_that_goes_back_makes_a_branch_that_shares_its_beginning(session):
    first, branch = session(
        user("u", None, "add a test"),
        turn("a", "u", says("done")),
        user("v", "a", "rename it"),
        turn("b", "v", says("renamed")),
        user("w", "a", "delete it"),  # back behind the first answer
        turn("c", "w", says("deleted")),
    )[0]
    assert told(first) == ["add a test", "done", "rename it", "renamed"]
    assert told(branch) == ["add a test", "done", "delete it", "deleted"]
    assert [step.copied for step in branch.steps] == [True, True, False, False]
    assert (branch.id, branch.origin) == ("s#2", Origin("branch", "s", 1))


def test_after_a_compaction_the_model_saw_the_summary_only(session):
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "x", "parentUuid": None}
    before, after = session(
        user("u", None, "long story"),
        turn("a", "u", says("...")),
        boundary | {"logicalParentUuid": "a"},
        user("s", "x", "Summary: a long story.", isCompactSummary=True),
        turn("b", "s", says("on we go")),
    )[0]
    assert told(before) == ["long story", "..."]
    assert told(after) == ["Summary: a long story.", "on we go"]
    assert after.origin == Origin("continuation", "s", 1)


def test_an_inline_sub_agent_hangs_below_the_call_with_its_prompt(session):
    main, agent = session(
        user("u", None, "go", isSidechain=False),
        turn("a", "u", use("t1", "Task", prompt="find it")),
        user("p", None, "find it", isSidechain=True),
        turn("q", "p", says("found"), isSidechain=True),
        user("r", "a", [result("t1", "found")]),
    )[0]
    assert told(main) == ["go", ""]
    assert told(agent) == ["find it", "found"]
    assert (agent.id, agent.origin) == ("s/sidechain-1", Origin("subagent", "s", 1, "t1"))


def test_a_sub_agent_whose_prompt_holds_an_image_hangs_below_its_session(session):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    [agent], _ = session(user("p", None, [image], isSidechain=True))
    assert agent.origin == Origin("subagent", "s")


def test_records_of_a_sub_agent_with_an_id_are_its_trace_however_they_are_mixed(session):
    traces, tally = session(
        user("u", None, "go"),
        user("p", None, "x", isSidechain=True, agentId="ax"),
        user("q", None, "y", isSidechain=True, agentId="by"),
        turn("r", "p", says("from x"), isSidechain=True, agentId="ax"),
        turn("s", "q", says("from y"), isSidechain=True, agentId="by"),
    )
    told_by = {trace.id: told(trace) for trace in traces}
    assert told_by == {"s": ["go"], "s/ax": ["x", "from x"], "s/by": ["y", "from y"]}
    assert tally.sidechain_records == 4


def test_messages_inside_progress_records_are_not_the_agents(session):
    nested = {"type": "progress", "uuid": "n", "parentUuid": "u", "data": {"message": turn("z", None, use("9"))}}
    [trace], tally = session(user("u", None, "go"), nested, turn("a", "n", says("hi")))
    assert told(trace) == ["go", "hi"]
    assert (tally.tool_calls, tally.no_turn) == (0, {"progress": 1})


# -- what is no record -------------------------------------------------------------------------------------------------


def test_every_line_that_holds_no_object_is_counted_with_its_number(session):
    [trace], tally = session(user("u", None, "go"), "# a comment", "42", "", turn("a", "u", says("hi")), '{"type": "us')
    assert told(trace) == ["go", "hi"]
    assert (tally.records, tally.malformed_lines) == (2, 3)
    assert [(loss.at, loss.reason.split(":")[0]) for loss in tally.losses] == [
        (2, "not JSON"),
        (3, "no JSON object but int"),
        (6, "not JSON"),
    ]


def test_a_last_line_that_is_cut_off_is_said_to_be():
    _, tally = read(FOLDER / "cc-2.1.14-truncated-last-line.jsonl", "claude-code")
    assert [str(loss) for loss in tally.losses] == ["38: the last line is cut off"]


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(session, tmp_path):
    [plain], _ = session(user("u", None, "go"), turn("a", "u", says("hi")))
    written = (tmp_path / "s.jsonl").read_bytes()
    (tmp_path / "w.jsonl").write_bytes(b"\xef\xbb\xbf" + written.replace(b"\n", b"\r\n"))
    [windows], tally = read(tmp_path / "w.jsonl", "claude-code")
    assert to_messages(windows.steps) == to_messages(plain.steps)
    assert tally.malformed_lines == 0


def test_half_a_surrogate_pair_becomes_a_question_mark(session):
    line = '{"type":"user","uuid":"u","parentUuid":null,"message":{"content":"cut \\ud83d"},"n":NaN}'
    [trace], tally = session(line)
    assert told(trace) == ["cut ?"]
    assert tally.malformed_lines == 0


def test_unknown_records_and_blocks_are_counted_by_type(session):
    [trace], tally = session(
        user("u", None, "go"),
        {"type": "telemetry"},
        {"silly": "this"},
        turn("a", "u", says("hi"), {"type": "server_tool_use"}),
        user("b", "a", 7),
    )
    assert dict(tally.unknown_types) == {"telemetry": 1, "(no type)": 1, "block/server_tool_use": 1}
    assert dict(tally.lost) == {"user record without a message": 1}
    assert told(trace) == ["go", "hi"]


# -- bodies on access --------------------------------------------------------------------------------------------------


def test_a_step_is_the_same_whether_read_alone_in_a_slice_or_in_order():
    [trace], _ = read(FOLDER / "cc-2.1.14-coverage-fix.jsonl", "claude-code")
    in_order = list(trace.steps)
    assert [trace.steps[at] for at in range(len(trace.steps))] == in_order
    assert trace.steps[-3:] == in_order[-3:]
    assert trace.steps[-1] == in_order[-1]
    with pytest.raises(IndexError):
        trace.steps[len(in_order)]


def test_a_file_that_changed_in_between_is_said_to_have(session, tmp_path):
    [trace], _ = session(user("u", None, "go"), turn("a", "u", says("hi")))
    (tmp_path / "s.jsonl").write_text("x" * 500)
    with pytest.raises(UsageError) as caught:
        list(trace.steps)
    message = "this file changed while it was being read\n  fix: read it again"
    assert str(caught.value) == f"{tmp_path / 's.jsonl'}: {message}"
