"""The other formats: what each has that the recorded files do not show."""

from __future__ import annotations

import json
import zipfile

import pytest
from trace_files import DATA, READERS, read, write_lines

from composer_core.traces.messages import text_of, to_messages
from composer_core.traces.model import Origin


def write(path, value):
    path.write_text(json.dumps(value, indent=1))
    return path


# -- ATIF --------------------------------------------------------------------------------------------------------------


def test_token_ids_and_logprobs_that_differ_in_number_are_dropped_and_counted(tmp_path):
    metrics = {"completion_token_ids": list(range(37)), "logprobs": [-0.5] * 44, "completion_tokens": 37}
    steps = [
        {"step_id": 1, "source": "agent", "message": "a", "metrics": metrics},
        {"step_id": 2, "source": "agent", "message": "b", "metrics": metrics | {"logprobs": [-0.5] * 37}},
    ]
    document = {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": {"name": "x"}, "steps": steps}
    [trace], tally = read(write(tmp_path / "t.json", document), "atif")
    bad, good = trace.steps
    assert (bad.message, bad.token_ids, bad.logprobs, bad.metrics) == ("a", None, None, {"completion_tokens": 37})
    assert (len(good.token_ids), len(good.logprobs)) == (37, 37)
    assert [str(loss) for loss in tally.losses] == ["1: token ids and log-probs differ in number: 37 and 44"]


def test_copied_context_is_no_turn_of_a_continuation():
    name = "terminus_2_hello-world-context-summarization-linear-history.trajectory.cont-1.json"
    [trace], tally = read(DATA / "atif" / name, "atif")
    assert [step.copied for step in trace.steps] == [True] * 4 + [False] * 4
    assert tally.assistant_turns == 5  # the file's, the copied one included
    assert trace.origin == Origin("continuation", "NORMALIZED_SESSION_ID")


def test_a_step_of_an_unknown_source_is_counted_and_the_rest_stays(tmp_path):
    steps = [{"source": "narrator"}, 7, {"source": "user", "message": "hi"}]
    [trace], tally = read(write(tmp_path / "t.json", {"schema_version": "ATIF-v1.7", "steps": steps}), "atif")
    assert [step.message for step in trace.steps] == ["hi"]
    assert dict(tally.lost) == {"step without a known source": 2}
    assert tally.records == 3


# -- chats -------------------------------------------------------------------------------------------------------------


def test_sharegpt_turns_are_chat_messages():
    traces, _ = read(DATA / "openai-chat" / "glaive-toolcall-sharegpt.json", "openai-chat")
    messages = to_messages(traces[0].steps)
    assert [message["role"] for message in messages][:6] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    [call] = messages[3]["tool_calls"]
    assert call["function"]["name"] == "search_recipes"
    assert json.loads(call["function"]["arguments"]) == {"ingredients": ["chicken", "bell peppers", "rice"]}
    assert traces[0].tools[0]["function"]["name"] == "search_recipes"


def test_one_bad_message_costs_the_conversation_only_that(tmp_path):
    messages = [{"role": "user", "content": "hi"}, "what?", {"role": "assistant", "content": "hello"}]
    path = write_lines(tmp_path / "c.jsonl", {"messages": messages}, {"messages": 3})
    [trace], tally = read(path, "openai-chat")
    assert to_messages(trace.steps) == [messages[0], messages[2]]
    assert [str(loss) for loss in tally.losses] == [
        "1: message that cannot be read: message 2: no chat message: role ''",
        "2: conversation without a list of messages",
    ]


def test_the_whole_items_of_an_array_that_is_cut_off_are_read(tmp_path):
    whole = json.dumps([{"messages": [{"role": "user", "content": str(n)}]} for n in range(3)])
    (tmp_path / "c.json").write_text(whole[:-12])
    traces, tally = read(tmp_path / "c.json", "openai-chat")
    assert [trace.steps[0].message for trace in traces] == ["0", "1"]
    assert (tally.records, tally.malformed_lines) == (2, 1)


def test_a_conversation_spread_over_lines_is_one_document(tmp_path):
    [trace], _ = read(write(tmp_path / "c.json", {"messages": [{"role": "user", "content": "hi"}]}), "openai-chat")
    assert trace.steps[0].message == "hi"


# -- Codex -------------------------------------------------------------------------------------------------------------


def test_the_bare_layout_of_codex_is_read_like_the_envelope(tmp_path):
    output = json.dumps({"output": "no such file", "metadata": {"exit_code": 2}})
    path = write_lines(
        tmp_path / "rollout-old.jsonl",
        {"id": "abc", "timestamp": "2025-06-01", "instructions": None, "git": {}},
        {"record_type": "state"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "**Looking**"}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["pwd"]}},
    )
    assert READERS["codex"].recognises(path, path.read_bytes())
    [trace], tally = read(path, "codex")
    said, first, aborted = trace.steps
    assert (said.message, first.reasoning) == ("look", "**Looking**")
    assert (first.tool_calls[0].name, first.tool_calls[0].arguments) == ("shell", {"command": ["ls"]})
    [seen] = first.observations
    assert (seen.content, seen.is_error, seen.exit_code) == ("no such file", True, 2)
    assert (aborted.tool_calls[0].name, aborted.observations) == ("local_shell_call", ())
    assert (tally.records, tally.tool_calls, tally.tool_results, tally.tool_errors) == (7, 2, 1, 1)
    assert trace.extra["session"] == "abc"


