"""Pairs made fit for training: secrets out, long tool results cut, duplicates and what is too long dropped.

Everything is counted. The step through data-juicer is `juicer.py`; it is never imported here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_core.spec.sections import NormaliseSpec
from composer_core.teachers.juicer import surviving
from composer_core.teachers.pairs import Pair, action_key
from composer_core.teachers.redaction import redact_all


@dataclass
class NormaliseReport:
    """What was done to the pairs."""

    read: int = 0
    kept: int = 0
    redacted: Counter[str] = field(default_factory=Counter)
    """Kind of secret -> how many."""
    shortened_results: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Why -> how many pairs."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        counts = {"redacted": dict(self.redacted), "dropped": dict(self.dropped)}
        return {"read": self.read, "kept": self.kept, "shortened_results": self.shortened_results, **counts}


def normalise(pairs: Iterable[Pair], settings: NormaliseSpec | None = None) -> tuple[list[Pair], NormaliseReport]:
    """Clean pairs, in their order.

    Raises:
        MissingError: data-juicer is asked for and its interpreter does not have it.
        RunFailed: data-juicer failed, with what it said.
    """
    settings = settings or NormaliseSpec()
    report, kept, seen = NormaliseReport(), [], set()
    for pair in pairs:
        report.read += 1
        pair = _cleaned(pair, settings, report)
        text = json.dumps([pair.messages, pair.chosen, pair.rejected], sort_keys=True, ensure_ascii=False)
        if action_key(pair.chosen) == action_key(pair.rejected):
            report.dropped["both answers the same"] += 1
        elif settings.max_chars is not None and len(text) > settings.max_chars:
            report.dropped["too long"] += 1
        elif text in seen:
            report.dropped["duplicate"] += 1
        else:
            seen.add(text)
            kept.append(pair)
    if settings.data_juicer is not None and kept:
        chosen = surviving([_plain(pair) for pair in kept], settings.data_juicer)
        report.dropped["data-juicer"] += len(kept) - len(chosen)
        kept = [kept[index] for index in chosen]
    report.kept = len(kept)
    return kept, report


def _cleaned(pair: Pair, settings: NormaliseSpec, report: NormaliseReport) -> Pair:
    messages: Sequence[Mapping[str, Any]] = pair.messages
    limit = settings.max_tool_result_chars
    if limit is not None:
        messages = [_shortened(message, limit, report) for message in messages]
    if not settings.redact:
        return replace(pair, messages=messages)
    clean = redact_all([list(messages), pair.chosen, pair.rejected], report.redacted)
    return replace(pair, messages=clean[0], chosen=clean[1], rejected=clean[2])


def _shortened(message: Mapping[str, Any], limit: int, report: NormaliseReport) -> Mapping[str, Any]:
    """A tool result without its middle: what it says first and last is what an agent reads."""
    content = message.get("content")
    if message.get("role") not in ("tool", "function") or not isinstance(content, str) or len(content) <= limit:
        return message
    report.shortened_results += 1
    half = limit // 2
    left_out = len(content) - 2 * half
    return {**message, "content": f"{content[:half]}\n[... {left_out} characters left out ...]\n{content[-half:]}"}


def _plain(pair: Pair) -> str:
    """What data-juicer judges: the two answers as text."""
    return f"{action_key(pair.chosen)}\n{action_key(pair.rejected)}"
