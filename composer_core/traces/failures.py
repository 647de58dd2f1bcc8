"""What a tool's result says went wrong, from the format's own facts and, where they do not say, from the text.

One function, `classify`, from a result to a kind of error and the text that decided. It is cautious: a result that
does not say what was wrong (an exit code alone: `grep` without a match, `git commit` with nothing to commit) is no
error, since no hint could be given about it. Kinds that only depend on one result are here; what takes the whole
trace to see (repetition, the edit that broke a test) is in `error_sites.py`. To know one more message, add it to the
table of its kind. A pattern must not begin with an open repetition: its time would grow with the square.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_I = re.IGNORECASE

# -- not the call's own fault: recorded, never hinted ------------------------------------------------------------------

_SIBLING = re.compile(r"sibling tool call errored", _I)
_REJECTION = re.compile(
    r"doesn't want to (?:proceed|take this action)|tool use was rejected|request interrupted by user"
    r"|user (?:has )?(?:rejected|declined|denied|cancell?ed)|(?:rejected|declined|cancell?ed|aborted) by (?:the )?user"
    r"|user chose to stay in plan mode|no tools needed for suggestion",
    _I,
)
_PERMISSION = re.compile(
    r"requested permissions? to|haven't granted|permission to use \S+|permission (?:has been |was )denied"
    r"|not (?:allowed|permitted) to use|requires (?:approval|permission)"
    r"|blocked by (?:a |the )?(?:hook|policy|sandbox)",
    _I,
)

# -- a kind of error, the most telling first ---------------------------------------------------------------------------

_TOOL_NOT_FOUND = re.compile(
    r"no such tool(?: available)?|unknown (?:tool|function)\b|(?:tool|function) ['\"`]?[\w.-]+['\"`]? "
    r"(?:was |is )?(?:not found|does not exist|not available|not recogni[sz]ed)|is not a (?:valid|known) tool",
    _I,
)
_TIMEOUT = re.compile(r"\btimed[ -]?out\b|deadline exceeded|\btimeout(?:error|expired)\b|exceeded (?:the )?timeout", _I)
_JSON = re.compile(
    r"json\s*decode|(?:invalid|malformed) json|not valid json|(?:parse|parsing|decode|decoding)[^.\n]{0,40}json"
    r"|json[^.\n]{0,40}(?:parse|parsing)|expecting value: line \d+|unterminated string starting",
    _I,
)
_ARGUMENTS = re.compile(
    r"inputvalidationerror|required (?:parameter|property|argument|field)|missing \d+ required"
    r"|(?:parameter|argument|field|property) ['\"`]?\w*['\"`]? (?:is (?:missing|required|expected)|must be|should be)"
    r"|unexpected (?:keyword )?argument|validation errors? for"
    r"|invalid (?:['\"`]?\w+['\"`]? )?(?:type|arguments?|parameters?)\b"
    r"|expected (?:a |an )?(?:string|number|integer|boolean|array|object|list|str|int|float|bool)\b",
    _I,
)
_TEST_REPORT = re.compile(
    r"^=+ .*\b[1-9]\d* (?:failed|errors?)\b|^FAILED \S+::|^[ \t]{0,9}Tests?:?[ \t]+[1-9]\d* failed|\bFailed Tests [1-9]"
    r"|^--- FAIL: |^test result: FAILED|^[ \t]{0,9}[1-9]\d* failing\b|^FAILED \((?:failures|errors)="
    r"|^FAIL[ \t]+\S+[ \t]+[\d.]+s",
    re.MULTILINE,
)
_BROKEN = re.compile(
    r"errors?\b|\bexception\b|traceback \(most recent|no such file|not found|can'?t\b|cannot\b|could not"
    r"|couldn't|\bfailed\b|\bfailure\b|\bfatal\b|permission denied|\binvalid\b|unrecogni[sz]ed|\bunknown\b|\bunable\b"
    r"|\bundefined\b|\billegal\b|\bpanic|segmentation fault|\busage:|has not been read|not unique|no match"
    r"|\bunexpected",
    _I,
)

# -- formats without a flag: the whole result is an error message ------------------------------------------------------

_TEXT_ERROR = re.compile(
    r"<tool_use_error>|(?:tool )?error\b[:\s]|error:|your proposed edit has introduced|no edit was performed"
    r"|traceback \(most recent call last\)|error executing tool",
    _I,
)
_RETURN_CODE = re.compile(r"<returncode>(-?\d+)</returncode>|^exit code:? (-?\d+)|completed with exit code (-?\d+)", _I)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WRAPPING = re.compile(r"<returncode>.*?</returncode>|</?(?:tool_use_error|output)>")

_NAMED: Mapping[str, str] = {
    "parsing": "json_decode",
    "timeout": "timeout",
    "approval": "rejection",
    "permission": "permission",
    "is_a_directory": "runtime_error",
    "file_not_found": "runtime_error",
    "unicode_decode": "runtime_error",
    "unknown": "runtime_error",
}
"""Types of error that a format gives a name (inspect-ai)."""

READ_AT_EACH_END = 10_000
"""Characters; what went wrong stands at the beginning or the end of a result, and some results are megabytes."""
LONGEST_EVIDENCE = 300
"""Characters; the line that decides may be a whole file on one line."""
_TIMEOUT_EXIT = 124
"""Exit code of coreutils' `timeout`."""