def test_agent_messages_that_codex_repeats_for_the_screen_are_read_once():
    [trace], _ = read(DATA / "codex" / "rollout-0.40-short.jsonl", "codex")
    said = [step.message for step in trace.steps if step.source == "agent" and step.message]
    assert len(said) == 2


def test_a_compaction_of_codex_begins_a_trace_with_its_summary(tmp_path):
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    path = write_lines(
        tmp_path / "r.jsonl",
        {"type": "response_item", "payload": message},
        {"type": "compacted", "payload": {"message": "Summary."}},
        {"type": "response_item", "payload": message},
    )
    _, second = read(path, "codex")[0]
    assert [step.message for step in second.steps] == ["Summary.", "hi"]
    assert (second.id, second.origin) == ("r#2", Origin("continuation", "r", 0))


# -- SWE-agent, mini-swe-agent -----------------------------------------------------------------------------------------


def test_demonstrations_are_context_and_actions_in_the_text_are_calls():
    [trace], _ = read(DATA / "swe-agent" / "test-repo-i1.traj", "swe-agent")
    assert [step.copied for step in trace.steps[:3]] == [False, True, False]
    first = trace.steps[3]
    [call] = first.tool_calls
    assert (call.name, call.arguments, call.in_message) == ("bash", {"command": 'find_file "missing_colon.py"\n'}, True)
    assert text_of(first.observations[0].content).startswith('Found 1 matches for "missing_colon.py"')


def test_tool_calls_of_swe_agent_1_keep_their_ids_and_results():
    [trace], _ = read(DATA / "swe-agent" / "marshmallow-1867-function-calling.traj", "swe-agent")
    calls = [call for step in trace.steps for call in step.tool_calls]
    answered = [call for step in trace.steps for call, _ in step.answers()]
    assert calls == answered
    assert calls[0].arguments == {"filename": "reproduce.py"}


def test_a_trajectory_without_a_history_is_read_from_its_steps(tmp_path):
    step = {"action": "ls", "observation": "a", "response": "Look.\n```\nls\n```"}
    path = write(tmp_path / "t.traj", {"environment": "x", "trajectory": [step, step | {"action": ""}]})
    [trace], tally = read(path, "swe-agent")
    assert [message["role"] for message in to_messages(trace.steps)] == ["assistant", "user", "assistant", "user"]
    assert (tally.assistant_turns, tally.tool_calls, tally.tool_errors) == (2, 1, None)


