"""States: one per decision, with what the agent had seen."""

from __future__ import annotations

import pytest

from composer_core.errors import UsageError
from composer_core.traces.model import Observation, Step, ToolCall, Trace
from composer_core.traces.states import states


def agent(text, **more):
    return Step(source="agent", message=text, **more)


def user(text):
    return Step(source="user", message=text)


def contents(state):
    return [message["content"] for message in state.messages]


CALL = ToolCall("c", "ls", {})
TRACE = Trace(
    id="s",
    steps=[
        user("go"),
        agent("a", reasoning="why a", tool_calls=(CALL,), observations=(Observation("c", "x", is_error=True),)),
        user("more"),
        agent("<think>why b</think>b"),
        agent("c"),
    ],
)


def test_each_state_holds_what_came_before_and_the_turn_itself():
    first, second, third = states(TRACE)
    assert [state.state_id for state in (first, second, third)] == ["s::0000", "s::0001", "s::0002"]
    assert [state.step for state in (first, second, third)] == [1, 3, 4]
    assert contents(first) == ["go"]
    assert contents(second) == ["go", "a", "x", "more"]
    assert second.action == {"role": "assistant", "content": "<think>why b</think>b"}


def test_thinking_leaves_the_history_and_stays_in_the_action():
    first, _, third = states(TRACE)
    assert first.action["reasoning_content"] == "why a"
    assert "reasoning_content" not in third.messages[1]
    assert contents(third)[-1] == "b"


def test_thinking_stays_in_the_history_on_request():
    *_, third = states(TRACE, strip_thinking=False)
    assert third.messages[1]["reasoning_content"] == "why a"
    assert contents(third)[-1] == "<think>why b</think>b"


def test_messages_hold_no_key_that_a_service_would_refuse():
    *_, third = states(TRACE)
    assert {key for m in third.messages for key in m} == {"role", "content", "tool_calls", "tool_call_id"}


def test_a_system_prompt_is_put_in_front_unless_there_is_one():
    first, *_ = states(TRACE, system_prompt="Be good.")
    assert first.messages[0] == {"role": "system", "content": "Be good."}
    own = Trace(id="s", steps=[Step(source="system", message="Mine."), agent("a")])
    assert contents(next(states(own, system_prompt="Be good."))) == ["Mine."]


def test_a_system_prompt_also_goes_before_a_trace_that_begins_with_a_turn():
    assert contents(next(states(Trace(id="s", steps=[agent("a")]), system_prompt="Be good."))) == ["Be good."]


def test_copied_and_synthetic_turns_are_history_but_no_decision():
    steps = [user("go"), agent("a", copied=True), agent("error", synthetic=True), agent("b")]
    [state] = states(Trace(id="s", steps=steps))
    assert (state.state_id, contents(state)) == ("s::0002", ["go", "a", "error"])


def test_a_long_history_loses_whole_steps_from_its_front():
    steps = [Step(source="system", message="S"), user("1"), user("2"), user("3"), agent("a")]
    trace = Trace(id="s", steps=steps)

    def kept(limit):
        [state] = states(trace, max_history_tokens=limit, count_tokens=lambda message: 10)
        return contents(state)

    assert kept(40) == ["S", "1", "2", "3"]
    assert kept(39) == ["S", "2", "3"]
    assert kept(1) == ["S", "3"]  # the last step always stays: without it there is no question


def test_a_call_is_never_kept_without_its_result_nor_a_result_without_its_call():
    for limit in range(1, 60, 7):
        for state in states(TRACE, max_history_tokens=limit, count_tokens=lambda message: 10):
            roles = [message["role"] for message in state.messages]
            assert roles.count("tool") == sum("tool_calls" in message for message in state.messages)


def test_tokens_are_estimated_as_a_quarter_of_the_characters():
    trace = Trace(id="s", steps=[user("x" * 4000), user("y" * 400), agent("a")])
    [state] = states(trace, max_history_tokens=1000)
    assert [len(text) for text in contents(state)] == [400]


def test_a_limit_below_one_is_refused():
    with pytest.raises(UsageError, match="max_history_tokens must be at least 1, got 0"):
        list(states(TRACE, max_history_tokens=0))


def test_a_trace_without_a_turn_has_no_state():
    assert list(states(Trace(id="s", steps=[user("go")]))) == []
