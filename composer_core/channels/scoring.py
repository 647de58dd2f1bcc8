"""What a named teacher is asked about a hinted row, and the row with its answers. Light: no torch, no teacher here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_core.channels.rows import ints
from composer_core.loss.channel import Scorer
from composer_core.protocols import Row, ScoreRequest


@dataclass(frozen=True)
class Question:
    """One segment of a row."""

    request: ScoreRequest
    """Its teacher sequence up to the last hinted token; scored from the first one on."""
    pairs: Sequence[int]
    """Which of the row's token pairs lie in it."""
    offsets: Sequence[int]
    """For each of them its place in the answer."""


def questions(row: Row, uid: str) -> Iterator[Question]:
    """One per segment that has a hinted token; `uid` names the rollout in messages."""
    ids, taught, start = ints(row, "teacher_ids"), ints(row, "teacher"), 0
    for length in ints(row, "teacher_lengths"):
        end = start + length
        pairs = [k for k, index in enumerate(taught) if start <= index < end]
        if pairs:
            first, last = min(taught[k] for k in pairs), max(taught[k] for k in pairs)
            request = ScoreRequest(ids[start : last + 1], first - start, uid)
            yield Question(request, pairs, [taught[k] - first for k in pairs])
        start = end


def scored_rows(rows: Sequence[Row | None], uids: Sequence[str], scorer: Scorer) -> list[Row | None]:
    """The rows with `teacher_logps`; None for one that the teacher did not score whole. Asks about all at once."""
    asked = [[] if row is None else list(questions(row, uid)) for row, uid in zip(rows, uids, strict=True)]
    answers = iter(scorer.score([question.request for of_row in asked for question in of_row]))
    return [
        None if row is None else _with_answers(row, of_row, [next(answers) for _ in of_row])
        for row, of_row in zip(rows, asked, strict=True)
    ]


def _with_answers(row: Row, asked: Sequence[Question], answers: Sequence[Sequence[float] | None]) -> Row | None:
    logps = [0.0] * len(ints(row, "teacher"))
    for question, answer in zip(asked, answers, strict=True):
        if answer is None:
            return None
        for pair, offset in zip(question.pairs, question.offsets, strict=True):
            logps[pair] = answer[offset]
    return {**row, "teacher_logps": logps}