def test_mini_swe_agent_1_is_known_by_its_fences_and_wrapped_messages(tmp_path):
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "THOUGHT\n```bash\nmake\n```"},
        {"role": "user", "content": "<returncode>2</returncode>\n<output>no rule</output>"},
        {"role": "exit", "content": "LimitsExceeded"},
    ]
    path = write(tmp_path / "x.traj.json", {"info": {}, "messages": messages, "trajectory_format": "mini-swe-agent-1"})
    assert [name for name, r in READERS.items() if r.recognises(path, path.read_bytes())] == ["mini-swe-agent"]
    [trace], tally = read(path, "mini-swe-agent")
    assert trace.steps[1].tool_calls[0].arguments == {"command": "make"}
    assert trace.steps[1].observations[0].exit_code == 2
    assert (tally.records, tally.tool_errors) == (4, 1)


# -- OpenHands ---------------------------------------------------------------------------------------------------------


def text(said):
    return {"type": "text", "text": said}


def message(source, role, said):
    return {"kind": "MessageEvent", "source": source, "llm_message": {"role": role, "content": [text(said)]}}


V1 = [
    {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": text("You act."), "tools": []},
    message("user", "user", "go"),
    *(
        {
            "kind": "ActionEvent",
            "source": "agent",
            "thought": [text("Both.")],
            "tool_name": "bash",
            "tool_call_id": call,
            "tool_call": {"id": call, "name": "bash", "arguments": '{"command": "ls"}', "origin": "completion"},
            "llm_response_id": "r1",
        }
        for call in ("a", "b")
    ),
    {
        "kind": "ObservationEvent",
        "source": "environment",
        "tool_call_id": "a",
        "observation": {"content": [text("no")], "is_error": True, "exit_code": 1},
    },
    {"kind": "AgentErrorEvent", "source": "agent", "tool_call_id": "b", "error": "Tool bash2 not found"},
    {"kind": "ConversationStateUpdateEvent", "source": "environment"},
    message("agent", "assistant", "bye"),
]


@pytest.mark.parametrize("layout", ["array", "lines", "history"])
def test_openhands_version_1_is_read_in_every_layout(tmp_path, layout):
    path = tmp_path / "run.json"
    if layout == "array":
        write(path, V1)
    elif layout == "lines":
        write_lines(path, *V1)
    else:
        write_lines(path, {"instance_id": "i", "test_result": {}, "history": V1})
    assert [name for name, r in READERS.items() if r.recognises(path, path.read_bytes())] == ["openhands"]
    [trace], tally = read(path, "openhands")
    system, asked, acted, bye = trace.steps
    assert (system.message, asked.message, acted.message, bye.message) == ("You act.", "go", "Both.", "bye")
    assert [(c.id, c.name, c.arguments) for c in acted.tool_calls] == [
        ("a", "bash", {"command": "ls"}),
        ("b", "bash", {"command": "ls"}),
    ]
    assert [(s.call_id, s.content, s.is_error, s.exit_code) for s in acted.observations] == [
        ("a", "no", True, 1),
        ("b", "Tool bash2 not found", True, None),
    ]
    assert (tally.records, tally.assistant_turns, tally.tool_calls, tally.tool_errors) == (8, 3, 2, 2)


def test_openhands_takes_what_the_model_sent_from_the_stored_response():
    [trace], _ = read(DATA / "openhands" / "basic_gui_mode.json", "openhands")
    run = trace.steps[1]
    assert (run.tool_calls[0].name, run.tool_calls[0].arguments) == (
        "execute_bash",
        {"command": "mkdir -p /workspace/todo-app"},
    )
    assert (run.observations[0].exit_code, run.observations[0].is_error) == (0, False)


# -- Inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_puts_attachments_back_and_reads_errors_of_both_ages(tmp_path):
    call = {"id": "c", "function": "bash", "arguments": {"cmd": "ls"}, "type": "function"}
    messages = [
        {"role": "user", "content": "attachment://abc"},
        {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "hm"}, text("ok")], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "", "tool_error": "timeout"},
    ]
    sample = {"id": "s", "epoch": 2, "messages": messages, "attachments": {"abc": "a long text"}}
    path = write(tmp_path / "log.json", {"version": 2, "status": "success", "eval": {}, "samples": [sample, 7]})
    [trace], tally = read(path, "inspect")
    asked, acted = trace.steps
    assert (trace.id, asked.message, acted.message, acted.reasoning) == ("log#s.2", "a long text", "ok", "hm")
    assert (acted.tool_calls[0].name, acted.tool_calls[0].arguments) == ("bash", {"cmd": "ls"})
    assert acted.observations[0].is_error is True
    assert (tally.tool_errors, tally.malformed_lines) == (1, 1)


