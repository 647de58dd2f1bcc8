"""Rows of recorded traces: what a recorder writes for the channels of a loss, and how the file is read."""

import json
from collections import Counter
from pathlib import Path

import pytest

from composer_core.channels.sdpo import sdpo
from composer_core.channels.settings import HintSettings, SdpoSettings
from composer_core.errors import UsageError
from composer_core.hf.models import load_tokenizer
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.lm_ce import LmCe
from composer_core.plugins.builtin_settings import LmCeSettings
from composer_core.plugins.registry import Registry
from composer_core.run.recorded import RecordedRows, Recorder
from composer_core.spec.sections import TracesSpec
from composer_core.traces.recorded import TraceRows, rows_for

CROSS_ENTROPY = LmCe(LmCeSettings())


class Long(ChannelDefaults):
    """Learns from rollouts with more than 30 tokens of the agent's."""

    def prepare(self, rollout):
        return {"uid": rollout.uid, "n": sum(rollout.action)} if sum(rollout.action) > 30 else None


class OtherHints(ChannelDefaults):
    def trace_rows(self, tokenizer, *, skipped):
        return TraceRows(tokenizer, skipped=skipped)

    def of_trace(self, row):
        return row["sdpo"]


def session(number, *, fails):
    call = {"id": "c", "type": "function", "function": {"name": "open", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": f"n{number}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "Error: no tool named open" if fails else "fine"},
            {"role": "assistant", "content": "So be it." * number},
        ]
    }


