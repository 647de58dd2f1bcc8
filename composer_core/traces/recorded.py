"""Recorded traces as rollouts: tokenised once, then treated like what a policy generated.

A trace becomes one rollout where its chat template keeps every turn's text as the conversation grows. Templates that
change earlier turns (thinking is taken out, a system message moves along), or end a call in a way of its own, give
one rollout for each hinted turn instead, which ends with that turn: the ids then are what the agent would have read
there. Text is tokenised in pieces, cut where a turn begins, where it ends, and where a hint may go, so that the same
piece has the same ids with and without a hint. Turns that another trace holds (`copied`) or that the harness wrote
are context, not action.

`rows_for` is what `composer-run traces rows` prints and what a dataset of recorded traces is made of; `collate.py`
makes tensors of its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText, Row
from composer_core.traces.chat_template import (
    MARK,
    At,
    Insertion,
    Message,
    TemplateRefusesError,
    TokenizerLike,
    hinted_prompt,
)
from composer_core.traces.error_sites import ErrorSite, find_sites
from composer_core.traces.files import AUTO, find_traces, require_turns
from composer_core.traces.hints import HintBook
from composer_core.traces.messages import step_messages
from composer_core.traces.model import Trace
from composer_core.traces.rows import Cut, Hint, HintRows, Span, Turns
from composer_core.traces.stats import Tally

TraceRow = dict[str, Any]
"""`{"uid", "source", "prompt_ids", "completion_ids", "action", "reward", "sdpo"}`: ids and flags (0 or 1) as lists,
the trace's reward or None, and the row of channel `sdpo` or None."""


_NO_WHOLE = "trace: the chat template does not keep its earlier turns as they were, and none of its turns is hinted"
_NOT_SHOWN = "site: the chat template shows nothing of its turn, as it does with calls that it leaves out"
_NO_REST = "site: the chat template does not keep earlier turns as they were, so span: rest has no rest here"


@dataclass(frozen=True)
class Recorded:
    """A trace, or its beginning, as a rollout."""

    rollout: RolloutText
    turns: Turns
    in_prompt: Cut | str | None
    """Where a hint goes in the prompt, or why it cannot; None with `at: turn`."""


@dataclass(frozen=True)
class _Text:
    """A rendered conversation."""

    text: str
    spans: dict[int, tuple[int, int]]
    """Turn -> where in it the assistant's own text stands."""
    in_prompt: Insertion | str | None


