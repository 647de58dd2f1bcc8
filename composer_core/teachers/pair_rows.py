"""Pairs as token ids: the prompt, and both answers as the chat template writes them behind it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from composer_core.channels.rows import pair_row
from composer_core.protocols import Row
from composer_core.teachers.pairs import Message, Pair
from composer_core.traces.chat_template import ChatTemplate, TemplateRefusesError


@dataclass(frozen=True)
class PairIds:
    """Token ids of one pair; both answers begin where the prompt ends."""

    pair: Pair
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pair_ids(
    pairs: Iterable[Pair], template: ChatTemplate, *, max_tokens: int | None, dropped: Counter[str]
) -> Iterator[PairIds]:
    """Tokenise pairs, each rendered once and cut where the prompt's text ends.

    Args:
        pairs: as in pairs.jsonl.
        template: the policy's.
        max_tokens: longest prompt plus answer; None for any.
        dropped: receives why pairs are left out, with how many.
    """
    for pair in pairs:
        try:
            sides = [_answer(pair, answer, template) for answer in (pair.chosen, pair.rejected)]
        except TemplateRefusesError:
            dropped["the chat template refuses it"] += 1
            continue
        if any(side is None for side in sides):
            dropped["the answer does not follow its prompt's text"] += 1
            continue
        (prompt, chosen), (_, rejected) = (side for side in sides if side is not None)
        longest = len(prompt) + max(len(chosen), len(rejected))
        if not prompt or not chosen or not rejected:
            dropped["a side is empty"] += 1
        elif chosen == rejected:  # such as two calls, where a chat template leaves calls out
            dropped["both answers read the same to this model"] += 1
        elif max_tokens is not None and longest > max_tokens:
            dropped["too long"] += 1
        else:
            yield PairIds(pair, prompt, chosen, rejected)


def pair_rows(
    pairs: Iterable[Pair], template: ChatTemplate, *, max_tokens: int | None, dropped: Counter[str]
) -> Iterator[Row]:
    """Rows of the channel `replay`, with stored reference log-probs where the pairs have them."""
    for ids in pair_ids(pairs, template, max_tokens=max_tokens, dropped=dropped):
        ref = ids.pair.ref
        reference = None if ref is None else (float(ref["chosen"]), float(ref["rejected"]))
        yield pair_row(ids.prompt, ids.chosen, ids.rejected, reference=reference)


def _answer(pair: Pair, answer: Message, template: ChatTemplate) -> tuple[list[int], list[int]] | None:
    """(prompt ids, answer ids): two pieces of one text, tokenised apart, as a model sees them when it answers."""
    prompt = template.render(pair.messages, header=True)
    whole = template.render([*pair.messages, answer])
    if not whole.startswith(prompt):
        return None
    return template.encode(prompt), template.encode(whole[len(prompt) :])
