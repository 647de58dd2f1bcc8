"""From a rollout or a recorded trace, an error site and a hint to the row of channel `sdpo`. No torch, no model.

Everything happens on token ids: the student's are there already (a rollout's are never tokenised again, a trace's
are made once, by `recorded.py`, and stored with the row), and the teacher's are the same ids with the hint's put in
between. So a taught token has the same id on both sides by construction, and making a row costs one tokenisation of
the hint. Where the hint goes is decided by `hint_places.py`, what it says by `hints.py`; the row's keys are in
`channels/rows.py`. What cannot be hinted is counted in `skipped`, with the reason.

    at: turn          before the header of the faulty turn; a site of the whole answer (-1): before the first turn
    at: prompt-end    at the end of the prompt's user message; a text prompt: behind it
    at: system        in the system message
    span: turn        the faulty turn's own tokens are taught; span: rest: all the policy wrote from there on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from composer_core.channels.rows import Segment, pack
from composer_core.errors import UsageError
from composer_core.protocols import RolloutText, Row
from composer_core.traces.chat_template import (
    GAP,
    MARK,
    At,
    ChatTemplate,
    TemplateRefusesError,
    TokenizerLike,
    hinted_prompt,
)
from composer_core.traces.error_sites import WHOLE_ANSWER
from composer_core.traces.hint_places import Places, find_places, require_turn

Span = Literal["turn", "rest"]
Turns = Mapping[int, tuple[int, int]]
"""Turn -> first token and one past the last, counted in prompt + completion."""

_OTHER_PROMPT = "the prompt's tokens are not those of its messages"
_OTHER_TURN = "the tokens before the turn are not those that the chat template puts there"
_CACHED_PROMPTS = 4096


@dataclass(frozen=True)
class Hint:
    """A hint's text for one site."""

    text: str
    turn: int = WHOLE_ANSWER
    """Index of the faulty assistant turn."""
    kind: str = "hint"


@dataclass(frozen=True)
class Cut:
    """Where the hint's ids go in the student's, and the text around the hint."""

    index: int
    open: str
    close: str