class TraceRows:
    """Makes the rows of recorded traces, with one tokenizer and one way to place hints."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        at: At = "turn",
        span: Span = "turn",
        book: HintBook | None = None,
        skipped: Counter[str] | None = None,
    ) -> None:
        """Probe the tokenizer's chat template.

        Args:
            tokenizer: of the model that is to learn from the traces.
            at: where hints go; see `rows.py`.
            span: what they teach.
            book: hint templates; default: the core's own.
            skipped: receives what is left out: reason -> how often.

        Raises:
            UsageError: the chat template does not take hints at `at`, or does not end turns.
        """
        self._rows = HintRows(tokenizer, at=at, span=span)
        if not self._rows.places.turn_end:
            raise UsageError(
                "this chat template does not mark where an assistant's turn ends, so nothing recorded can be learnt",
                fix="take a model whose chat template ends a turn with a token of its own",
            )
        self.skipped = Counter[str]() if skipped is None else skipped
        self._rows.skipped = self.skipped
        self._template, self._places = self._rows.template, self._rows.places
        places = self._places
        self._tails = {place.tail for place in places.before_turn.values() if place} | set(places.tails.values())
        self._at, self._span, self._book = at, span, book or HintBook()
        self._ends_in = len(self._template.encode(places.turn_end))

    def rows(self, trace: Trace) -> Iterator[TraceRow]:
        """The rows of a trace; what was left out is counted in `skipped`."""
        sites = find_sites(trace)
        for site in sites:
            if not site.hinted:
                self.skipped[f"site of kind {site.kind}: recorded, not hinted"] += 1
            elif self._book.hint(site) is None:
                self.skipped[f"site of kind {site.kind}: no hint has anything to say"] += 1
        try:
            recorded = self.tokenise(trace, sites)
        except TemplateRefusesError as error:
            self.skipped[f"trace: the chat template refuses it: {error}"] += 1
            return
        except UsageError as error:
            self.skipped[f"trace: {error.problem}"] += 1
            return
        for part in recorded:
            there = [site for site in sites if site.turn in part.turns and self._shows(part, site)]
            hints = hints_of(there, self._book)
            row = self._rows.row(part.rollout, hints, turns=part.turns, in_prompt=part.in_prompt)
            yield _trace_row(trace, part.rollout, row)

    def _shows(self, part: Recorded, site: ErrorSite) -> bool:
        """Whether the turn is more than its end; a call that the chat template leaves out cannot be taught."""
        start, end = part.turns[site.turn]
        shown = end - start > self._ends_in
        if not shown and site.hinted:
            self.skipped[_NOT_SHOWN] += 1
        return shown

    def tokenise(self, trace: Trace, sites: Sequence[ErrorSite] = ()) -> list[Recorded]:
        """The trace as rollouts: one for all of it, or one for each site.

        Raises:
            UsageError: there is no assistant turn to learn from.
            TemplateRefusesError: the chat template does not render this conversation.
        """
        messages, turns = _conversation(trace)
        if not turns:
            raise UsageError(
                "there is no assistant turn in it", at=trace.source or trace.id, fix="leave it out: nothing is learnt"
            )
        first = sum(site.hinted and site.turn not in turns for site in sites)
        if first:
            self.skipped["site: nothing stands before its turn"] += first
        whole = self._whole(trace, messages, turns)
        if whole is not None:
            return [self._recorded(trace, whole, trace.id)]
        blamed = sorted({site.turn for site in sites if site.hinted and site.turn in turns})
        if not blamed:
            self.skipped[_NO_WHOLE] += 1
        if self._span == "rest" and blamed:
            self.skipped[_NO_REST] += len(blamed)
            return []
        parts = ((turn, self._until(trace, messages, turns[turn], turn)) for turn in blamed)
        return [self._recorded(trace, text, f"{trace.id}::{turn:04d}") for turn, text in parts if text]

    def _whole(self, trace: Trace, messages: list[Message], turns: dict[int, int]) -> _Text | None:
        """The whole trace; None when the template changes a turn's text later on, or its end cannot be told."""
        if not self._places.calls_end_alike and any("tool_calls" in message for message in messages):
            return None  # the next end of a turn would be behind the tool's result
        text = self._template.render(messages, tools=trace.tools)
        spans: dict[int, tuple[int, int]] = {}
        for turn, index in turns.items():
            before = self._template.render(messages[:index], header=True, tools=trace.tools)
            span = self._span_after(text, before)
            if span is None or (spans and span[0] < max(end for _, end in spans.values())):
                return None
            spans[turn] = span
        return _Text(text, spans, self._in_prompt(trace, messages, text))

    def _until(self, trace: Trace, messages: list[Message], index: int, turn: int) -> _Text | None:
        """The trace up to the end of one turn."""
        text = self._template.render(messages[: index + 1], tools=trace.tools)
        before = self._template.render(messages[:index], header=True, tools=trace.tools)
        if not text.startswith(before):
            self.skipped["site: the chat template does not render the turn behind its own header"] += 1
            return None
        span = self._span_after(text, before) or (len(before), len(text.rstrip()))  # a call may end with another token
        return _Text(text[: span[1]], {turn: span}, self._in_prompt(trace, messages[: index + 1], text))

    def _span_after(self, text: str, before: str) -> tuple[int, int] | None:
        """From where `before` ends to behind the first end of a turn."""
        if not text.startswith(before):
            return None
        end = text.find(self._places.turn_end, len(before))
        return None if end < 0 else (len(before), end + len(self._places.turn_end))

    def _in_prompt(self, trace: Trace, messages: list[Message], text: str) -> Insertion | str | None:
        """Where a hint in the prompt goes, by rendering the conversation with one."""
        if self._at == "turn":
            return None
        try:
            hinted = self._template.render(hinted_prompt(messages, MARK, at=self._at), tools=trace.tools)
        except ValueError as error:  # no user message, or the template refuses it
            return f"no hint in the prompt: {error}"
        put = self._template.insertion(text, hinted)
        return put or "the chat template renders more than the hint differently when it is in the prompt"

    def _recorded(self, trace: Trace, whole: _Text, uid: str) -> Recorded:
        put = whole.in_prompt
        cuts = {0, len(whole.text), *(put.at for put in [put] if isinstance(put, Insertion))}
        for start, end in whole.spans.values():
            cuts |= {start, end, *(start - len(tail) for tail in self._tails if whole.text.endswith(tail, 0, start))}
        ids: list[int] = []
        index = {0: 0}
        for start, end in pairwise(sorted(cuts)):
            ids += self._template.encode(whole.text[start:end])
            index[end] = len(ids)
        turns = {turn: (index[start], index[end]) for turn, (start, end) in whole.spans.items()}
        first = min(start for start, _ in turns.values())
        action = [False] * len(ids)
        for start, end in turns.values():
            action[start:end] = [True] * (end - start)
        rollout = RolloutText(uid, ids[:first], ids[first:], action[first:], trace.reward)
        cut = Cut(index[put.at], put.open, put.close) if isinstance(put, Insertion) else put
        return Recorded(rollout, turns, cut)