def test_a_zip_with_a_broken_sample_keeps_the_others(tmp_path):
    sample = {"id": 1, "epoch": 1, "messages": [{"role": "assistant", "content": "hi"}]}
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample))
        archive.writestr("samples/2_epoch_1.json", "{not json")
    traces, tally = read(tmp_path / "log.eval", "inspect")
    assert [trace.id for trace in traces] == ["log#1.1"]
    assert tally.malformed_lines == 1


def test_a_zip_that_is_cut_off_is_counted(tmp_path):
    whole = (DATA / "inspect" / "log_streaming.eval").read_bytes()
    (tmp_path / "log.eval").write_bytes(whole[: len(whole) // 2])
    traces, tally = read(tmp_path / "log.eval", "inspect")
    assert (traces, tally.malformed_lines) == ([], 1)


# -- verifiers ---------------------------------------------------------------------------------------------------------


def test_what_stands_in_a_prompt_of_verifiers_is_no_turn_to_learn_from(tmp_path):
    shot = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    path = write_lines(
        tmp_path / "results.jsonl",
        {"prompt": shot, "completion": [{"role": "assistant", "content": "4"}], "reward": 0.5, "task": "sum"},
    )
    assert READERS["verifiers"].recognises(path, path.read_bytes())
    [trace], tally = read(path, "verifiers")
    assert [step.copied for step in trace.steps] == [False, True, False, False]
    assert (trace.reward, trace.extra["task"], tally.assistant_turns) == (0.5, "sum", 1)


def test_each_leaf_of_a_message_graph_is_a_trace_that_shares_its_beginning(tmp_path):
    def node(parent, role, content, **more):
        return {"parent": parent, "message": {"role": role, "content": content}, "sampled": role == "assistant", **more}

    nodes = [
        node(None, "user", "go"),
        node(0, "assistant", "a", token_ids=[7, 8, 9], mask=[False, True, True], logprobs=[-1.0, -2.0]),
        node(1, "user", "more"),
        node(2, "assistant", "b"),
        node(0, "assistant", "c", token_ids=[7, 8], mask=[False, True], logprobs=[-1.0, -2.0]),
    ]
    record = {
        "version": 1,
        "task": {"type": "T"},
        "nodes": nodes,
        "rewards": {"x": {"score": 0.5, "weight": 2.0}, "y": None},
    }
    path = write_lines(tmp_path / "traces.jsonl", record)
    (first, second), tally = read(path, "verifiers")
    assert [step.message for step in first.steps] == ["go", "a", "more", "b"]
    assert (first.steps[1].token_ids, first.steps[1].logprobs) == ((8, 9), (-1.0, -2.0))
    assert [(step.message, step.copied) for step in second.steps] == [("go", True), ("c", False)]
    assert second.origin == Origin("branch", "traces#1", 0)
    assert second.steps[1].token_ids is None
    assert [str(loss) for loss in tally.losses] == ["1: token ids and log-probs differ in number: 1 and 2"]
    assert (first.reward, tally.assistant_turns, tally.branches) == (1.0, 3, 1)
