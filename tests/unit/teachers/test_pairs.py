import json

import pytest

from composer_core.errors import UsageError
from composer_core.protocols import TeacherReply
from composer_core.teachers.asking import Answer
from composer_core.teachers.pairs import Pair, action_key, extract_dpo_pairs, extract_pairs, load_pairs, save_pairs
from composer_core.traces.model import TraceState


def text(content):
    return {"role": "assistant", "content": content}


def call(name, arguments, content=None):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }


def state(action, state_id="s::0000"):
    return TraceState(state_id, [{"role": "user", "content": "go"}], action, 1)


def said(teacher, message, *, finish="stop", state_id="s::0000"):
    reply = TeacherReply(message, finish, 1, 1, 0.0, "m")
    return Answer(teacher, state_id, reply)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (text("a  b\n"), text("a b"), True),
        (text("a b"), text("A b"), False),
        # arguments as JSON, in whatever order and spacing they were written
        (call("read", '{"a": 1, "b": [2]}'), call("read", '{"b":[2],"a":1}'), True),
        (call("read", '{"a": 1}'), call("read", {"a": 1}), True),
        (call("read", '{"a": 1}'), call("read", '{"a": "1"}'), False),
        (call("read", "{}"), call("write", "{}"), False),
        # what is said beside a call is talk
        (call("read", "{}", "Let me look."), call("read", "{}"), True),
        (call("read", "not json"), call("read", "not  json"), True),
        (text([{"type": "text", "text": "a"}]), text("a"), True),
    ],
)
def test_what_counts_as_the_same_action(one, other, same):
    assert (action_key(one) == action_key(other)) is same


def test_where_enough_teachers_agree_against_the_agent_a_pair_arises():
    answers = [said("a", call("ls", "{}")), said("b", call("ls", "{ }")), said("c", text("I do not know"))]
    pairs, summary = extract_pairs([state(text("rm"))], answers, agreement=2)
    (pair,) = pairs
    assert action_key(pair.chosen) == action_key(call("ls", "{}"))
    assert pair.rejected == text("rm")
    assert (pair.n_agreeing, pair.teachers, pair.state_id) == (2, ["a", "b"], "s::0000")
    assert (summary.states, summary.pairs) == (1, 1)


@pytest.mark.parametrize(
    ("answers", "agent", "counted"),
    [
        ([said("a", text("x")), said("b", text("x"))], text("x"), "like_the_agent"),
        ([said("a", text("x")), said("b", text("y"))], text("z"), "disagreed"),
        ([said(t, text(m)) for t, m in zip("abcd", "xxyy", strict=True)], text("z"), "tied"),
        ([], text("z"), "unanswered"),
        ([said("a", text("x"), finish="length")], text("z"), "unanswered"),
        # twice the same teacher is one voice
        ([said("a", text("x")), said("a", text("x"))], text("z"), "disagreed"),
    ],
    ids=["like-the-agent", "disagreed", "tied", "unanswered", "cut-off", "one-voice"],
)
def test_every_state_without_a_pair_is_counted_with_its_reason(answers, agent, counted):
    pairs, summary = extract_pairs([state(agent)], answers, agreement=2)
    assert pairs == []
    assert getattr(summary, counted) == 1
    assert summary.like_the_agent + summary.disagreed + summary.tied + summary.unanswered == 1


def test_answers_that_cannot_be_used_are_counted_by_reason():
    answers = [
        said("a", text("x"), finish="length"),
        said("b", None),
        said("c", text("   ")),
        Answer("d", "s::0000", None, error="HTTP 400"),
    ]
    _, summary = extract_pairs([state(text("z"))], answers)
    assert summary.dropped_answers == {"cut off": 1, "empty": 2, "failed": 1}


def test_the_seeds_name_gives_the_pairs_alone():
    answers = [said("a", text("x")), said("b", text("x"))]
    assert [p.n_agreeing for p in extract_dpo_pairs([state(text("z"))], answers, agreement_threshold=2)] == [2]


def test_an_agreement_below_one_is_refused():
    with pytest.raises(UsageError, match="agreement must be at least 1, got 0"):
        extract_pairs([], [], agreement=0)


def test_the_file_has_the_published_keys_and_comes_back(tmp_path):
    pair = Pair("s::0000", [{"role": "user", "content": "ü"}], text("a"), text("b"), 2, ["t", "u"], None, {"k": 1})
    save_pairs([pair], tmp_path / "new" / "pairs.jsonl")
    line = json.loads((tmp_path / "new" / "pairs.jsonl").read_text())
    assert list(line) == ["state_id", "messages", "chosen", "rejected", "n_agreeing", "teachers", "ref", "meta"]
    assert load_pairs(tmp_path / "new" / "pairs.jsonl") == [pair]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a pair"),
        ('{"state_id": "x"}', "not a pair"),
        ("SAME", "chosen and rejected are the same action"),
        ("USER", "chosen is not an assistant message"),
        ("", "there is no pair in this file"),
    ],
)
def test_a_bad_line_is_named_with_its_place(line, said, tmp_path):
    good = {
        "state_id": "s",
        "messages": [],
        "chosen": text("a"),
        "rejected": text("a "),
        "n_agreeing": 2,
        "teachers": [],
    }
    if line == "SAME":
        line = json.dumps(good)
    if line == "USER":
        line = json.dumps(good | {"chosen": {"role": "user", "content": "a"}})
    file = tmp_path / "pairs.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError) as caught:
        load_pairs(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_texts_with_line_separators_of_unicode_come_back_from_the_file(tmp_path):
    pair = Pair("s", [text("a\u2028b\x85c")], text("yes\u2029"), text("no"), 2, ["a", "b"])
    save_pairs([pair], tmp_path / "pairs.jsonl")
    assert load_pairs(tmp_path / "pairs.jsonl") == [pair]


def test_thinking_written_into_an_answer_is_not_compared():
    assert action_key(text("<think>so\nmany ways</think>\n ls")) == action_key(text("ls"))
    assert action_key(text("<think>nothing comes of it</think>")) == ""


@pytest.mark.parametrize("calls", ["ls", True, [1], [{"function": "ls"}]], ids=str)
def test_calls_that_are_none_can_be_compared_all_the_same(calls):
    assert action_key({"role": "assistant", "tool_calls": calls}) != ""


def test_answers_of_another_model_have_no_voice():
    got, summary = extract_pairs(
        [state(text("agent"))], [said("a", text("x"), finish="other model"), said("b", text("x"))]
    )
    assert (got, summary.dropped_answers) == ([], {"other model": 1})


def test_a_pair_says_which_models_its_teachers_were():
    (pair,), _ = extract_pairs(
        [state(text("agent"))], [said("a", text("x")), said("b", text("x")), said("c", text("y"))]
    )
    assert pair.meta == {"n_answers": 3, "models": {"a": "m", "b": "m"}}


def test_a_line_that_lacks_a_key_is_named_with_what_it_lacks(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"state_id": "s", "messages": []}\n')
    with pytest.raises(UsageError) as caught:
        load_pairs(tmp_path / "pairs.jsonl")
    assert caught.value.problem == "not a pair: it lacks chosen, rejected, n_agreeing, teachers"