def rows_for(
    paths: Sequence[Path],
    *,
    tokenizer_folder: Path,
    at: At = "turn",
    span: Span = "turn",
    format: str = AUTO,
    registry: Registry | None = None,
    skipped: Counter[str] | None = None,
) -> Iterator[TraceRow]:
    """The rows of all traces in some files and folders, one by one.

    Args:
        paths: session files, or folders of them.
        tokenizer_folder: a model's folder, for its tokenizer and chat template.
        at: where hints go; see `rows.py`.
        span: what they teach.
        format: name of the trace reader, or `auto`.
        registry: where readers and hint templates come from; default: the installed plugins.
        skipped: receives what was left out: reason -> how often.

    Raises:
        UsageError: no such file or folder, an unknown format, no assistant turn in any file, a tokenizer that does not
            load, or a chat template that does not take hints at `at`.
        MissingError: transformers is not installed.
    """
    from composer_core.hf.models import load_tokenizer  # transformers: seconds

    if not tokenizer_folder.is_dir():
        fix = "a model's folder, with its tokenizer and chat template"
        raise UsageError("no such model folder", at=str(tokenizer_folder), fix=fix)
    registry = registry or Registry.discover()
    tokenizer, book = load_tokenizer(tokenizer_folder), HintBook.of(registry)
    rows = TraceRows(tokenizer, at=at, span=span, book=book, skipped=skipped)
    yield from read_rows(paths, rows, registry, format=format)


def read_rows(paths: Sequence[Path], rows: TraceRows, registry: Registry, *, format: str = AUTO) -> Iterator[TraceRow]:
    """What `rows` makes of all traces in some files and folders, one by one; it counts what was left out.

    Raises:
        UsageError: no such file or folder, an unknown format, or no assistant turn in any file.
    """
    files = find_traces(paths, registry, format=format)
    for _, reason in files.skipped:
        rows.skipped[f"file: {reason}"] += 1
    tallies: list[Tally] = []
    for trace in files.read(tallies=tallies):
        if trace.extra.get("housekeeping"):  # the harness's own errands: nothing the agent decided
            rows.skipped["housekeeping of the harness"] += 1
            continue
        yield from rows.rows(trace)
    require_turns(tallies)


def hints_of(sites: Sequence[ErrorSite], book: HintBook) -> list[Hint]:
    """The hints for those sites that a book has something to say about."""
    texts = [(site, book.hint(site)) for site in sites]
    return [Hint(text, site.turn, site.kind) for site, text in texts if text]


def _conversation(trace: Trace) -> tuple[list[Message], dict[int, int]]:
    """The trace's messages, and for each turn the agent took here the index of its message.

    A turn with nothing before it is context: nothing predicts it.
    """
    messages: list[Message] = []
    turns: dict[int, int] = {}
    turn = -1
    for step in trace.steps:
        if step.source == "agent":
            turn += 1
            if messages and not (step.copied or step.synthetic):
                turns[turn] = len(messages)
        messages += step_messages(step, flags=False)
    return _with_short_ids(messages), turns


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """The messages with numbered call ids of nine characters.

    Mistral's templates refuse any others, and the ids of another agent mean nothing to this model.
    """
    short: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["id"] = short.setdefault(call["id"], f"call{len(short):05d}")
        if "tool_call_id" in message:
            message["tool_call_id"] = short.setdefault(message["tool_call_id"], f"call{len(short):05d}")
    return messages


def _trace_row(trace: Trace, rollout: RolloutText, row: Row | None) -> TraceRow:
    return {
        "uid": rollout.uid,
        "source": trace.source,
        "prompt_ids": list(rollout.prompt_ids),
        "completion_ids": list(rollout.completion_ids),
        "action": [int(flag) for flag in rollout.action],
        "reward": rollout.reward,
        "sdpo": None if row is None else dict(row),
    }
