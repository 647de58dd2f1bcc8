"""JSON of strangers: fast where it is well formed, and never more than a ValueError where it is not.

orjson reads nearly everything; what it refuses and Python's reader takes (NaN, half a surrogate pair, bytes that are
no UTF-8) is read the slow way and comes out as text that can be written again. Integers of more than 64 bits become
floats; arguments that were sent as text keep that text beside them.
"""

from __future__ import annotations

import json
from typing import Any

from composer_core.errors import MissingError

try:
    import orjson
except ImportError as error:
    # here, not where readers are loaded: channels and commands come this way too
    raise MissingError(
        "orjson is not installed, which reads and writes traces", fix="pip install 'composer-core[data]'"
    ) from error


def loads(text: bytes | str) -> Any:
    """The value.

    Raises:
        ValueError: no JSON, or nested too deep to be read.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _slow_loads(text)


def dumps(value: Any) -> str:
    """Compact JSON text of a value that came out of `loads`."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def as_dict(value: Any) -> dict[str, Any]:
    """The object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The array, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def as_str(value: Any) -> str:
    """The text, or nothing for anything else."""
    return value if isinstance(value, str) else ""


def as_int(value: Any) -> int | None:
    """The whole number, or None for anything else (booleans included)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _slow_loads(text: bytes | str) -> Any:
    decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    try:
        return _writable(json.loads(decoded))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_writable(item) for item in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return value
