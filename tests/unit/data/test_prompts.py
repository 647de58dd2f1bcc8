from __future__ import annotations

import datetime
import json

import datasets
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from composer_core.data.prompts import RESERVED, load_prompts
from composer_core.errors import MissingError, UsageError
from composer_core.spec.model import PromptsSpec


@pytest.fixture
def load(tmp_path):
    """Load prompts from lines: objects are written as JSON, bytes as they are."""

    def _load(*lines, needed=None, **options):
        file = tmp_path / "tasks.jsonl"
        file.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        return load_prompts(PromptsSpec(path=str(file), **options), columns_needed=needed)

    return _load


@pytest.fixture
def complaint(load, tmp_path):
    """The whole message that loading ends with, the temporary folder taken off."""

    def _complaint(*lines, **options):
        with pytest.raises(UsageError) as caught:
            load(*lines, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return _complaint


def test_a_text_prompt_becomes_a_user_message_and_columns_stay(load):
    assert load({"question": "2+2?", "answer": "4"}, column="question") == [
        {"question": "2+2?", "answer": "4", "prompt": [{"role": "user", "content": "2+2?"}]}
    ]


def test_without_chat_a_prompt_stays_text(load):
    assert load({"prompt": "Once "}, chat=False) == [{"prompt": "Once "}]


def test_messages_are_preferred_and_the_system_message_goes_in_front(load):
    turn = {"role": "user", "content": "hi"}
    assert load({"messages": [turn]}, system="Be brief.") == [
        {"messages": [turn], "prompt": [{"role": "system", "content": "Be brief."}, turn]}
    ]


def test_a_conversation_with_tools_is_kept_as_it_is(load):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": "4", "tool_call_id": "a"},
    ]
    assert load({"messages": messages})[0]["prompt"] == messages


def test_rows_get_each_others_columns_as_none(load):
    rows = load({"prompt": "a", "x": 1}, {"prompt": "b", "y": 2})
    assert [(row["x"], row["y"]) for row in rows] == [(1, None), (None, 2)]


def test_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(load):
    assert len(load(b'\xef\xbb\xbf{"prompt": "a"}\r', b"\r", b"   ", b'{"prompt": "b"}\r', b"")) == 2


def test_limit_stops_reading_before_a_broken_line(load):
    assert len(load({"prompt": "a"}, {"prompt": "b"}, b"{broken", limit=2)) == 2


def test_builtin_digits_are_64_rows_with_their_digit():
    rows = load_prompts(PromptsSpec(builtin="digits", chat=False), columns_needed={"target": "reward 'x'"})
    assert len(rows) == 64
    assert rows[13] == {"prompt": "n3", "target": "3"}


def test_a_needed_column_may_be_null_but_not_absent(load, complaint):
    assert load({"prompt": "a", "answer": None}, needed={"answer": "reward 'exact-match'"})[0]["answer"] is None
    assert complaint(
        {"prompt": "a", "answer": "1"}, {"prompt": "b", "solution": "2"}, needed={"answer": "reward 'exact-match'"}
    ) == ("tasks.jsonl:2: no column 'answer', which reward 'exact-match' needs; there are: prompt, solution")


