"""Claude Code sessions as states, in one call: a thin front of the reader and of `states`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from composer_core.errors import UsageError
from composer_core.plugins.settings import NoSettings
from composer_core.traces.files import TraceFile, require_turns
from composer_core.traces.model import Trace, TraceState
from composer_core.traces.readers.claude_code import ClaudeCodeReader
from composer_core.traces.states import states
from composer_core.traces.stats import Tally

SYSTEM_PROMPT = (
    "You are a coding agent that works in a terminal. You read and change files, run commands and tests with the "
    "tools you are given, check what each of them returned before you go on, and say briefly what you did."
)
"""Put in front of sessions, which do not record the real one."""
TESTED_VERSIONS = ("1.0", "2.0", "2.1")
"""Versions of Claude Code whose files this was tested on."""


@dataclass
class IngestionStats:
    """What `ClaudeCodeIngester.ingest` met in a file."""

    n_records_total: int = 0
    """JSON objects in the file."""
    n_records_skipped: int = 0
    """Records of no conversation, of an unknown type, or without a message that can be read."""
    n_states_emitted: int = 0
    n_assistant_turns: int = 0
    """Sub-agents' included."""
    n_tool_use_blocks: int = 0
    n_text_blocks: int = 0
    """Turns among the emitted ones that say something, however many blocks that took."""
    skipped_subagent: int = 0
    """Records of sub-agents, where those are skipped."""
    skipped_summary: int = 0
    skipped_truncated_lines: int = 0
    """Lines that hold no JSON object."""
    version_warnings: list[str] = field(default_factory=list)


class ClaudeCodeIngester:
    """Makes `TraceState`s of a session file: one per turn of the assistant, not per tool call."""

    def __init__(
        self,
        *,
        system_prompt: str = SYSTEM_PROMPT,
        skip_sidechain: bool = True,
        strip_thinking: bool = True,
        max_history_tokens: int | None = None,
    ) -> None:
        """`skip_sidechain` leaves out sub-agents; the other options are those of `states`."""
        self.last_stats = IngestionStats()
        self._system_prompt, self._strip = system_prompt, strip_thinking
        self._skip_sidechain, self._max_history = skip_sidechain, max_history_tokens

    def ingest(self, path: Path) -> Iterator[TraceState]:
        """The states of one file; `last_stats` is complete when they are exhausted.

        Raises:
            UsageError: the file cannot be read, or has no turn of an assistant.
        """
        stats = self.last_stats = IngestionStats()
        if not path.is_file():
            raise UsageError("no such file", at=str(path))
        tally = Tally()
        for trace in TraceFile(path, ClaudeCodeReader.name, ClaudeCodeReader(NoSettings())).read(tally):
            _note_version(trace, stats)
            if self._skip_sidechain and trace.origin is not None and trace.origin.kind == "subagent":
                continue
            for state in states(
                trace,
                system_prompt=self._system_prompt,
                strip_thinking=self._strip,
                max_history_tokens=self._max_history,
            ):
                stats.n_states_emitted += 1
                stats.n_text_blocks += bool(state.action["content"])
                yield state
        _finish(stats, tally, self._skip_sidechain)
        require_turns([tally])


def _note_version(trace: Trace, stats: IngestionStats) -> None:
    version = str(trace.extra.get("version") or "")
    if version and ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        warning = f"version {version} was not tested, only {', '.join(TESTED_VERSIONS)}"
        if warning not in stats.version_warnings:
            stats.version_warnings.append(warning)


def _finish(stats: IngestionStats, tally: Tally, skip_sidechain: bool) -> None:
    stats.n_records_total = tally.records
    stats.n_records_skipped = sum(sum(c.values()) for c in (tally.no_turn, tally.unknown_types, tally.lost))
    stats.n_assistant_turns = tally.assistant_turns
    stats.n_tool_use_blocks = tally.tool_calls
    stats.skipped_subagent = tally.sidechain_records if skip_sidechain else 0
    stats.skipped_summary = tally.no_turn["summary"]
    stats.skipped_truncated_lines = tally.malformed_lines
