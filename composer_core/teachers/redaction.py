"""Secrets and personal data in texts, and what stands in their place.

Patterns of the shapes that services give their keys, then of assignments to names such as `password`, then of personal
data. They err towards redacting: a pair loses little by it. To add one, add a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

_SECRET = r"[A-Za-z0-9_\-./+=]{8,}"
PATTERNS: dict[str, re.Pattern[str]] = {
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    "api key": re.compile(
        r"\b(?:sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|hf_[A-Za-z0-9]{20,}"
        r"|xox[abprs]-[A-Za-z0-9\-]{10,}|AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_\-]{30,}|glpat-[A-Za-z0-9_\-]{16,})"
    ),
    "token": re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}"),
    "bearer": re.compile(rf"(?<=[Bb]earer )\s*{_SECRET}"),
    "password": re.compile(
        rf"(?i)(?<![a-z])((?:api[_-]?key|secret(?:[_-]?access)?(?:[_-]?key)?|access[_-]?token|auth[_-]?token|password|passwd)"
        rf"[\\\"']*\s*[:=]\s*[\\\"']*)({_SECRET})"  # also as JSON within JSON, which a call's arguments are
    ),
    "url login": re.compile(r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"),
    "e-mail": re.compile(r"\b[A-Za-z0-9._%+\-]+@[A-Za-z0-9.\-]+\.[A-Za-z]{2,}\b"),
    "card": re.compile(r"(?<!\w)(?<!\d\.)(?:\d[ -]?){12,18}\d(?!\w|\.\d)"),
}


def redact(text: str, counts: Counter[str]) -> str:
    """The text with what the patterns find replaced by `<redacted: kind>`; adds to the counts."""
    for kind, pattern in PATTERNS.items():
        text = pattern.sub(_replacement(kind, counts), text)
    return text


def redact_all(value: Any, counts: Counter[str]) -> Any:
    """The same for every text in JSON data; keys of objects stay."""
    if isinstance(value, str):
        return redact(value, counts)
    if isinstance(value, Mapping):
        return {key: redact_all(child, counts) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(child, counts) for child in value]
    return value


def _replacement(kind: str, counts: Counter[str]) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        if "<redacted" in match[0] or (kind == "card" and not _luhn(match[0])):
            return match[0]
        counts[kind] += 1
        kept = match[1] if kind == "password" else ""  # the name it is given to says what is missing
        return f"{kept}<redacted: {kind}>"

    return replace


def _luhn(text: str) -> bool:
    """Whether digits pass the check that card numbers pass: most long numbers in logs do not."""
    digits = [int(ch) for ch in text if ch.isdigit()][::-1]
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(digits)]
    return sum(doubled) % 10 == 0
