"""Tensors of recorded traces: rows of `recorded.py`, and preference pairs, as the parts of one micro-batch.

Sequences may be longer than a model can take. They are cut at the end, and what the cut would spoil is left out and
counted in `dropped`, with the reason: a hint whose tokens are not all there, a row without a token of the agent's, a
pair without an answer. The tensors are laid out by the channels themselves (`channels/sdpo.py`, `channels/replay.py`).
torch is imported by the call, not by this module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer_core.channels.rows import Segment, ints, pack
from composer_core.protocols import RolloutText, Row
from composer_core.traces.recorded import TraceRow

if TYPE_CHECKING:
    from composer_core.batch import Batch, Pairs, Rollouts


class TraceCollator:
    """Makes a `Batch` of rows and pairs; its counts are the trainer's to fill in."""

    def __init__(self, *, max_seq_len: int = 4096, max_dpo_seq_len: int = 2048, reward_key: str = "reward") -> None:
        """Limits in tokens.

        Args:
            max_seq_len: of a student's and of a teacher's sequence.
            max_dpo_seq_len: of a pair's prompt with either answer.
            reward_key: key of a row that holds its reward.

        Raises:
            ValueError: a limit leaves no room for a prompt and a token to learn.
        """
        for name, limit in (("max_seq_len", max_seq_len), ("max_dpo_seq_len", max_dpo_seq_len)):
            if limit < 2:
                raise ValueError(f"{name} must be at least 2, got {limit}: one token to read and one to learn")
        self.max_seq_len, self.max_dpo_seq_len, self.reward_key = max_seq_len, max_dpo_seq_len, reward_key
        self.dropped: Counter[str] = Counter()

    def __call__(self, rows: Sequence[TraceRow], pairs: Sequence[Row] = ()) -> Batch:
        """Rollouts and hints of the rows that fit, and the pairs that fit (None where none are given).

        Returns:
            A batch with S sequences for S rows kept; a reward that a row lacks is NaN.
        """
        from composer_core.batch import Batch
        from composer_core.channels.sdpo import Sdpo

        kept = [row for row in map(self.fitted, rows) if row is not None]
        rollouts = self._rollouts(kept)
        hints = Sdpo().collate([row["sdpo"] for row in kept], rollouts)
        return Batch(rollouts=rollouts, hints=hints, pairs=self._pairs(pairs) if pairs else None)

    def fitted(self, row: TraceRow) -> TraceRow | None:
        """The row within `max_seq_len`, with those of its hints that are whole there; None where nothing is left."""
        room = self.max_seq_len - len(row["prompt_ids"])
        completion, action = row["completion_ids"][: max(room, 0)], row["action"][: max(room, 0)]
        if not any(action):
            self.dropped["row: none of the agent's tokens within max_seq_len"] += 1
            return None
        rollout = RolloutText(row["uid"], row["prompt_ids"], completion, [bool(flag) for flag in action], None)
        segments = [] if row["sdpo"] is None else [s for s in _segments(row["sdpo"]) if self._fits(s)]
        return {**row, "completion_ids": completion, "action": action, "sdpo": pack(segments, rollout)}

    def _fits(self, segment: Segment) -> bool:
        if max(segment.student) >= self.max_seq_len:
            self.dropped["hint: its turn does not end within max_seq_len"] += 1
            return False
        if len(segment.teacher_ids) > self.max_seq_len:
            self.dropped["hint: with the hint the teacher would read more than max_seq_len"] += 1
            return False
        return True

    def _rollouts(self, rows: Sequence[TraceRow]) -> Rollouts:
        import torch

        from composer_core.batch import Rollouts, Seqs

        flags = [flag for row in rows for flag in (*[0] * len(row["prompt_ids"]), *row["action"])]
        rewards = [math.nan if (reward := row.get(self.reward_key)) is None else float(reward) for row in rows]
        return Rollouts(
            seqs=Seqs.from_lists([[*row["prompt_ids"], *row["completion_ids"]] for row in rows]),
            action=torch.tensor(flags, dtype=torch.bool),
            rewards=torch.tensor(rewards),
            uid=tuple(row["uid"] for row in rows),
        )

    def _pairs(self, rows: Sequence[Row]) -> Pairs:
        from composer_core.channels.replay import Replay
        from composer_core.channels.settings import ReplaySettings

        kept = [row for row in map(self._fitted_pair, rows) if row is not None]
        stored = bool(kept) and all("ref_chosen" in row and "ref_rejected" in row for row in kept)
        return Replay(ReplaySettings(reference="stored" if stored else "model")).collate(kept, None)

    def _fitted_pair(self, row: Row) -> Row | None:
        """The pair with answers cut to `max_dpo_seq_len`.

        Stored reference log-probs are sums over whole answers: a pair that has them is left out rather than cut.
        """
        room = self.max_dpo_seq_len - len(ints(row, "prompt"))
        chosen, rejected = ints(row, "chosen"), ints(row, "rejected")
        if max(len(chosen), len(rejected)) <= room and chosen and rejected:
            return row
        if "ref_chosen" in row:
            self.dropped["pair: longer than max_dpo_seq_len, and its reference log-probs are of whole answers"] += 1
            return None
        chosen, rejected = chosen[: max(room, 0)], rejected[: max(room, 0)]
        if not chosen or not rejected or chosen == rejected:
            self.dropped["pair: no answers left within max_dpo_seq_len, or equal ones"] += 1
            return None
        return {**row, "chosen": chosen, "rejected": rejected}


def _segments(row: Row) -> list[Segment]:
    """What `pack` packed."""
    ids, student, teacher = ints(row, "teacher_ids"), ints(row, "student"), ints(row, "teacher")
    weight, kinds = row["weight"], str(row["kind"]).split(",")
    segments, start = [], 0
    for length, kind, site in zip(ints(row, "teacher_lengths"), kinds, ints(row, "site"), strict=True):
        own = [k for k, index in enumerate(teacher) if start <= index < start + length]
        segments.append(
            Segment(
                teacher_ids=ids[start : start + length],
                student=[student[k] for k in own],
                teacher=[teacher[k] - start for k in own],
                weight=[float(weight[k]) for k in own] if isinstance(weight, list) else (),
                kind=kind,
                site=site,
            )
        )
        start += length
    return segments
