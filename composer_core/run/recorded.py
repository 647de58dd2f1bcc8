"""Recorded traces as the training data of a run without rollouts: `recorded.jsonl` of the run directory.

Made once, before the first step, and read from there row by row: a folder of sessions may grow while a run goes on, and
a resumed run must meet the rows that it began with. One line per row: what `traces/recorded.py` makes of a trace, cut
to the longest sequence, with the row of every channel. What was left out, and why, is in the event `traces`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from composer_core.channels.rows import ints
from composer_core.errors import UsageError
from composer_core.loss.channel import HintsTraces
from composer_core.loss.composite import CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText, Row
from composer_core.run.files import write_lines
from composer_core.spec.sections import TracesSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from composer_core.traces.recorded import TraceRow, TraceRows

LONGEST = 4096
"""Tokens of a trace that are kept where `data.max_tokens` does not say it."""


@dataclass(frozen=True)
class RecordedRow:
    """A recorded trace, or a part of one, as an optimiser step takes it."""

    uid: str
    ids: Sequence[int]
    """Prompt and completion."""
    action: Sequence[bool]
    """One flag per token: the agent's own."""
    reward: float | None
    rows: Mapping[str, Row | None]
    """Channel -> its row, of those that learn from rollouts."""


class RecordedRows(Sequence[RecordedRow]):
    """The rows in a file, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Look for where the lines begin."""
        self._path = path
        digest = hashlib.sha256()
        self._starts = [0]
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                self._starts.append(self._starts[-1] + len(line))
        self.fingerprint = digest.hexdigest()
        """Of all of them together."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> RecordedRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordedRow]: ...
    def __getitem__(self, index: int | slice) -> RecordedRow | Sequence[RecordedRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        with self._path.open("rb") as file:
            file.seek(self._starts[place])
            found = json.loads(file.read(self._starts[place + 1] - self._starts[place]))
        return RecordedRow(
            uid=found["uid"],
            ids=[*found["prompt_ids"], *found["completion_ids"]],
            action=[False] * len(found["prompt_ids"]) + [bool(flag) for flag in found["action"]],
            reward=found["reward"],
            rows=found["rows"],
        )


@dataclass
class Recorder:
    """Writes the rows of some traces for the channels of a loss, and counts."""

    loss: CompositeLoss
    registry: Registry
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    """What was left out of the traces: reason -> how often."""
    cut: Counter[str] = field(default_factory=Counter)
    """What was left out to keep within `max_tokens`."""
    counts: Counter[str] = field(default_factory=Counter)
    """`rows`, and `tokens` of the agent's in them."""
    active: Counter[str] = field(default_factory=Counter)
    """Channel -> rows in which it has something to learn."""

    def write(self, traces: TracesSpec, path: Path) -> None:
        """Replace `path` as one step.

        Raises:
            UsageError: the traces cannot be read, the tokenizer's chat template does not serve, or no row is left.
        """
        write_lines(path, self._lines(traces))

    def facts(self) -> dict[str, Any]:
        """What came of it, for an event."""
        found = {"active": self.active, "skipped": self.skipped, "cut": self.cut}
        return {**self.counts, **{name: dict(counter) for name, counter in found.items()}}

    def _lines(self, traces: TracesSpec) -> Iterator[dict[str, Any]]:
        from composer_core.traces.collate import TraceCollator
        from composer_core.traces.recorded import read_rows

        limit = self.max_tokens or LONGEST
        collator = TraceCollator(max_seq_len=limit)
        made = read_rows([Path(traces.path)], self._maker(), self.registry, format=traces.format)
        for row in filter(None, map(collator.fitted, made)):
            rows = self._rows(row)
            if self.loss.objective is None and not any(own is not None for own in rows.values()):
                self.skipped["row: no channel has anything to learn from it"] += 1
                continue
            if self.loss.objective is None:
                row = self._trimmed(row, rows)
            self.counts.update(rows=1, tokens=sum(row["action"]))
            self.active.update({name: int(own is not None) for name, own in rows.items()})
            yield {**{key: value for key, value in row.items() if key != "sdpo"}, "rows": rows}
        self.cut.update(collator.dropped)
        if not self.counts["rows"]:
            why = "; ".join(f"{reason} ({n})" for reason, n in (self.skipped + self.cut).most_common(3))
            raise UsageError(
                f"no trace gives a row to learn from: {why or 'there is none'}",
                at=traces.path,
                fix=f"data.max_tokens keeps {limit} tokens of each; `composer-run traces rows` shows what there is",
            )

    def _trimmed(self, row: TraceRow, rows: Mapping[str, Row | None]) -> TraceRow:
        """Without what stands behind the last hinted token, where nothing but hints is learnt: nobody reads it."""
        (hinted,) = [name for name, own in rows.items() if own is not None][:1]
        if hinted not in self._hinting() or sum(own is not None for own in rows.values()) > 1:
            return row
        end = max(ints(rows[hinted] or {}, "student")) + 1 - len(row["prompt_ids"])
        return {**row, "completion_ids": row["completion_ids"][:end], "action": row["action"][:end]}

    def _hinting(self) -> dict[str, HintsTraces]:
        hinting: dict[str, HintsTraces] = {}
        for active in self.loss.active:
            if isinstance(active.channel, HintsTraces):
                hinting[active.name] = active.channel
        if len(hinting) > 1:
            names = " and ".join(hinting)
            raise UsageError(f"channels {names} both hint recorded traces, which are read once", at="loss.channels")
        return hinting

    def _maker(self) -> TraceRows:
        for channel in self._hinting().values():
            return channel.trace_rows(self.tokenizer, skipped=self.skipped)
        from composer_core.traces.recorded import TraceRows

        # nobody hints: the place that asks nothing of the chat template
        return TraceRows(self.tokenizer, at="prompt-end", skipped=self.skipped)

    def _rows(self, row: TraceRow) -> dict[str, Row | None]:
        """Each channel's row: one that hints traces has it made already, the others see an ordinary rollout."""
        rollout = RolloutText(
            uid=row["uid"],
            prompt_ids=row["prompt_ids"],
            completion_ids=row["completion_ids"],
            action=[bool(flag) for flag in row["action"]],
            reward=row["reward"],
            columns={"source": row["source"]},
            tokenizer=self.tokenizer,
        )
        hinting = self._hinting()
        return {
            active.name: hinting[active.name].of_trace(row)
            if active.name in hinting
            else active.channel.prepare(rollout)
            for active in self.loss.active
        }
