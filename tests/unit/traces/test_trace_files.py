"""From paths to traces: what is found, what is skipped, what is refused, and who belongs to whom."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from trace_files import DATA, EXPECTED, write_lines

from composer_core.errors import UsageError
from composer_core.plugins.contributions import TraceReaderPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.traces.files import find_traces, load_readers, require_turns
from composer_core.traces.model import Origin, Trace
from composer_core.traces.stats import Tally

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
READERS = "atif, claude-code, codex, inspect, mini-swe-agent, openai-chat, openhands, swe-agent, verifiers"


@pytest.fixture
def registry():
    return Registry.discover(third_party=False)


def refusal(registry, *paths, **options):
    with pytest.raises(UsageError) as caught:
        find_traces([Path(path) for path in paths], registry, **options)
    return str(caught.value)


def test_a_folder_is_searched_and_each_file_gets_its_reader(registry):
    found = find_traces([DATA], registry)
    assert {str(f.path.relative_to(DATA)): f.format for f in found.files} == {
        name: expected["format"] for name, expected in EXPECTED.items()
    }
    assert found.skipped == [(DATA / "expected_counts.json", "no format that is known")]


def test_each_file_has_its_tally_in_order(registry):
    found, tallies = find_traces([DATA / "codex", DATA / "inspect"], registry), []
    traces = list(found.read(tallies=tallies))
    assert [tally.file for tally in tallies] == [str(file.path) for file in found.files]
    assert sum(tally.records for tally in tallies) == 112 + 15 + 1 + 4 + 1
    assert {trace.source for trace in traces} == {tally.file for tally in tallies}


def test_sub_agents_files_hang_below_the_call_in_their_session(registry):
    traces = {trace.id: trace for trace in find_traces([DATA / "claude-code" / "cc-2.1.29-session"], registry).read()}
    agent = traces["agent-aae161c"]
    assert (agent.origin.kind, agent.origin.trace) == ("subagent", "session")
    caller = traces["session"].steps[agent.origin.step]
    [call] = [call for call in caller.tool_calls if call.id == agent.origin.call_id]
    assert call.name == "Task"
    assert traces["agent-acompact-a94287"].extra["housekeeping"] is True


def test_files_that_share_a_name_get_different_traces(registry, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "chat.jsonl", CHAT)
    assert [trace.id for trace in find_traces([tmp_path], registry).read()] == ["a/chat#1", "b/chat#1"]


def test_branches_keep_their_origin_when_their_file_is_renamed(registry, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        lines = (
            '{"type":"user","uuid":"u","parentUuid":null,"message":{"content":"1"}}',
            '{"type":"assistant","uuid":"a","parentUuid":"u","message":{"content":"2"}}',
            '{"type":"user","uuid":"v","parentUuid":"a","message":{"content":"3"}}',
            '{"type":"user","uuid":"w","parentUuid":"a","message":{"content":"4"}}',
        )
        write_lines(tmp_path / folder / "s.jsonl", *lines)
    traces = list(find_traces([tmp_path], registry).read())
    assert [(trace.id, trace.origin) for trace in traces] == [
        ("a/s", None),
        ("a/s#2", Origin("branch", "a/s", 1)),
        ("b/s", None),
        ("b/s#2", Origin("branch", "b/s", 1)),
    ]


def test_a_named_format_is_taken_at_its_word(registry, tmp_path):
    path = write_lines(tmp_path / "chat.txt", CHAT)
    assert [file.format for file in find_traces([path], registry, format="openai-chat").files] == ["openai-chat"]


def test_what_is_not_there_is_said(registry, tmp_path):
    assert refusal(registry, tmp_path / "no") == f"{tmp_path / 'no'}: no such file or folder"


def test_a_file_of_no_known_format_is_refused_with_the_formats_there_are(registry, tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert refusal(registry, tmp_path / "x.json") == (
        f"{tmp_path / 'x.json'}: no trace reader knows this format; there are {READERS}\n"
        "  fix: name it: --format openai-chat"
    )


def test_an_empty_folder_is_refused(registry, tmp_path):
    assert refusal(registry, tmp_path) == (
        f"{tmp_path}: no session file in it: a reader knows {READERS}\n"
        "  fix: files must end in .eval, .json, .jsonl, .ndjson, .traj"
    )


def test_a_folder_of_other_files_is_refused(registry, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "y.jsonl").write_text("")
    assert refusal(registry, tmp_path).startswith(f"{tmp_path}: none of its 2 files is a session: a reader knows atif")


def test_an_unknown_format_is_answered_with_the_nearest(registry, tmp_path):
    message = "no trace reader is called 'claude_code'\n  fix: did you mean 'claude-code'?"
    assert refusal(registry, tmp_path, format="claude_code") == message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(registry, tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", CHAT)
    path.chmod(0)
    assert refusal(registry, path) == f"{path}: cannot be read: Permission denied"


def test_a_file_that_vanishes_before_it_is_read_is_one_message(registry, tmp_path):
    path = Path(shutil.copy(DATA / "codex" / "rollout-2026-sample.jsonl", tmp_path))
    found = find_traces([path], registry)
    path.unlink()
    with pytest.raises(UsageError) as caught:
        list(found.read())
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"


def test_files_without_a_turn_of_the_assistant_are_refused():
    with pytest.raises(UsageError) as caught:
        require_turns([Tally(file="a.jsonl"), Tally(file="b.jsonl")])
    assert str(caught.value) == (
        "a.jsonl and 1 more: there is no assistant turn in it\n"
        "  fix: `composer-run traces stats` shows what each file holds"
    )
    require_turns([Tally(file="a.jsonl"), Tally(file="b.jsonl", assistant_turns=1)])


class Greedy:
    """A third party's reader that claims every file."""

    def __init__(self, settings):
        pass

    def recognises(self, path, head):
        return True

    def read(self, path, tally):
        yield Trace(id="mine", steps=())


class GreedyPlugin:
    @hookimpl
    def composer_trace_readers(self):
        yield TraceReaderPlugin(name="greedy", summary="all", target=f"{__name__}:Greedy")


def test_a_third_partys_reader_reads_and_two_that_claim_a_file_are_named(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(TraceReaderPlugin, "load", lambda self: Greedy if self.name == "greedy" else _load(self))
    registry.add(GreedyPlugin(), Owner("acme", "1"))
    path = write_lines(tmp_path / "chat.jsonl", CHAT)
    assert refusal(registry, path) == (
        f"{path}: claimed by the readers greedy and openai-chat\n  fix: name one: --format greedy"
    )
    assert [trace.id for trace in find_traces([path], registry, format="greedy").read()] == ["mine"]
    assert "greedy" in load_readers(registry)


_load = TraceReaderPlugin.load


def test_a_session_that_begins_with_a_huge_message_is_known(registry, tmp_path):
    record = {
        "parentUuid": None,
        "isSidechain": False,
        "type": "user",
        "message": {"content": "x" * 100_000},
        "uuid": "u",
    }
    path = write_lines(tmp_path / "s.jsonl", record)
    assert [file.format for file in find_traces([path], registry).files] == ["claude-code"]
