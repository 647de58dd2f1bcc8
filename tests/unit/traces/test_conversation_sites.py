"""Error sites of conversations: the same as those of a recorded session that says the same."""

import pytest

from composer_core.protocols import RolloutText
from composer_core.traces.conversation_sites import conversation_sites, rollout_columns
from composer_core.traces.error_sites import rollout_sites

SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls, content=""):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def result(name, content):
    return {"role": "tool", "name": name, "content": content}


def raised(name, message):
    """What becomes of an exception."""
    return result(name, str({"error": message}))


def told(*messages, tools=("look", "run_sql")):
    return [(site["turn"], site["kind"], site["evidence"]) for site in conversation_sites(list(messages), tools)]


# -- what a tool said --------------------------------------------------------------------------------------------------

RAISED = {
    "tool-of-no-such-name": ("lok", "Tool lok not found.", "tool_not_found"),
    "missing-argument": ("look", "look() missing 1 required positional argument: 'key'", "type_error"),
    "misspelt-argument": ("look", "look() got an unexpected keyword argument 'kee'", "type_error"),
    "its-own-exception": ("look", "there's no key 'x'", "runtime_error"),
    "both-kinds-of-quotes": ("look", "it's \"bad\"", "runtime_error"),
    "too-slow": ("look", "the request timed out", "timeout"),
    # by its name a shell, whose output is a program's; but an exception of the tool itself is about the call
    "argument-of-something-like-a-shell": (
        "run_sql", "run_sql() missing 1 required positional argument: 'q'", "type_error",
    ),
    "exception-of-something-like-a-shell": ("run_sql", "near select: syntax", "runtime_error"),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISED)
def test_an_exception_of_a_tool_is_a_site_of_the_turn_that_called_it(case):
    name, message, kind = RAISED[case]
    messages = [turn(call("look", key="a")), result("look", "1"), turn(call(name)), raised(name, message), turn()]
    assert told(*messages) == [(1, kind, message)]


def test_a_site_has_the_context_of_a_recorded_one():
    messages = [turn(call("look", key="x")), raised("look", "no key x"), turn(content="sorry")]
    assert conversation_sites(messages, [SCHEMA, "run_sql"]) == [
        {
            "turn": 0,
            "kind": "runtime_error",
            "evidence": "no key x",
            "context": {
                "error_kind": "runtime_error",
                "error_message": "no key x",
                "tool_name": "look",
                "arguments": {"key": "x"},
                "tool_schema": {"type": "object", "properties": {}},
                "available_tools": ["look", "run_sql"],
            },
        }
    ]


SILENT = {
    "value": "42",
    "nothing": "",
    "more-than-an-error": "{'error': 'x', 'code': 1}",
    "no-text": "{'error': 3}",
    "no-literal": "{'error': open}",
    "cut-off": "{'error': ",
    "other-key": "{'rows': []}",
    "wordless-exception": "{'error': ''}",
}


@pytest.mark.parametrize("content", SILENT.values(), ids=SILENT)
def test_a_result_that_does_not_say_what_went_wrong_is_no_site(content):
    assert told(turn(call("look")), result("look", content), turn()) == []


def test_a_tool_that_answers_with_an_error_message_is_a_site_though_nothing_was_raised():
    assert told(turn(call("look")), result("look", "Error: no such key")) == [
        (0, "runtime_error", "Error: no such key")
    ]


def test_results_are_joined_to_their_calls_by_name_since_those_of_async_tools_come_last():
    messages = [turn(call("slow", n=1), call("look", n=2)), raised("look", "no"), result("slow", "done"), turn()]
    (site,) = conversation_sites(messages, ["slow", "look"])
    assert (site["context"]["tool_name"], site["context"]["arguments"]) == ("look", {"n": 2})


def test_two_calls_of_one_tool_are_answered_in_their_order():
    messages = [turn(call("look", n=1), call("look", n=2)), result("look", "fine"), raised("look", "no"), turn()]
    (site,) = conversation_sites(messages, ["look"])
    assert site["context"]["arguments"] == {"n": 2}


def test_the_same_failure_again_is_a_repetition_that_names_the_first_turn():
    messages = [turn(call("look")), raised("look", "no"), turn(call("look")), raised("look", "no"), turn()]
    first, second = conversation_sites(messages, ["look"])
    assert (first["turn"], first["kind"]) == (0, "runtime_error")
    assert (second["turn"], second["kind"], second["context"]["first_turn"]) == (1, "repeated_failure", 0)


def test_a_call_that_was_not_carried_out_any_more_is_no_site():
    assert told(turn(call("look")), result("look", "1"), turn(call("look"))) == []


# -- calls that do not parse -------------------------------------------------------------------------------------------