@pytest.fixture
def traces(tmp_path):
    path = tmp_path / "s.jsonl"
    rows = [session(0, fails=True), session(1, fails=False), session(2, fails=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TracesSpec(path=str(path))


@pytest.fixture
def record(tiny_model_folder, tmp_path, traces):
    def _record(channels, objective=None, max_tokens=None):
        loss = CompositeLoss([ActiveChannel(name, 1.0, c) for name, c in channels.items()], objective)
        recorder = Recorder(loss, Registry.discover(), load_tokenizer(tiny_model_folder), max_tokens)
        recorder.write(traces, tmp_path / "recorded.jsonl")
        return recorder.facts(), RecordedRows(tmp_path / "recorded.jsonl")

    return _record


def test_rows_are_those_of_the_traces_command_with_every_channels_own(record, traces, tiny_model_folder):
    facts, rows = record({"sdpo": sdpo(), "long": Long()}, CROSS_ENTROPY)
    made = list(rows_for([Path(traces.path)], tokenizer_folder=tiny_model_folder))
    assert [row.uid for row in rows] == [row["uid"] for row in made]
    for row, expected in zip(rows, made, strict=True):
        assert row.ids == [*expected["prompt_ids"], *expected["completion_ids"]]
        assert row.action == [False] * len(expected["prompt_ids"]) + [bool(flag) for flag in expected["action"]]
        assert row.rows["sdpo"] == expected["sdpo"]
        own = sum(expected["action"])
        assert row.rows["long"] == ({"uid": row.uid, "n": own} if own > 30 else None)
    assert facts == {
        "rows": 3,
        "tokens": sum(sum(row["action"]) for row in made),
        "active": {"sdpo": 2, "long": sum(sum(row["action"]) > 30 for row in made)},
        "skipped": {},
        "cut": {},
    }


def test_where_only_hints_are_learnt_a_row_ends_with_the_last_hinted_token(record):
    _, whole = record({"sdpo": sdpo()}, CROSS_ENTROPY)
    hinted = [row for row in whole if row.rows["sdpo"] is not None]
    facts, rows = record({"sdpo": sdpo()})
    assert [row.uid for row in rows] == [row.uid for row in hinted]
    assert facts["skipped"] == {"row: no channel has anything to learn from it": 1}
    for row, before in zip(rows, hinted, strict=True):
        end = max(row.rows["sdpo"]["student"]) + 1
        assert (row.ids, row.action) == (before.ids[:end], before.action[:end])
        assert len(row.ids) < len(before.ids)
        assert row.rows == before.rows


def test_a_row_that_somebody_else_reads_too_stays_whole(record):
    _, whole = record({"sdpo": sdpo(), "long": Long()}, CROSS_ENTROPY)
    _, rows = record({"sdpo": sdpo(), "long": Long()})
    lengths = {row.uid: len(row.ids) for row in whole}
    read = [row for row in rows if row.rows["long"] is not None]
    assert read
    assert all(len(row.ids) == lengths[row.uid] for row in read)


def test_longer_traces_are_cut_and_their_hints_counted(record):
    _, whole = record({"sdpo": sdpo()}, CROSS_ENTROPY)
    first = next(row for row in whole if row.rows["sdpo"] is not None)
    limit = max(first.rows["sdpo"]["student"])  # one token less than the hinted turn needs
    facts, rows = record({"sdpo": sdpo()}, CROSS_ENTROPY, max_tokens=limit)
    assert max(len(row.ids) for row in rows) == limit
    assert facts["cut"]["hint: its turn does not end within max_seq_len"] == 2
    assert facts["active"] == {"sdpo": 0}


def test_a_success_is_not_hinted_unless_all_are():
    row = {"reward": 1.0, "sdpo": {"student": [3]}}
    assert sdpo(SdpoSettings()).of_trace(row) is None
    assert sdpo(SdpoSettings(on="all")).of_trace(row) == row["sdpo"]
    assert sdpo(SdpoSettings(success=2.0)).of_trace(row) == row["sdpo"]
    assert sdpo(SdpoSettings()).of_trace({**row, "reward": None}) == row["sdpo"]  # nobody said how it ended


def test_hints_stand_where_the_spec_says_and_say_what_it_says(record, tiny_model_folder):
    tokenizer = load_tokenizer(tiny_model_folder)
    texts = {"tool_not_found": "no $tool_name", "runtime_error": "no $tool_name"}
    settings = SdpoSettings(hints=HintSettings(at="prompt-end", templates=texts))
    _, rows = record({"sdpo": sdpo(settings)}, CROSS_ENTROPY)
    hinted = next(row for row in rows if row.rows["sdpo"] is not None)
    length = hinted.rows["sdpo"]["teacher_lengths"][0]
    read = tokenizer.decode(hinted.rows["sdpo"]["teacher_ids"][:length])
    assert "no open" in read.partition("n0")[2][:20]


def test_two_channels_that_hint_traces_are_refused(record):
    with pytest.raises(UsageError) as error:
        record({"sdpo": sdpo(), "mine": OtherHints()})
    assert str(error.value) == "loss.channels: channels sdpo and mine both hint recorded traces, which are read once"


def test_nothing_left_is_an_error_that_says_why_and_leaves_no_file(record, tmp_path, traces):
    with pytest.raises(UsageError) as error:
        record({"sdpo": sdpo()}, CROSS_ENTROPY, max_tokens=2)
    assert str(error.value) == (
        f"{traces.path}: no trace gives a row to learn from: row: none of the agent's tokens within max_seq_len (3)\n"
        "  fix: data.max_tokens keeps 2 tokens of each; `composer-run traces rows` shows what there is"
    )
    assert not (tmp_path / "recorded.jsonl").exists()
    assert list(tmp_path.glob("*.tmp")) == []


def test_rows_are_read_by_their_place(record):
    _, rows = record({"sdpo": sdpo()}, CROSS_ENTROPY)
    assert len(rows) == 3
    assert rows[-1] == rows[2]
    assert rows[1:] == [rows[1], rows[2]]
    with pytest.raises(IndexError):
        rows[3]
    again = record({"sdpo": sdpo()}, CROSS_ENTROPY)[1]
    assert again.fingerprint == rows.fingerprint
    assert record({"sdpo": sdpo()})[1].fingerprint != rows.fingerprint


def test_a_turn_of_which_the_template_shows_nothing_is_not_taught(tiny_model_folder, tmp_path):
    tokenizer = load_tokenizer(tiny_model_folder)
    # as SmolLM2's: a call is left out, so the turn is its end token
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    from composer_core.traces.files import find_traces

    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(session(1, fails=True)) + "\n")
    skipped = Counter()
    rows = TraceRows(tokenizer, skipped=skipped)
    (trace,) = find_traces([path], Registry.discover()).read()
    (row,) = rows.rows(trace)
    assert row["sdpo"] is None
    assert skipped == {"site: the chat template shows nothing of its turn, as it does with calls that it leaves out": 1}
