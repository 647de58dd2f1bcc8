"""The JSON rows of the core's channels, and what is wrong with one. Light: made where rollouts end, without torch.

The row of `replay` stands at `pair_row`. That of `sdpo` pairs tokens of one rollout with equal tokens of teacher
sequences, which hold a hint. A rollout has one segment per hinted site; their sequences are packed, as everywhere:

    {"teacher_ids":     [int]    token ids of all segments' teacher sequences, one behind the other
     "teacher_lengths": [int]    length of each segment's teacher sequence; their sum is len(teacher_ids)
     "student":         [int]    index into the rollout's own prompt + completion, 0 = first prompt token
     "teacher":         [int]    index into teacher_ids (of the packed whole, not of the segment), an equal id
     "weight":          [float]  of each token pair, > 0
     "kind":            str      what the hints are about, one per segment, joined by ","
     "site":            [int]    per segment: index of the faulty assistant turn, -1 for all of it
     "teacher_logps":   [float]} of each token pair, only where a named teacher scored it: the log-prob of its token in
                                 the teacher sequence (`scoring.py`)

`student`, `teacher` and `weight` have one entry per hinted token (K >= 1). No hint at all is the row None, never an
empty one. Write `pack([Segment(...), ...])`; it checks what it packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_core.errors import RunFailed
from composer_core.protocols import RolloutText, Row


@dataclass(frozen=True)
class Segment:
    """One hinted site: a whole teacher sequence, and which of its tokens teach which of the rollout's."""

    teacher_ids: Sequence[int]
    """Everything the teacher reads, hint included."""
    student: Sequence[int]
    """Indices into the rollout's prompt + completion."""
    teacher: Sequence[int]
    """Indices into this segment's `teacher_ids`, pointing at equal ids."""
    weight: Sequence[float] = ()
    """One per token pair; empty: 1 each."""
    kind: str = "hint"
    site: int = -1


def pack(segments: Sequence[Segment], rollout: RolloutText) -> Row | None:
    """The row of a rollout's segments; None when there is none, or none with a token.

    Raises:
        ValueError: a segment pairs tokens that are not the same, or that nothing predicts.
    """
    kept = [segment for segment in segments if segment.student]
    if not kept:
        return None
    own_ids = [*rollout.prompt_ids, *rollout.completion_ids]
    ids: list[int] = []
    student: list[int] = []
    teacher: list[int] = []
    weight: list[float] = []
    for segment in kept:
        _check(segment, own_ids)
        student += segment.student
        start = len(ids)
        teacher += [start + index for index in segment.teacher] if start else segment.teacher
        weight += segment.weight or [1.0] * len(segment.student)
        ids += segment.teacher_ids
    return {
        "teacher_ids": ids,
        "teacher_lengths": [len(segment.teacher_ids) for segment in kept],
        "student": student,
        "teacher": teacher,
        "weight": weight,
        "kind": ",".join(segment.kind for segment in kept),
        "site": [segment.site for segment in kept],
    }


def _check(segment: Segment, own_ids: Sequence[int]) -> None:
    sizes = (len(segment.student), len(segment.teacher), len(segment.weight) or len(segment.student))
    if len(set(sizes)) > 1:
        raise ValueError(f"a segment has {sizes[0]} student tokens, {sizes[1]} teacher tokens and {sizes[2]} weights")
    mine_ids, taught_ids = _ids_at(own_ids, segment.student), _ids_at(segment.teacher_ids, segment.teacher)
    if mine_ids is not None and mine_ids == taught_ids:
        return  # rows have thousands of tokens: the loop only looks for which of them is wrong
    for mine, taught in zip(segment.student, segment.teacher, strict=True):
        if not (0 < mine < len(own_ids) and 0 < taught < len(segment.teacher_ids)):
            raise ValueError(
                f"a segment pairs token {mine} of {len(own_ids)} with teacher token {taught} of "
                f"{len(segment.teacher_ids)}: one is outside, or the first of its sequence, which nothing predicts"
            )
        if own_ids[mine] != segment.teacher_ids[taught]:
            raise ValueError(
                f"a segment pairs token {mine}, id {own_ids[mine]}, with teacher token {taught}, id "
                f"{segment.teacher_ids[taught]}: they must be the same"
            )


def _ids_at(ids: Sequence[int], at: Sequence[int]) -> list[int] | None:
    """The ids at some indices; None where one of them is outside, or the first."""
    run = isinstance(at, range) and at.step == 1
    low, high = (at[0], at[-1]) if run else (min(at), max(at))
    if low <= 0 or high >= len(ids):
        return None
    return list(ids[low : high + 1]) if run else [ids[index] for index in at]


def pair_row(
    prompt: Sequence[int],
    chosen: Sequence[int],
    rejected: Sequence[int],
    *,
    reference: tuple[float, float] | None = None,
) -> Row:
    """The row of `replay`: token ids of a prompt and its two answers, which begin where the prompt ends.

    {"prompt": [int], "chosen": [int], "rejected": [int],
     "ref_chosen": float, "ref_rejected": float}   the reference's summed log-probs of the answers, where known
    """
    row: dict[str, list[int] | list[float] | float | str] = {
        "prompt": list(prompt),
        "chosen": list(chosen),
        "rejected": list(rejected),
    }
    return row if reference is None else {**row, "ref_chosen": reference[0], "ref_rejected": reference[1]}


def ints(row: Row, key: str) -> list[int]:
    """A list of whole numbers in a row.

    Raises:
        RunFailed: the row has no such list.
    """
    value = row.get(key)
    if not isinstance(value, list):
        raise RunFailed(f"a row has no list {key!r}: {sorted(row)}")
    return list(map(int, value))


def floats(row: Row, key: str) -> list[float]:
    """A list of numbers in a row.

    Raises:
        RunFailed: the row has no such list.
    """
    value = row.get(key)
    if not isinstance(value, list):
        raise RunFailed(f"a row has no list {key!r}: {sorted(row)}")
    return list(map(float, value))
