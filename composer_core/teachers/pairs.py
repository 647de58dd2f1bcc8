"""From teachers' answers to preference pairs: what counts as the same action, who agrees, and pairs.jsonl.

One object per line: {"state_id", "messages", "chosen", "rejected", "n_agreeing", "teachers", "ref", "meta"}; chosen and
rejected are assistant messages, ref is {"model", "chosen", "rejected"} or null. At most one pair a state.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.run.files import write_text
from composer_core.teachers.asking import Answer
from composer_core.teachers.client import OTHER_MODEL
from composer_core.traces.model import TraceState

Message = Mapping[str, Any]
_NEEDED = ("state_id", "messages", "chosen", "rejected", "n_agreeing", "teachers")
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """One line of pairs.jsonl."""

    state_id: str
    messages: Sequence[Message]
    chosen: Message
    rejected: Message
    n_agreeing: int
    teachers: Sequence[str]
    """Who gave the chosen action."""
    ref: Mapping[str, Any] | None = None
    """Summed log-probs of both answers under a reference model: {"model", "chosen", "rejected"}."""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class PairSummary:
    """What became of the states."""

    states: int = 0
    pairs: int = 0
    like_the_agent: int = 0
    """Enough teachers did what the agent had done."""
    disagreed: int = 0
    """No action had enough teachers."""
    tied: int = 0
    """Two actions had equally many, enough, teachers."""
    unanswered: int = 0
    """No teacher gave a usable answer."""
    dropped_answers: Counter[str] = field(default_factory=Counter)
    """Why answers were left out -> how many."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "dropped_answers": dict(self.dropped_answers)}


def action_key(message: Message) -> str:
    """What an action is compared by: tool calls by name and canonical arguments, in order, else text by white space.

    Text beside tool calls is talk, and thinking is no action; neither is compared.
    """
    calls = message.get("tool_calls")
    if calls:
        return json.dumps(
            [_call_key(call) for call in (calls if isinstance(calls, list) else [calls])],
            sort_keys=True,
            ensure_ascii=False,
        )
    return " ".join(_THINKING.sub("", _text(message.get("content"))).split())


def extract_pairs(
    states: Iterable[TraceState], answers: Iterable[Answer], *, agreement: int = 2
) -> tuple[list[Pair], PairSummary]:
    """One pair for each state where enough teachers agree against the agent.

    Args:
        states: what was asked.
        answers: in any order; those to other states are ignored.
        agreement: teachers that must give the same action.

    Raises:
        UsageError: agreement is below 1.
    """
    if agreement < 1:
        raise UsageError(f"agreement must be at least 1, got {agreement}", at="replay.agreement")
    by_state: dict[str, list[Answer]] = {}
    for answer in answers:
        by_state.setdefault(answer.state_id, []).append(answer)
    summary, pairs = PairSummary(), []
    for state in states:
        summary.states += 1
        usable = [a for a in by_state.get(state.state_id, []) if _usable(a, summary)]
        pair = _pair(state, usable, agreement, summary)
        if pair is not None:
            pairs.append(pair)
    summary.pairs = len(pairs)
    return pairs, summary


def _usable(answer: Answer, summary: PairSummary) -> bool:
    reply = answer.reply
    if reply is None:
        why = "failed"
    elif reply.finish == "length":
        why = "cut off"
    elif reply.finish == OTHER_MODEL:
        why = OTHER_MODEL
    elif reply.message is None or not action_key(reply.message):
        why = "empty"
    else:
        return True
    summary.dropped_answers[why] += 1
    return False


def _pair(state: TraceState, usable: list[Answer], agreement: int, summary: PairSummary) -> Pair | None:
    if not usable:
        summary.unanswered += 1
        return None
    groups: dict[str, list[Answer]] = {}
    for answer in usable:
        if answer.reply is not None and answer.reply.message is not None:
            groups.setdefault(action_key(answer.reply.message), []).append(answer)
    # several answers of one teacher are one voice: it cannot agree with itself
    voices = {key: {answer.teacher for answer in group} for key, group in groups.items()}
    (best, agreeing), *others = sorted(groups.items(), key=lambda item: -len(voices[item[0]]))
    if len(voices[best]) < agreement:
        summary.disagreed += 1
        return None
    if others and len(voices[others[0][0]]) == len(voices[best]):
        summary.tied += 1
        return None
    if best == action_key(state.action):
        summary.like_the_agent += 1
        return None
    chosen = agreeing[0].reply.message if agreeing[0].reply is not None else None
    return Pair(
        state_id=state.state_id,
        messages=state.messages,
        chosen=dict(chosen or {}),
        rejected=state.action,
        n_agreeing=len(voices[best]),
        teachers=sorted(voices[best]),
        meta={"n_answers": len(usable), "models": {a.teacher: a.reply.model for a in agreeing if a.reply is not None}},
    )


def _call_key(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [None, call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = " ".join(arguments.split())
    return [function.get("name"), arguments]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def extract_dpo_pairs(
    states: Iterable[TraceState], teacher_actions: Iterable[Answer], agreement_threshold: int = 2
) -> list[Pair]:
    """The pairs of `extract_pairs`, without the summary."""
    return extract_pairs(states, teacher_actions, agreement=agreement_threshold)[0]


# -- the file ----------------------------------------------------------------------------------------------------------


def save_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write pairs.jsonl as one step; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs))


def load_pairs(path: Path) -> list[Pair]:
    """Read pairs.jsonl.

    Raises:
        UsageError: it cannot be read, is empty, or a line is not a pair, with its place.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON texts may hold what splitlines() splits at
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"pairs cannot be read: {error}", at=str(path), fix="composer-run replay makes them"
        ) from error
    pairs = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise UsageError("there is no pair in this file", at=str(path), fix="composer-run replay makes them")
    return pairs


def _parse(line: str, place: str) -> Pair:
    try:
        data = json.loads(line)
        if lacking := [name for name in _NEEDED if name not in data]:
            raise ValueError(f"it lacks {', '.join(lacking)}")
        pair = Pair(**data)
    except (ValueError, TypeError) as error:
        raise UsageError(f"not a pair: {error}", at=place) from error
    for name, message in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            raise UsageError(f"{name} is not an assistant message", at=place)
    if action_key(pair.chosen) == action_key(pair.rejected):
        raise UsageError("chosen and rejected are the same action", at=place, fix="remove the line")
    return pair
