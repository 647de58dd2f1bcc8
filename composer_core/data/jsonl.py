"""JSON Lines, read line by line, with a file and line in every complaint."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from composer_core.errors import UsageError

Located = tuple[str, dict[str, Any]]
"""Where a row stands (`tasks.jsonl:17`), and the row."""


def read_jsonl(path: Path) -> Iterator[Located]:
    """The objects of a UTF-8 file (with or without a byte order mark); blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, _row(line, place)
    except FileNotFoundError as error:
        raise UsageError("no such file", at=str(path), fix="paths are relative to the spec") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', None) or error}", at=str(path)) from error


def check_json(row: dict[str, Any], place: str) -> None:
    """Refuse a value that could not be written to a run's files again, naming its column.

    Raises:
        UsageError: a value is no JSON value, or holds half a surrogate pair.
    """
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
            raise UsageError(f"column {column!r} holds what JSON in UTF-8 cannot: {error}", at=place) from error


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise UsageError(problem, at=place, fix="save the file as UTF-8") from error
    try:
        row = json.loads(text, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"not JSON: {error.msg} at column {error.colno}", at=place, fix="one object per line"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, NaN; brackets without end
        raise UsageError(f"not JSON: {error}", at=place) from error
    if not isinstance(row, dict):
        kind = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}.get(type(row), "a number")
        raise UsageError(f"expected an object, this is {kind}", at=place, fix='one object per line: {"prompt": "..."}')
    check_json(row, place)
    return row


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is Python's, not JSON's; write null")
