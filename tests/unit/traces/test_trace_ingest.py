"""The one-call front for Claude Code sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_files import DATA, write_lines

from composer_core import ClaudeCodeIngester, IngestionStats
from composer_core.errors import UsageError
from composer_core.traces.ingest import SYSTEM_PROMPT

INLINE = DATA / "claude-code" / "cc-1.0.108-inline-sidechain.jsonl"


def test_a_session_becomes_one_state_per_turn_with_its_counts():
    ingester = ClaudeCodeIngester()
    found = list(ingester.ingest(INLINE))
    assert found[0].state_id == f"{INLINE.stem}::0000"
    assert found[0].messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    stats = ingester.last_stats
    # 20 turns in the file; 22 of its 53 records belong to sub-agents
    assert (stats.n_records_total, stats.n_assistant_turns, stats.n_tool_use_blocks) == (53, 20, 21)
    assert (stats.n_states_emitted, stats.skipped_subagent) == (len(found), 22)
    assert stats.version_warnings == []


def test_sub_agents_turns_are_states_on_request():
    ingester = ClaudeCodeIngester(skip_sidechain=False)
    found = list(ingester.ingest(INLINE))
    assert len(found) == 20
    assert len({state.state_id for state in found}) == 20
    assert ingester.last_stats.skipped_subagent == 0


def test_what_was_skipped_is_counted():
    ingester = ClaudeCodeIngester()
    list(ingester.ingest(DATA / "claude-code" / "cc-1.0-edge-cases.jsonl"))
    stats = ingester.last_stats
    # one summary, one record without a type, two user records without a message
    assert (stats.skipped_summary, stats.n_records_skipped, stats.skipped_truncated_lines) == (1, 4, 3)


def test_a_version_that_was_not_tested_is_said(tmp_path):
    message = {"id": "m", "content": "hi"}
    path = write_lines(tmp_path / "s.jsonl", {"type": "assistant", "uuid": "a", "version": "9.9.1", "message": message})
    ingester = ClaudeCodeIngester()
    assert len(list(ingester.ingest(path))) == 1
    assert ingester.last_stats.version_warnings == ["version 9.9.1 was not tested, only 1.0, 2.0, 2.1"]


def test_a_session_without_a_turn_and_a_file_that_is_not_there_are_refused(tmp_path):
    path = write_lines(tmp_path / "s.jsonl", {"type": "user", "message": {"content": "hi"}})
    with pytest.raises(UsageError, match="there is no assistant turn in it"):
        list(ClaudeCodeIngester().ingest(path))
    with pytest.raises(UsageError, match="no such file"):
        list(ClaudeCodeIngester().ingest(Path("nowhere.jsonl")))


def test_counts_can_be_given():
    assert IngestionStats(n_records_total=5).version_warnings == []
