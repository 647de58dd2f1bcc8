"""Where a chat template takes a hint, found out by trying it before anything is tokenised.

Not every template allows a hint anywhere. Some refuse two user messages in a row, some take back the thinking of
earlier turns when a new user message arrives. So each form is tried on small conversations, for a turn after a user
message and for one after a tool's result:

    a message of its own before the turn's header, else
    text at the end of the message that stands there already.

`find_places` says what works; a `Place` then is all that a row needs. Another form is one more function from a
conversation to a hinted one in `_FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_core.errors import UsageError
from composer_core.traces.chat_template import (
    MARK,
    ChatTemplate,
    Message,
    TemplateRefusesError,
    as_message,
    at_end_of_message,
)

_IN_PROMPT = "hints: {at: prompt-end} puts the hint in the prompt"


@dataclass(frozen=True)
class Place:
    """Where a hint before an assistant turn goes, counted back from where the turn's own text begins."""

    tail: str
    """What stands between the hint and the turn's text; the hint goes before it."""
    open: str
    close: str
    """What goes around the hint."""


@dataclass(frozen=True)
class Places:
    """What a chat template allows."""

    before_turn: Mapping[str, Place | None]
    """Role of the message before an assistant turn (`user`, `tool`) -> the place, None where none is stable. A role
    that the template does not know is missing."""
    tails: Mapping[str, str]
    """Role -> what stands between that message's content and the text of the turn after it."""
    prompt_end: Place | None
    """The end of a user message that ends the prompt."""
    turn_end: str
    """What the policy writes to end its turn; empty where the next message's header does it."""
    calls_end_alike: bool
    """Whether a turn that calls a tool ends in the same way; some formats have a token of its own for that."""
    prefix_stable: bool
    """Whether a shorter conversation's text is a prefix of the longer one's."""
    refused: str = ""
    """Why no place before a turn after a user message was found."""


_Form = Callable[[Sequence[Mapping[str, Any]], int, str], list[Mapping[str, Any]]]
_FORMS: tuple[_Form, ...] = (as_message, at_end_of_message)


def find_places(template: ChatTemplate) -> Places:
    """Try every form on small conversations.

    Raises:
        UsageError: the template does not even render a user's and an assistant's message.
    """
    chat = _system_where_known(template, _chat())
    try:
        closed = template.render(chat[-2:])
        # the first word: some templates close the whole text as well, which no turn in the middle has
        turn_end = next(iter(closed[closed.rindex("qzlastzq") + len("qzlastzq") :].split()), "")
        stable = all(_starts(template, conversation) for conversation in (chat, _chat()))
    except (TemplateRefusesError, ValueError) as error:
        raise UsageError(
            f"this chat template does not render a plain conversation: {error}",
            fix="give the tokenizer a chat template, or take a model that has one",
        ) from error
    before_turn: dict[str, Place | None] = {}
    tails: dict[str, str] = {}
    for role, conversation in (("user", chat), ("tool", _system_where_known(template, _tools()))):
        at = _hinted_turn(conversation)
        try:
            tail = _tail(template, conversation, at)
            stable = stable and _starts(template, conversation)
        except TemplateRefusesError:
            continue
        tails[role] = tail
        before_turn[role] = next((p for form in _FORMS if (p := _place(template, conversation, at, form))), None)
    prompt_end = _place(template, chat, _hinted_turn(chat), at_end_of_message)
    refused = "" if before_turn.get("user") else _why_not(template, chat)
    return Places(before_turn, tails, prompt_end, turn_end, _calls_end_with(template, turn_end), stable, refused)


def turn_problem(places: Places) -> str | None:
    """Why `at: turn` cannot be had from this template; None when it can."""
    if places.before_turn.get("user") is not None:
        return None
    return f"this chat template cannot take a hint mid-trace: {places.refused}"