class HintRows:
    """Makes rows for one tokenizer and one way to place hints."""

    def __init__(self, tokenizer: TokenizerLike, *, at: At = "turn", span: Span = "turn") -> None:
        """Probe the tokenizer's chat template.

        Raises:
            UsageError: it does not take hints at `at`.
        """
        self.template = ChatTemplate(tokenizer)
        self.places: Places = find_places(self.template)
        self.skipped: Counter[str] = Counter()
        self._at, self._span = at, span
        self._check_template()
        # The longest tail decides: a user message's may also end the tail of a tool's result.
        by_length = sorted(self.places.tails.items(), key=lambda item: len(item[1]), reverse=True)
        self._tails = [(role, self.template.encode(tail)) for role, tail in by_length]
        self._encode = lru_cache(maxsize=_CACHED_PROMPTS)(self.template.encode)
        self._system_cuts: dict[tuple[int, ...], Cut | str] = {}

    def row(
        self,
        rollout: RolloutText,
        hints: Sequence[Hint],
        *,
        turns: Turns | None = None,
        in_prompt: Cut | str | None = None,
    ) -> Row | None:
        """The row of a rollout's hints; None when none could be placed.

        Args:
            rollout: generated or recorded.
            hints: for its sites.
            turns: where its assistant turns stand; default: its runs of action tokens, in order.
            in_prompt: where a hint goes in the prompt, or why it cannot; default: found by the prompt's ids.
        """
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        where = action_runs(rollout) if turns is None else turns
        segments = [self._segment(rollout, ids, hint, turns=where, in_prompt=in_prompt) for hint in hints]
        return pack([segment for segment in segments if segment is not None], rollout)

    def _segment(
        self, rollout: RolloutText, ids: list[int], hint: Hint, *, turns: Turns, in_prompt: Cut | str | None
    ) -> Segment | None:
        text = self.template.plain(hint.text)
        taught = _taught(rollout, turns, hint.turn, self._span)
        if not taught:
            cut: Cut | str = "the policy wrote no token in this turn"
        elif not text:
            cut = "the hint is empty"
        else:
            cut = in_prompt or self._cut(rollout, ids, taught[0])
        if isinstance(cut, str):
            self.skipped[cut] += 1
            return None
        inserted = self._encode(cut.open + text + cut.close)  # the rollouts of a group often share a hint
        shift = len(inserted)
        run = isinstance(taught, range)
        return Segment(
            teacher_ids=[*ids[: cut.index], *inserted, *ids[cut.index : taught[-1] + 1]],
            student=taught,
            teacher=range(taught[0] + shift, taught[-1] + shift + 1) if run else [index + shift for index in taught],
            kind=hint.kind,
            site=hint.turn,
        )

    def _cut(self, rollout: RolloutText, ids: list[int], start: int) -> Cut | str:
        """Where the hint goes, or why it cannot."""
        prompt, end = rollout.columns.get("prompt"), len(rollout.prompt_ids)
        if isinstance(prompt, str):
            return self._cut_of_text(start, end)
        if self._at == "system":
            return self._cut_in_system(rollout)
        if self._at == "turn":
            return self._cut_before(ids, start)
        place = self.places.prompt_end
        tail = self._encode(place.tail) if place else []
        if place is None or not _ends_with(ids, tail, end):
            return "the prompt does not end with a user message as the chat template writes it"
        return Cut(end - len(tail), place.open, place.close)

    def _cut_of_text(self, start: int, end: int) -> Cut | str:
        if self._at == "system":
            return "a text prompt has no system message"
        if self._at == "turn" and start != end:
            return "a text prompt has no turns"
        return Cut(end, GAP, GAP)

    def _cut_before(self, ids: list[int], start: int) -> Cut | str:
        role = next((role for role, tail in self._tails if _ends_with(ids, tail, start)), None)
        if role is None:
            return _OTHER_TURN
        place = self.places.before_turn[role]
        if place is None:
            return f"the chat template has no stable place for a hint after a {role} message"
        tail = self._encode(place.tail)
        return Cut(start - len(tail), place.open, place.close) if _ends_with(ids, tail, start) else _OTHER_TURN

    def _cut_in_system(self, rollout: RolloutText) -> Cut | str:
        """Found once for each prompt: the rollouts of a group share it."""
        key = tuple(rollout.prompt_ids)
        if key not in self._system_cuts:
            if len(self._system_cuts) >= _CACHED_PROMPTS:
                self._system_cuts.clear()
            self._system_cuts[key] = self._find_system(rollout)
        return self._system_cuts[key]

    def _find_system(self, rollout: RolloutText) -> Cut | str:
        messages, tools = rollout.columns.get("prompt"), rollout.columns.get("tools")
        if not isinstance(messages, list):
            return "the rollout does not say which messages its prompt was made of (no column prompt)"
        try:
            plain = self.template.render(messages, header=True, tools=tools)
            hinted = self.template.render(hinted_prompt(messages, MARK, at="system"), header=True, tools=tools)
        except TemplateRefusesError as error:
            return f"the chat template refuses it: {error}"
        put = self.template.insertion(plain, hinted)
        if put is None:
            return "the hint would replace the chat template's own system message: give the prompts one"
        index = self._index_of(plain, put.at, rollout.prompt_ids)
        return Cut(index, put.open, put.close) if index is not None else _OTHER_PROMPT

    def _index_of(self, plain: str, at: int, ids: Sequence[int]) -> int | None:
        """The place in a text as one in its ids, counted from whichever end is tokenised as it stands in the text."""
        before, behind = self.template.encode(plain[:at]), self.template.encode(plain[at:])
        if list(ids[: len(before)]) == before:
            return len(before)
        return len(ids) - len(behind) if _ends_with(ids, behind, len(ids)) else None

    def _check_template(self) -> None:
        if self._at == "turn":
            require_turn(self.places)
        if self._at != "system":
            return
        try:
            self.template.render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
        except TemplateRefusesError as error:
            raise UsageError(
                f"this chat template has no system message: {error}",
                at="hints.at",
                fix="hints: {at: prompt-end} puts the hint in the user's message",
            ) from error


def action_runs(rollout: RolloutText) -> dict[int, tuple[int, int]]:
    """The runs of action tokens, numbered in order: a rollout's assistant turns."""
    return dict(enumerate(_runs(rollout)))


def _runs(rollout: RolloutText) -> Iterator[tuple[int, int]]:
    flags, offset = bytes(rollout.action), len(rollout.prompt_ids)  # found as bytes: at C speed
    start = flags.find(1)
    while start >= 0:
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        yield offset + start, offset + end
        start = flags.find(1, end)


def _taught(rollout: RolloutText, turns: Turns, turn: int, span: Span) -> Sequence[int]:
    """Indices, in prompt + completion, of the tokens that a hint about `turn` teaches."""
    if not turns or (turn != WHOLE_ANSWER and turn not in turns):
        return ()
    start, end = turns[min(turns) if turn == WHOLE_ANSWER else turn]
    if span == "turn" and turn != WHOLE_ANSWER:
        return range(start, end)
    parts = [range(max(first, start), last) for first, last in _runs(rollout) if last > start]
    return parts[0] if len(parts) == 1 else [index for part in parts for index in part]


def _ends_with(ids: Sequence[int], tail: Sequence[int], end: int) -> bool:
    return end >= len(tail) and list(ids[end - len(tail) : end]) == list(tail)