@dataclass(frozen=True)
class Result:
    """A tool's result, as far as its format tells."""

    text: str
    is_error: bool | None = None
    exit_code: int | None = None
    error_type: str = ""
    shell: bool = False
    """The call ran a command: its output is a program's, and a TypeError in it is not about the call's arguments."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, and the line of the result that says so."""

    kind: str
    evidence: str


def classify(result: Result) -> Failure | None:
    """The failure that a result reports; None when it reports none, or does not say what it was."""
    text = clean(_ends(result.text))
    if result.error_type in _NAMED:
        return Failure(_NAMED[result.error_type], f"{result.error_type}: {_first_line(text)}".rstrip(": "))
    if result.shell and _TEST_REPORT.search(text):  # a test run in a pipe exits with 0
        return Failure("failed_test", _line(_TEST_REPORT, text))
    if not _failed(result, text):
        return None
    if result.exit_code == _TIMEOUT_EXIT:
        return Failure("timeout", _first_line(text) or f"exit code {_TIMEOUT_EXIT}")
    return next((Failure(kind, _line(rule, text)) for kind, rule in _rules(result, text) if rule.search(text)), None)


def _ends(text: str) -> str:
    long = len(text) > 2 * READ_AT_EACH_END
    return f"{text[:READ_AT_EACH_END]}\n{text[-READ_AT_EACH_END:]}" if long else text


def clean(text: str) -> str:
    """A result without colours."""
    return _ANSI.sub("", text).replace("\r\n", "\n")


def readable(text: str) -> str:
    """A result without colours and without what its harness wraps it in."""
    return _WRAPPING.sub("", clean(text)).strip()


def _failed(result: Result, text: str) -> bool:
    """Whether the format says that the call failed, or, where it says nothing, the text does."""
    if result.is_error is not None:
        return result.is_error
    if result.exit_code is not None:
        return result.exit_code > 0  # -1: still running
    code = _RETURN_CODE.search(text[:200] + text[-400:])
    if code is not None:
        return any(group not in (None, "0", "-1") for group in code.groups())
    return _TEXT_ERROR.match(text.lstrip()) is not None


def _rules(result: Result, text: str) -> list[tuple[str, re.Pattern[str]]]:
    refused = [("sibling", _SIBLING), ("rejection", _REJECTION), ("permission", _PERMISSION)]
    if result.shell or "Traceback (most recent call last)" in text:
        return [*(refused if result.exit_code is None else []), ("timeout", _TIMEOUT), ("runtime_error", _BROKEN)]
    named = [("tool_not_found", _TOOL_NOT_FOUND), ("timeout", _TIMEOUT), ("json_decode", _JSON)]
    return [*refused, *named, ("type_error", _ARGUMENTS), ("runtime_error", re.compile(r"\S"))]


def _line(rule: re.Pattern[str], text: str) -> str:
    """The line in which a rule first matches; with the next one where it only announces it, and of a traceback the
    last one, which has the exception.
    """
    found = rule.search(text)
    if found is None:
        return ""
    lines = [line.strip() for line in _WRAPPING.sub("", text[text.rfind("\n", 0, found.end()) + 1 :]).splitlines()]
    lines = [line for line in lines if line] or [_first_line(text)]
    if lines[0].lower().startswith("traceback"):
        return lines[-1][:LONGEST_EVIDENCE]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])[:LONGEST_EVIDENCE]


def _first_line(text: str) -> str:
    lines = (line.strip() for line in _WRAPPING.sub("", text).splitlines())
    return next((line for line in lines if line), "")[:LONGEST_EVIDENCE]
