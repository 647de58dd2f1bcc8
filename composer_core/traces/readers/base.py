"""What readers share: a look at the beginning of a file, and its records one by one.

To add a format, write a class with `recognises` and `read` (see `openai_chat.py` for the smallest), and contribute it
through `composer_trace_readers`. `recognises` must be sure: two readers that claim one file are an error.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from composer_core.traces.decode import loads
from composer_core.traces.stats import Tally

_BUFFER = 1 << 18
# a string may be cut off, by the end of its line or of the head: its inside must not be taken for structure
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*(?:"|\\?\Z|\\?(?=\n))|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
_SPACE = re.compile(r"[\s,]*")
_MAX_OBJECTS = 32
_LINES_TO_JUDGE = 64


@lru_cache(maxsize=2)  # every reader asks for the same one
def outline(head: bytes) -> tuple[Mapping[str, str], ...]:
    """The first objects of a file, from its first bytes alone: key -> text value, "" for any other value.

    Works alike for one object, an array of objects and JSON lines; a document that is cut off shows what is there.
    """
    objects: list[dict[str, str]] = []
    depth, base, key, value_next = 0, 0, "", False
    head = head.removeprefix(codecs.BOM_UTF8)
    for match in _TOKEN.finditer(head):
        token = match.group()
        if token in b"{[":
            if token == b"{" and base == 0 and head[match.start() - 1 : match.start()] == b"\n":
                depth = 0  # not indented: a line of its own, whatever a broken line before it left open
            if token == b"[" and depth == 0 and not objects:
                base = 1  # the objects stand in an array
            elif token == b"{" and depth == base:
                if len(objects) == _MAX_OBJECTS:
                    break
                objects.append({})
            depth, value_next = depth + 1, False
        elif token in b"}]":
            depth -= 1
        elif depth == base + 1 and objects:
            if token == b":":
                value_next = True
                objects[-1].setdefault(key, "")
            elif token.startswith(b'"'):
                text = token[1:-1].decode("utf-8", "replace")
                if value_next:
                    objects[-1][key] = text
                else:
                    key = text
            if token != b":":
                value_next = False
    return tuple(objects)


def lines(path: Path, tally: Tally) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number, offset and object of each line of a JSONL file; lines that hold no object are counted."""
    with path.open("rb", buffering=_BUFFER) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                record = loads(line)
            except ValueError as error:
                if line.strip():
                    tally.malformed(
                        number, f"not JSON: {error}" if line.endswith(b"\n") else "the last line is cut off"
                    )
                continue
            if isinstance(record, dict):
                yield number, start, record
            else:
                tally.malformed(number, f"no JSON object but {type(record).__name__}")


def objects(path: Path, tally: Tally) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and value of each object of a file: JSON lines, an array's items, or the one document.

    Lines are read one by one; an array or a document is read whole.
    """
    if _holds_lines(path):
        for number, _, record in lines(path, tally):
            yield number, record
        return
    for number, item in enumerate(_items(path, tally), start=1):
        if isinstance(item, dict):
            yield number, item
        else:
            tally.malformed(number, f"no JSON object but {type(item).__name__}")


def document(path: Path, tally: Tally) -> Any:
    """The one JSON value of a file; None, and counted, where it is not JSON to its end."""
    try:
        return loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        tally.malformed(1, f"not JSON: {error}")
        return None


def _holds_lines(path: Path) -> bool:
    """Whether a file is JSON lines, rather than an array or one document over many lines.

    One of its first lines must be an object of its own, not indented: inside a document they are.
    """
    with path.open("rb") as file:
        for line in islice(file, _LINES_TO_JUDGE):
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.startswith(b"["):
                return False
            if line.startswith(b"{") and _is_json(line):
                return True
    return False


def _is_json(line: bytes) -> bool:
    try:
        loads(line)
    except ValueError:
        return False
    return True


def _items(path: Path, tally: Tally) -> list[Any]:
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip()
    try:
        value = loads(content)
    except ValueError as error:
        return _salvage(content, error, tally)
    return value if isinstance(value, list) else [value]


def _salvage(content: bytes, error: ValueError, tally: Tally) -> list[Any]:
    """The whole items of an array that is cut off; of anything else nothing."""
    text, items, position = content.decode("utf-8", "replace"), [], 1
    decoder = json.JSONDecoder()
    while text.startswith("["):
        try:
            item, position = decoder.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
        except (ValueError, RecursionError):
            break
        items.append(item)
    tally.malformed(len(items) + 1, f"not JSON: {error}")
    return items
