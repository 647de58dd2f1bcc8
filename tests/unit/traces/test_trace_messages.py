"""Chat messages to steps and back: nothing is lost, in either direction."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import DATA, EXPECTED, read

from composer_core.traces.messages import from_messages, text_of, to_messages
from composer_core.traces.model import Observation, Step, ToolCall

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,  "b": 2}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Use the tool.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "Error: overflow", "is_error": True},
    {"role": "assistant", "content": "3", "refusal": None},
]


def test_a_conversation_comes_back_as_it_was():
    assert to_messages(from_messages(CONVERSATION)) == CONVERSATION


def test_steps_hold_names_parsed_arguments_results_and_errors():
    _, _, turn, answer = from_messages(CONVERSATION)
    assert turn.tool_calls == (ToolCall("c1", "add", {"a": 1, "b": 2}, '{"a": 1,  "b": 2}'),)
    [seen] = turn.observations
    assert (seen.call_id, seen.content, seen.is_error) == ("c1", "Error: overflow", True)
    assert (turn.reasoning, answer.message) == ("Use the tool.", "3")


def test_broken_arguments_stay_the_text_that_was_sent():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    [step] = from_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert step.tool_calls[0].arguments == '{"a": '
    assert to_messages([step])[0]["tool_calls"] == [call]


def test_old_spellings_come_back_in_todays():
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "g", "arguments": {"x": 1}}]},
    ]
    calls = [message["tool_calls"][0]["function"] for message in to_messages(from_messages(old))]
    assert calls == [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": '{"x":1}'}]


def test_a_result_that_follows_no_turn_of_the_agent_keeps_its_place():
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "lost", "content": "late"}]
    assert to_messages(from_messages(messages)) == messages


def test_a_call_inside_the_message_is_not_repeated_and_its_result_is_the_users():
    call = ToolCall("", "bash", {"command": "ls"}, in_message=True)
    step = Step(source="agent", message="```bash\nls\n```", tool_calls=(call,), observations=(Observation("", "a"),))
    assert to_messages([step]) == [
        {"role": "assistant", "content": "```bash\nls\n```"},
        {"role": "user", "content": "a"},
    ]


def test_flags_and_thinking_are_left_out_on_request():
    messages = to_messages(from_messages(CONVERSATION), reasoning=False, flags=False)
    assert "reasoning_content" not in messages[2]
    assert "is_error" not in messages[3]
    assert len(messages) == len(CONVERSATION)


def test_a_role_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no chat message: role 'narrator'"):
        from_messages([{"role": "narrator", "content": ""}])


def test_text_of_parts_leaves_images_out():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "text", "text": "b"},
    ]
    assert text_of(parts) == "a\nb"


@pytest.mark.parametrize("file", [file for file in EXPECTED if EXPECTED[file]["format"] == "openai-chat"][1:])
def test_recorded_chats_come_back_as_they_were(file):
    rows = [json.loads(line) for line in (DATA / file).read_text().splitlines()]
    traces, _ = read(DATA / file, "openai-chat")
    assert [to_messages(trace.steps) for trace in traces] == [row["messages"] for row in rows]


@pytest.mark.parametrize("file", EXPECTED)
def test_steps_to_messages_to_steps_keeps_calls_results_and_errors(file):
    for trace in read(DATA / file, EXPECTED[file]["format"])[0]:
        again = from_messages(to_messages(trace.steps))
        assert _calls(again) == _calls(trace.steps)
        assert _results(again) == _results(trace.steps)


def _calls(steps):
    """Calls that stand in a message are text there, and text they stay."""
    return [(c.id, c.name, c.arguments) for step in steps for c in step.tool_calls if not c.in_message]


def _results(steps):
    return [
        (seen.content, seen.is_error, seen.exit_code)
        for step in steps
        for call, seen in step.answers()
        if seen.call_id and not (call and call.in_message)
    ]


TEXT = st.text(max_size=8)
RESULT = st.fixed_dictionaries(
    {"content": TEXT}, optional={"is_error": st.booleans(), "exit_code": st.integers(0, 255)}
)
ARGUMENTS = st.one_of(TEXT, st.dictionaries(TEXT, st.integers(-5, 5), max_size=2).map(json.dumps))


@st.composite
def conversations(draw):
    """Turns with any number of calls, each answered or not; ids are unique."""
    messages = []
    for turn in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            messages.append({"role": draw(st.sampled_from(["user", "system", "developer"])), "content": draw(TEXT)})
        names = draw(st.lists(TEXT, max_size=3))
        message = {"role": "assistant", "content": draw(st.none() | TEXT)}
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXT)
        ids = [f"call_{turn}_{at}" for at in range(len(names))]
        if names:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": draw(ARGUMENTS)}}
                for i, n in zip(ids, names, strict=True)
            ]
        messages.append(message)
        answered = [i for i in ids if draw(st.booleans())]
        messages += [{"role": "tool", "tool_call_id": i, **draw(RESULT)} for i in answered]
    return messages


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_any_conversation_comes_back_as_it_was(messages):
    assert to_messages(from_messages(messages)) == messages