WRONG = {
    "broken": (
        [{"prompt": "a"}, b'{"prompt": "b"'],
        "tasks.jsonl:2: not JSON: Expecting ',' delimiter at column 15\n  fix: one object per line",
    ),
    "array": (
        [b'[{"prompt": "a"}]'],
        'tasks.jsonl:1: expected an object, this is an array\n  fix: one object per line: {"prompt": "..."}',
    ),
    "null": (
        [b"null"],
        'tasks.jsonl:1: expected an object, this is null\n  fix: one object per line: {"prompt": "..."}',
    ),
    "latin-1": (
        [{"prompt": "a"}, b'{"prompt": "caf\xe9"}'],
        "tasks.jsonl:2: not UTF-8: byte 0xe9 at column 16\n  fix: save the file as UTF-8",
    ),
    "nan": ([b'{"prompt": "a", "x": NaN}'], "tasks.jsonl:1: not JSON: NaN is Python's, not JSON's; write null"),
    "empty-file": ([b""], "tasks.jsonl: no prompts: there is no row in it\n  fix: give at least one row"),
    "no-column": (
        [{"question": "a", "answer": "b"}],
        "tasks.jsonl:1: no column `messages` or `prompt`; there are: question, answer"
        "\n  fix: name the one that holds the prompt: data.prompts.column",
    ),
    "column-gone": (
        [{"prompt": "a"}, {"promt": "b"}],
        "tasks.jsonl:2: no column 'prompt', which holds the prompt; there are: promt",
    ),
    "empty-prompt": ([{"prompt": " \n"}], "tasks.jsonl:1: prompt: the prompt is empty"),
    "null-prompt": (
        [{"prompt": None}],
        "tasks.jsonl:1: prompt: a prompt is text or a list of chat messages, this is null",
    ),
    "no-messages": ([{"messages": []}], "tasks.jsonl:1: messages: the prompt is empty"),
    "message-is-text": (
        [{"messages": ["hi"]}],
        "tasks.jsonl:1: messages[0]: a chat message is an object with role and content, this is text",
    ),
    "role": (
        [{"messages": [{"role": "human", "content": "hi"}]}],
        "tasks.jsonl:1: messages[0]: no role 'human'\n  fix: one of system, developer, user, assistant, tool",
    ),
    "content": (
        [{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": ["x"]}]}],
        "tasks.jsonl:1: messages[1]: the content of a message must be text, this is a list",
    ),
    "answered": (
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        "tasks.jsonl:1: messages: these messages end with the assistant's turn: there is nothing left to answer"
        "\n  fix: drop the last message, or move it to a column of its own",
    ),
    "two-prompts": (
        [{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}],
        "tasks.jsonl:1: two columns claim to be the prompt: 'messages', which is used, "
        "and 'prompt', which it would replace"
        "\n  fix: rename or drop one of them, or say `column: prompt`",
    ),
    "half-a-surrogate-pair": (
        [b'{"prompt": "a\\ud800"}'],
        "tasks.jsonl:1: column 'prompt' holds what JSON in UTF-8 cannot: "
        "'utf-8' codec can't encode character '\\ud800' in position 13: surrogates not allowed",
    ),
}


@pytest.mark.parametrize(("lines", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_row_is_refused_with_its_place(complaint, lines, message):
    assert complaint(*lines) == message


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_column_that_a_reward_is_called_with_anyway_is_refused(complaint, name):
    assert complaint({"prompt": "a", name: 1}) == (
        f"tasks.jsonl:1: a column cannot be called {name!r}: rewards get something else by that name"
    )


def test_two_system_messages_are_refused(complaint):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert complaint({"messages": messages}, system="Be brief.") == (
        "tasks.jsonl:1: messages: this prompt has a system message already"
        "\n  fix: leave data.prompts.system out, or drop it here"
    )


def test_a_chat_cannot_be_continued_as_raw_text(complaint):
    assert complaint({"messages": [{"role": "user", "content": "u"}]}, chat=False) == (
        "tasks.jsonl:1: messages: with chat: false a prompt is text, this is a list\n  fix: leave data.prompts.chat out"
    )


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    missing = tmp_path / "none.jsonl"
    with pytest.raises(UsageError) as caught:
        load_prompts(PromptsSpec(path=str(missing)))
    assert str(caught.value) == f"{missing}: no such file\n  fix: paths are relative to the spec"
    with pytest.raises(UsageError) as caught:
        load_prompts(PromptsSpec(path=str(tmp_path)))
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"


@given(
    content=st.one_of(
        st.binary(max_size=80), st.text(alphabet='{}[]":,\\ntrufalse0-1E. prompt\n\x00', max_size=80).map(str.encode)
    )
)
@example(content=b"[" * 100_000)
@example(content=b'{"prompt": ' + b"9" * 5000 + b"}")
@example(content=b'{"prompt": "a", "prompt": 1e999}')
@example(content='{"prompt": "a"}'.encode("utf-16"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bytes_end_in_anything_but_a_usage_error(tmp_path, content):
    file = tmp_path / "fuzz.jsonl"
    file.write_bytes(content)
    try:
        rows = load_prompts(PromptsSpec(path=str(file)))
    except UsageError as error:
        rows, place = [], error.at
    else:
        place = str(file)
    assert place.startswith(str(file))
    assert all(row["prompt"] for row in rows)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "messages", "prompt", "user", "tool_calls"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


@given(row=st.dictionaries(st.sampled_from(["prompt", "messages", "answer"]), json_values, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_row_ends_in_anything_but_a_usage_error(tmp_path, row):
    file = tmp_path / "fuzz.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    try:
        rows = load_prompts(PromptsSpec(path=str(file)))
    except UsageError:
        return
    assert rows[0]["prompt"][-1]["role"] != "assistant"


# -- Hugging Face datasets ---------------------------------------------------------------------------------------------


def test_a_saved_dataset_is_read_with_all_its_columns(tmp_path):
    datasets.Dataset.from_list([{"q": "2+2?", "answer": 4}, {"q": "3+3?", "answer": 6}]).save_to_disk(tmp_path / "one")
    rows = load_prompts(PromptsSpec(dataset=str(tmp_path / "one"), column="q", chat=False, limit=1))
    assert rows == [{"q": "2+2?", "answer": 4, "prompt": "2+2?"}]


def test_null_keys_that_a_dataset_adds_to_messages_are_dropped(tmp_path):
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "content": "t", "tool_call_id": "a"}]
    datasets.Dataset.from_list([{"messages": messages}]).save_to_disk(tmp_path / "chats")
    assert load_prompts(PromptsSpec(dataset=str(tmp_path / "chats")))[0]["prompt"] == messages


def test_a_missing_split_of_a_saved_dataset_lists_those_there_are(tmp_path):
    one = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    with pytest.raises(UsageError) as caught:
        load_prompts(PromptsSpec(dataset=str(tmp_path / "two"), split="dev"))
    assert str(caught.value) == f"{tmp_path / 'two'}: no split 'dev' in this dataset\n  fix: split: one of train, test"


def test_a_dataset_value_that_json_has_not_is_refused_with_its_row(tmp_path):
    row = {"prompt": "a", "when": datetime.date(2024, 1, 1)}
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "dates")
    with pytest.raises(UsageError) as caught:
        load_prompts(PromptsSpec(dataset=str(tmp_path / "dates")))
    assert str(caught.value) == (
        f"{tmp_path / 'dates'}, row 1 of train: column 'when' holds what JSON in UTF-8 cannot: "
        "Object of type date is not JSON serializable"
    )


def test_a_hub_dataset_offline_is_something_missing(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'acme/tasks' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(MissingError) as caught:
        load_prompts(PromptsSpec(dataset="acme/tasks"))
    assert str(caught.value) == (
        "acme/tasks: this dataset is not on this machine and the Hugging Face Hub is not reachable: "
        "Couldn't reach 'acme/tasks' on the Hub (OfflineModeIsEnabled)"
        "\n  fix: check data.prompts.dataset, or use `path` with a JSONL file"
    )


def test_a_dataset_folder_that_is_not_there_is_a_plain_message(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(UsageError) as caught:
        load_prompts(PromptsSpec(dataset=nowhere))
    assert str(caught.value) == (
        f"{nowhere}: split 'train' of this dataset does not load: "
        f"FileNotFoundError: Couldn't find any data file at {nowhere}."
    )
