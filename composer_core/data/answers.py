"""Answers inside texts: find one, and say whether two are the same. Pure functions, linear in the text's length.

A number is compared as a number, exactly: 1,000 = 1000.0 = $1,000 and 1/2 = 0.5. Everything else is compared as text.
None means "no answer found", which is never equal to anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MARK = "####"
"""What GSM8K puts before the final answer."""

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
# A comma is a thousands separator only in front of exactly three digits: "3,4" is two numbers.
_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
# A minus right behind a word, a digit or a bracket is a subtraction or a hyphen, not a sign: "5-3", "x-3".
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])-)?\$?(?:{_AMOUNT})", re.ASCII)
_WHOLE_NUMBER = re.compile(r"[+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"[+-]?\d+/\d+", re.ASCII)
_LONGEST_NUMBER = 64
"""Characters; longer digit strings are compared as text, since exact arithmetic on them would cost too much."""


def completion_text(completion: Any) -> str:
    """What the model finally said: the text itself, or the content of the last assistant message ("" without one).

    Raises:
        TypeError: it is neither a text nor a list of chat messages with text in them.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise TypeError(f"a completion is a text or a list of chat messages, got {type(completion).__name__}")
    for message in reversed(completion):
        if message["role"] == "assistant":
            content = message.get("content") or ""
            if not isinstance(content, str):
                raise TypeError(f"the content of a message must be text, got {type(content).__name__}")
            return content
    return ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, which may hold braces; None where every one is cut off."""
    found: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # where the content starts, and whether \boxed opened it
    for brace in _BRACES.finditer(text):
        token = brace.group()
        if token.startswith("\\boxed"):
            open_braces.append((brace.end(), True))
        elif token == "{":
            open_braces.append((brace.end(), False))
        elif token == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed and (found is None or start > found[0]):
                found = (start, brace.start())
    return text[found[0] : found[1]].strip() if found else None


def after_mark(text: str) -> str | None:
    """The rest of the line after the last ####; None without one."""
    _, mark, rest = text.rpartition(MARK)
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def last_number(text: str) -> str | None:
    """The last number, with its sign, thousands commas and decimals; a full stop behind it is not part of it."""
    last = None
    for match in _NUMBER_IN_TEXT.finditer(text.replace("−", "-")):
        last = match.group()
    return last


def whole(text: str) -> str | None:
    """All of it; None when that is nothing."""
    return text.strip() or None


def last_group(pattern: str) -> Callable[[str], str | None]:
    """A finder of the first group of the pattern's last match."""
    compiled = re.compile(pattern)

    def find(text: str) -> str | None:
        last = None
        for match in compiled.finditer(text):
            last = match.group(1)
        return last

    return find


def expected_answer(value: Any) -> str:
    """What a data row wants to hear: its text after the last #### if there is one, else all of it.

    Raises:
        TypeError: the value is neither text nor a number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"the expected answer must be text or a number, this row has {value!r}")
    text = str(value)
    return after_mark(text) or text


def same_answer(found: str | None, expected: str) -> bool:
    """Equal as numbers where both are numbers, else equal as text after folding white space."""
    if found is None:
        return False
    number = as_number(found)
    if number is not None:
        other = as_number(expected)
        if other is not None:
            return number == other
    return found.split() == expected.split()


def as_number(text: str) -> Fraction | None:
    """The exact value of "$1,234.50", "-3", "12.", "50%" (50) or "1/2"; None when the text is anything else."""
    bare = text.strip()
    if len(bare) > _LONGEST_NUMBER:
        return None
    # \$, \% and {,} are how LaTeX writes them
    bare = bare.replace("{,}", ",").replace("\\", "").replace("$", "").replace("−", "-").strip(" %")
    if _WHOLE_NUMBER.fullmatch(bare):
        return Fraction(bare.replace(",", "").rstrip("."))
    if _FRACTION.fullmatch(bare) and int(bare.partition("/")[2]) != 0:
        return Fraction(bare)
    return None
