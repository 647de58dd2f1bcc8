"""A chat template as a function from messages to text, and conversations with a hint in them.

A hint must go in without touching what stands around it: the teacher's text is the student's with some text inserted,
or the two would differ in more than the hint. `insertion` finds out whether that holds for two texts. Which forms of
a hint a template takes is found out in `hint_places.py`; what a hint says is in `hints.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from composer_core.traces.messages import text_of

Message = dict[str, Any]
At = Literal["turn", "prompt-end", "system"]

GAP = "\n\n"
"""Between a message and the hint added to it."""
MARK = "qzhintzq"
"""Stands for the hint while a template is tried."""


class TokenizerLike(Protocol):
    """What is used of a tokenizer: that of `transformers`, or one like it."""

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts that are single tokens with a meaning."""
        ...

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """With `tokenize=False`, the conversation's text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Token ids of a text; `verbose=False`: without a warning that it is long."""
        ...


class TemplateRefusesError(ValueError):
    """The chat template does not render this conversation; the text is its own reason."""


@dataclass(frozen=True)
class Insertion:
    """A hint as an insertion into a text: `text[:at] + open + hint + close + text[at:]`."""

    at: int
    open: str
    close: str


class ChatTemplate:
    """A tokenizer's chat template, with messages made ready for it."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._specials = [token for token in tokenizer.all_special_tokens if token]
        self._arguments_as_text = False
        self._arguments_as_text = self._refuses_a_call()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, header: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """The conversation's text; with `header`, up to where the next assistant turn begins.

        Raises:
            TemplateRefusesError: with the template's reason.
        """
        ready = [for_template(message, arguments_as_text=self._arguments_as_text) for message in messages]
        options = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(ready, tokenize=False, add_generation_prompt=header, **options)
        except Exception as error:  # a template is a program that came with a model: it may raise anything
            raise TemplateRefusesError((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        return str(text)

    def _refuses_a_call(self) -> bool:
        """Whether a call with arguments as an object is refused: DeepSeek's templates join them to a text."""
        call = {"id": "qzcallid1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        try:
            self.render([{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except TemplateRefusesError:
            return True
        return False

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens only where the text has them, as rendered text does."""
        # verbose: transformers would warn that the whole is longer than its model, which is for `collate.py` to see to
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []

    def insertion(self, plain: str, hinted: str) -> Insertion | None:
        """How a conversation's text with `MARK` as its hint comes from the one without; see `insertion`."""
        return insertion(plain, hinted, MARK, specials=self._specials)

    def plain(self, hint: str) -> str:
        """A hint without special tokens: an error message that quotes `<|im_end|>` must not end the message it is in.

        This holds until none is left, since taking one out may join the halves of another.
        """
        while any(token in hint for token in self._specials):
            for token in self._specials:
                hint = hint.replace(token, "")
        return hint.strip()


def for_template(message: Mapping[str, Any], *, arguments_as_text: bool = False) -> Message:
    """A chat message as templates want it: text content, arguments parsed (or not), nothing but what they know.

    OpenAI's newer name for a system message, `developer`, is unknown to nearly all of them.
    """
    content, role = message.get("content"), message["role"]
    ready: Message = {
        "role": "system" if role == "developer" else role,
        "content": content if isinstance(content, str) else text_of(content),
    }
    for key in ("reasoning_content", "tool_call_id", "name"):
        if message.get(key) is not None:
            ready[key] = message[key]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        ready["tool_calls"] = [dict(call) if arguments_as_text else _call(call) for call in calls]
    return ready


def _call(call: Mapping[str, Any]) -> Message:
    """Templates write arguments as JSON themselves; text would come out quoted twice."""
    function = dict(call.get("function") or {})
    try:
        parsed = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):  # an object already, or what the agent wrote instead of JSON
        parsed = function.get("arguments")
    function["arguments"] = parsed
    return {**call, "function": function}


def insertion(plain: str, hinted: str, hint: str, *, specials: Sequence[str] = ()) -> Insertion | None:
    """How `hinted` comes from `plain` by inserting text that holds `hint`; None when it differs in more than that.

    Several cuts may give the same text. It is the leftmost that splits none of the tokens in `specials`, and behind
    white space where the inserted text allows it: white space before a cut would be tokenised with what precedes it.
    """
    if hinted.count(hint) != 1:
        return None
    before, _, after = hinted.partition(hint)
    at = len(os.path.commonprefix([before, plain]))  # noqa: RUF071 - of characters, as wanted
    if not after.endswith(plain[at:]):
        return None
    put = Insertion(at, before[at:], after[: len(after) - len(plain) + at])
    cuts = [put]
    while put.close and put.at and plain[put.at - 1] == put.close[-1]:
        put = Insertion(put.at - 1, put.close[-1] + put.open, put.close[:-1])
        cuts.append(put)
    put = next((cut for cut in reversed(cuts) if not _splits(plain, cut.at, specials)), put)
    while put.open and plain[put.at : put.at + 1].isspace() and plain[put.at] == put.open[0]:
        put = Insertion(put.at + 1, put.open[1:], put.close + put.open[0])
    return put


def _splits(text: str, at: int, tokens: Sequence[str]) -> bool:
    return any(text.find(token, max(at - len(token) + 1, 0), at + len(token) - 1) >= 0 for token in tokens)


# -- hinted conversations ----------------------------------------------------------------------------------------------


def as_message(messages: Sequence[Mapping[str, Any]], index: int, hint: str) -> list[Mapping[str, Any]]:
    """The hint as a user message of its own before message `index`."""
    return [*messages[:index], {"role": "user", "content": hint}, *messages[index:]]


def at_end_of_message(messages: Sequence[Mapping[str, Any]], index: int, hint: str) -> list[Mapping[str, Any]]:
    """The hint at the end of the message before message `index`."""
    before = messages[index - 1]
    content = before.get("content")
    text = content if isinstance(content, str) else text_of(content)
    return [*messages[: index - 1], {**before, "content": text + GAP + hint}, *messages[index:]]


def hinted_prompt(messages: Sequence[Mapping[str, Any]], hint: str, *, at: At) -> list[Mapping[str, Any]]:
    """The hint at the end of the prompt's last user message, or in its system message, made where there is none.

    Raises:
        ValueError: there is no user message before the first assistant turn.
    """
    roles = [str(message["role"]) for message in messages]
    prompt = roles[: roles.index("assistant")] if "assistant" in roles else roles
    if at == "system":
        if prompt and prompt[0] in ("system", "developer"):
            return at_end_of_message(messages, 1, hint)
        return [{"role": "system", "content": hint}, *messages]
    if "user" not in prompt:
        raise ValueError("no user message before the first assistant turn")
    return at_end_of_message(messages, len(prompt) - prompt[::-1].index("user"), hint)
