"""What a reader counts in one file, and what it had to leave out.

The figures are those of the file, not of the traces made from it: copied context and records that belong to no turn
are in them. Losses are kept one by one up to a limit and counted beyond it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEPT_LOSSES = 1000
"""Losses kept with their place; a file may have millions, and only the counts go on."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing left out: where (line of a JSONL file, else the record's number, both from 1) and why."""

    at: int
    reason: str

    def __str__(self) -> str:
        return f"{self.at}: {self.reason}"


@dataclass
class Tally:
    """Counts of one file; a reader fills it in while it reads."""

    file: str = ""
    format: str = ""
    records: int = 0
    """JSON objects of a JSONL session; else what the format is made of: steps, events, messages, samples,
    conversations."""
    assistant_turns: int = 0
    """What the model answered, however many records that took; Codex: its messages."""
    tool_calls: int = 0
    """By the assistant of this file; calls nested in progress records are not."""
    tool_results: int = 0
    tool_errors: int | None = 0
    """Results marked as failed, by a flag, an exit code or (chats) by text that begins with "Error"; None where the
    format has no way to tell."""
    sidechain_records: int = 0
    """Records of sub-agents."""
    branches: int = 0
    """Records that several others name as their parent; most are no branches of the conversation."""
    malformed_lines: int = 0
    """Lines, or items of an array, that hold no JSON object; blank lines are none."""
    no_turn: Counter[str] = field(default_factory=Counter)
    """Type -> how many records that the reader knows to be no part of the conversation."""
    unknown_types: Counter[str] = field(default_factory=Counter)
    """Kinds of record (or of content block: `block/<type>`) that the reader does not know, and skipped."""
    lost: Counter[str] = field(default_factory=Counter)
    """Reason -> how often, of everything else left out."""
    losses: list[Loss] = field(default_factory=list)
    """The first of them, malformed lines included, with their places."""

    def malformed(self, at: int, reason: str) -> None:
        """Count a line that holds no JSON object."""
        self.malformed_lines += 1
        self._keep(at, reason)

    def lose(self, at: int, reason: str, detail: str = "") -> None:
        """Count a record, or a part of one, that cannot be used; `detail` is for its own line only."""
        self.lost[reason] += 1
        self._keep(at, f"{reason}: {detail}" if detail else reason)

    def unknown(self, name: str) -> None:
        """Count a record of a type the reader does not know."""
        self.unknown_types[name] += 1

    def error(self) -> None:
        """Count a tool result that reports a failure."""
        self.tool_errors = (self.tool_errors or 0) + 1

    def as_json(self) -> dict[str, Any]:
        """The entry of `traces stats --json`."""
        return {
            "file": self.file,
            "format": self.format,
            "records": self.records,
            "assistant_turns": self.assistant_turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "sidechain_records": self.sidechain_records,
            "branches": self.branches,
            "malformed_lines": self.malformed_lines,
            "unknown_types": dict(sorted(self.unknown_types.items())),
        }

    def _keep(self, at: int, reason: str) -> None:
        if len(self.losses) < KEPT_LOSSES:
            self.losses.append(Loss(at, reason))