def require_turn(places: Places) -> None:
    """Raises:
    UsageError: hints cannot go before a turn.
    """
    problem = turn_problem(places)
    if problem is not None:
        raise UsageError(problem, at="hints.at", fix=_IN_PROMPT)


def _chat() -> list[Message]:
    turns = [("qzuserazq", "qzreplyazq"), ("qzuserbzq", "qzreplybzq"), ("qzuserczq", "qzlastzq")]
    return [message for user, reply in turns for message in (_user(user), _assistant(reply))]


def _tools() -> list[Message]:
    """Two calls in a row: thinking before the first is what a new user message may take back."""
    calls = [_assistant("", call="qzcallazq"), _result("qzresultazq"), _assistant("", call="qzcallbzq")]
    return [_user("qzuserazq"), *calls, _result("qzresultbzq"), _assistant("qzreplyzq"), *_chat()[2:]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, call: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning_content": f"qzthinkzq{text or call}"}
    if call:
        function = {"name": call, "arguments": '{"qzkeyzq": "qzvaluezq"}'}
        message["tool_calls"] = [{"id": "qzcallid1", "type": "function", "function": function}]
    return message


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "qzcallid1", "name": "qzcallazq", "content": text}


def _system_where_known(template: ChatTemplate, conversation: list[Message]) -> list[Message]:
    with_system = [{"role": "system", "content": "qzsystemzq"}, *conversation]
    try:
        template.render(with_system)
    except TemplateRefusesError:
        return conversation
    return with_system


def _hinted_turn(conversation: Sequence[Message]) -> int:
    """Index of an assistant message in the middle: the one after the last tool result, else the second."""
    roles = [message["role"] for message in conversation]
    if "tool" in roles:
        return len(roles) - roles[::-1].index("tool")
    return [index for index, role in enumerate(roles) if role == "assistant"][1]


def _tail(template: ChatTemplate, conversation: Sequence[Message], at: int) -> str:
    """What stands between the content of the message before `at` and where turn `at` begins."""
    before = template.render(conversation[:at], header=True)
    content = str(conversation[at - 1]["content"])
    _, found, tail = before.rpartition(content)
    if not found:
        raise TemplateRefusesError(f"it leaves out the content of a {conversation[at - 1]['role']} message")
    return tail.lstrip()


def _place(template: ChatTemplate, conversation: Sequence[Message], at: int, form: _Form) -> Place | None:
    """The place of a form, when the hint is a pure insertion both with and without what follows the turn."""
    found = set()
    for part in (conversation[:at], conversation[: at + 1], conversation):
        header = len(part) == at
        try:
            plain = template.render(part, header=header)
            hinted = template.render(form(part, at, MARK), header=header)
        except TemplateRefusesError:
            return None
        put = template.insertion(plain, hinted)
        if put is None:
            return None
        found.add((put.open, put.close))
    if len(found) > 1:
        return None
    text = template.render(conversation[:at], header=True)
    put = template.insertion(text, template.render(form(conversation[:at], at, MARK), header=True))
    return Place(text[put.at :], put.open, put.close) if put else None


def _calls_end_with(template: ChatTemplate, turn_end: str) -> bool:
    try:
        closed = template.render(_tools()[:2])
    except TemplateRefusesError:  # then there are no such turns
        return True
    return turn_end in closed.rpartition("qzvaluezq")[2]


def _starts(template: ChatTemplate, conversation: Sequence[Message]) -> bool:
    """Whether the text before each assistant turn is a prefix of the whole."""
    whole = template.render(conversation)
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    return all(whole.startswith(template.render(conversation[:turn], header=True)) for turn in turns)


def _why_not(template: ChatTemplate, chat: Sequence[Message]) -> str:
    at = _hinted_turn(chat)
    try:
        template.render(at_end_of_message(chat, at, MARK))
    except TemplateRefusesError as error:
        return str(error)
    return "with a hint before a turn it renders other parts of the conversation differently too"
