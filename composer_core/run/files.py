"""Writing so that a killed process leaves no half-written file: whole files, JSON lines, whole folders.

Not here: which files a run has (`directory.py`). The rules: a whole file is replaced by one rename; a line is one
write; a folder counts only with its marker COMPLETE, which is written last and says what the folder must hold.
A full disk is a `RunFailed` that says so, and leaves what was there before.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from composer_core.errors import RunFailed

MARKER = "COMPLETE"
FULL = (errno.ENOSPC, errno.EDQUOT)
SCARCE_BYTES = 1 << 16
"""A disk with less than this is full: libraries that write tensors do not all say why they could not."""


def write_text(path: Path, text: str) -> None:
    """Replace `path` as one step: readers see the old content or the new one."""
    _replace(path, [text])


def _replace(path: Path, texts: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        full = disk_full(error, path)
        temporary.unlink(missing_ok=True)
        if full is not None:
            raise full from error
        raise
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON document; anything that is not JSON becomes its text."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def write_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines as one step."""
    _replace(path, map(_line, values))


def _line(value: Mapping[str, Any]) -> str:
    # a line break inside a line would split it, but json escapes those
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def read_json(path: Path) -> Any:
    """The document, or None where the file is missing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


class JsonLines:
    """Appends objects to a file, one line each, through a descriptor that stays open. One writer per file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_incomplete_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinity are not JSON and raise ValueError.

        Raises:
            RunFailed: the disk is full; nothing of the line stays.
        """
        line = _line(value).encode("utf-8", "replace")
        left = line
        try:
            while left:  # one write as a rule; a signal or a full disk may cut it short
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            if len(left) < len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - (len(line) - len(left)))
            full = disk_full(error, self._path)
            raise full or error from error

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._fd)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of a file; a last line that a killed writer left incomplete is dropped.

    Raises:
        RunFailed: another line is not JSON, with its place.
    """
    if not path.is_file():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    values = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    with suppress(ValueError):  # no line break behind it: its writer was killed, or is still writing
        values.append(json.loads(last))
    return values


def _parse(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise RunFailed(f"not a JSON line: {error}", at=f"{path}:{number}", fix="remove the line") from error


def _cut_incomplete_line(path: Path) -> None:
    """Without this the next line would be appended to what a killed writer left, and both would be lost."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def disk_full(error: BaseException, path: Path) -> RunFailed | None:
    """What to tell the user where `error`, met while writing to `path`, means that there is no room left."""
    if not isinstance(error, Exception) or isinstance(error, RunFailed):
        return None
    # safetensors passes the system's words on, in an error of its own
    said = getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL)
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    if not said and shutil.disk_usage(folder).free >= SCARCE_BYTES:
        return None
    return RunFailed(
        "the disk is full", at=str(path), fix="free some room, then `composer-run resume` goes on from the checkpoint"
    )


# -- folders -----------------------------------------------------------------------------------------------------------


@contextmanager
def fill_folder(path: Path, **facts: Any) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `path` on leaving; on an exception nothing remains of it.

    Args:
        path: the folder to make; a complete one that is there already stays usable until the new one is.
        facts: written into the marker beside the list of files.
    """
    partial, old = _beside(path, "partial"), _beside(path, "old")
    settle(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        files = _sync_tree(partial)
        if is_complete(path):
            os.replace(path, old)
        elif path.exists():
            shutil.rmtree(path)
        os.replace(partial, path)
    except BaseException as error:
        full = disk_full(error, partial)  # asked before the room that `partial` takes is free again
        shutil.rmtree(partial, ignore_errors=True)
        settle(path)
        if full is not None:
            raise full from error
        raise
    _sync_folder(path.parent)
    write_json(path / MARKER, {**facts, "time": time.time(), "files": files})
    shutil.rmtree(old, ignore_errors=True)


def settle(path: Path) -> None:
    """Put back a complete folder that a killed `fill_folder` had moved aside before its successor was complete."""
    old = _beside(path, "old")
    if not old.exists():
        return
    if is_complete(path) or not is_complete(old):
        shutil.rmtree(old)
        return
    shutil.rmtree(path, ignore_errors=True)
    os.replace(old, path)


def marker(path: Path) -> dict[str, Any] | None:
    """The marker of a complete folder; None when it is missing or a file is not as it says."""
    try:
        facts = json.loads((path / MARKER).read_text(encoding="utf-8"))
        sizes = facts["files"].items()
        whole = all((path / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # each means the same: not a folder that fill_folder finished
    return facts if whole else None


def is_complete(path: Path) -> bool:
    """Whether a folder was finished and every file has its size."""
    return marker(path) is not None


def find_complete(path: Path) -> Path | None:
    """Where the complete folder stands: at `path`, or moved aside by a `fill_folder` that was killed; or None."""
    return next((place for place in (path, _beside(path, "old")) if is_complete(place)), None)


def remove_folder(path: Path) -> None:
    """Remove a complete folder; the marker goes first, so that a kill in between leaves an incomplete one."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _sync_tree(folder: Path) -> dict[str, int]:
    """Flush every file of a folder to the disk; their sizes by relative name."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            _sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    _sync_folder(folder)
    return sizes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