UNPARSED = {
    "no-json": (
        '<tool_call>\n{"name": "look", "arguments": {"key": }}\n</tool_call>',
        "json_decode",
        "malformed JSON in a tool call: Expecting value: line 1 column 39 (char 38)",
        "look",
    ),
    "no-name": (
        '<tool_call>{"arguments": {}}</tool_call>',
        "json_decode",
        'malformed JSON in a tool call: it has no "name"',
        "",
    ),
    "arguments-are-text": (
        '<tool_call>{"name": "look", "arguments": "x"}</tool_call>',
        "json_decode",
        'malformed JSON in a tool call: its arguments must be an object, as in {"name": ..., "arguments": {...}}',
        "look",
    ),
    "not-closed": (
        'I look it up.\n<tool_call>\n{"name": "look", "argu',
        "json_decode",
        "malformed JSON in a tool call: it does not end with </tool_call>",
        "look",
    ),
    "another-form": ("<tool_call>look<arg_key>k</tool_call>", "runtime_error", "this tool call cannot be parsed", ""),
    "second-of-two": (
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n<tool_call>{"name": "lok", }</tool_call>',
        "json_decode",
        "malformed JSON in a tool call: Expecting property name enclosed in double quotes: line 1 column 17 (char 16)",
        "lok",
    ),
    "words-behind-it": (
        '<tool_call>{"name": "look", "arguments": {}}</tool_call> Done.',
        "runtime_error",
        "this tool call is not carried out: nothing may follow </tool_call>",
        "look",
    ),
    "bare-in-another-form": (
        '{"name": "look", "parameters": {}} Done.',
        "json_decode",
        "malformed JSON in a tool call: Extra data: line 1 column 36 (char 35)",
        "look",
    ),
    "without-marks": (
        '{"name": "look", "parameters": {]}',
        "json_decode",
        "malformed JSON in a tool call: Expecting property name enclosed in double quotes: line 1 column 33 (char 32)",
        "look",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNPARSED)
def test_a_call_that_cannot_be_parsed_is_a_site(case):
    text, kind, evidence, name = UNPARSED[case]
    (site,) = conversation_sites([turn(call("look")), result("look", "1"), turn(content=text)], [SCHEMA])
    assert (site["turn"], site["kind"], site["evidence"]) == (1, kind, evidence)
    assert site["context"]["tool_name"] == name
    assert ("tool_schema" in site["context"]) == (name == "look")


@pytest.mark.parametrize(
    "text",
    ["The answer is 4.", "<think>a <tool_call> would do</think>The answer is 4.", '{"answer": 4}', ""],
    ids=["plain", "only-thought-of", "other-json", "empty"],
)
def test_a_turn_that_calls_nothing_is_no_site(text):
    assert told(turn(content=text)) == []


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_are_the_rows_and_the_sites():
    row = {"prompt": [{"role": "user", "content": "q"}], "answer": "4"}
    messages = [turn(call("lok")), raised("lok", "Tool lok not found."), turn()]
    columns = rollout_columns(row, messages, ["look"])
    assert row == {"prompt": [{"role": "user", "content": "q"}], "answer": "4"}
    assert {name: value for name, value in columns.items() if name != "error_sites"} == row
    rollout = RolloutText("u", [1], [2], [True], 0.0, columns)
    (site,) = rollout_sites(rollout)
    assert (site.turn, site.kind, site.context["available_tools"]) == (0, "tool_not_found", ["look"])


def test_a_rollout_without_an_error_adds_nothing_so_its_reward_decides():
    messages = [turn(call("look")), result("look", "1"), turn(content="2")]
    columns = rollout_columns({"answer": "1"}, messages, ["look"])
    assert columns == {"answer": "1"}
    (whole,) = rollout_sites(RolloutText("u", [1], [2], [True], 0.0, columns))
    assert (whole.turn, whole.kind) == (-1, "low_reward")
    assert rollout_sites(RolloutText("u", [1], [2], [True], 1.0, columns)) == []


def test_a_text_and_a_chat_without_tools_have_no_sites():
    unparsed = "<tool_call>{</tool_call>"
    assert rollout_columns({"a": 1}, unparsed, ["look"]) == {"a": 1}
    assert rollout_columns({"a": 1}, [turn(content=unparsed)], ()) == {"a": 1}


def test_sites_and_tools_that_the_row_brings_are_kept():
    own = [{"turn": 0, "kind": "runtime_error", "evidence": "mine"}]
    messages = [turn(call("look")), raised("look", "no"), turn()]
    given = {"error_sites": own, "tools": ["mine"]}
    assert rollout_columns(given, messages, [SCHEMA]) == given
    assert rollout_columns({"error_sites": None, "tools": None}, messages, [SCHEMA])["tools"] == [SCHEMA]
