"""A run's store: a folder or a part of an S3 bucket, through which a run travels where no disk is shared.

    objects    bytes under a key; made once, whole or not at all, and never changed
    trees      several objects under one prefix, with size and sha256 of each, written down only once all are there

Nothing is ever listed or renamed: who reads knows the keys, so what a list does not show yet is never missed, and what
was not finished is never seen. What stands under which key is said in `journal.py` and `shipping.py`. To add a kind of
store, write four methods as `_Folder` has them and its scheme in `_objects`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.run.files import disk_full

FIELD = "executor.store"
TRIES = 5
FIRST_PAUSE_S = 0.5
PRECONDITION_FAILED = 412
_HASH_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Stamp:
    """What one object of a tree must be."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Of a file."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_HASH_BYTES):
                digest.update(block)
                size += len(block)
        return cls(size, digest.hexdigest())


Files = Mapping[str, Stamp]
"""Of a tree: relative name -> what it must be."""


class Store:
    """One run's part of a store, by its URI.

    Raises:
        UsageError: the URI is of no kind that is known.
        MissingError: the package for it is not installed, nobody is let in, or there is no such bucket.
    """

    def __init__(self, uri: str, *, field: str = FIELD) -> None:
        self.uri = uri.rstrip("/")
        self._objects = _objects(self.uri, field)

    def create(self, key: str, content: bytes | Path) -> bool:
        """Make an object; False, and nothing changes, where there is one. A Path is a file to take it from.

        Raises:
            RunFailed: the store fails, again and again.
        """
        return self._patiently(lambda: self._objects.create(key, content), key)

    def read(self, key: str) -> bytes | None:
        """A whole object; None where there is none."""
        return self._patiently(lambda: self._objects.read(key), key)

    def remove(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        self._patiently(lambda: self._objects.remove(key), key)

    def create_json(self, key: str, value: Any) -> bool:
        """The same for a JSON document."""
        return self.create(key, json.dumps(value).encode())

    def read_json(self, key: str) -> Any:
        """None where there is none.

        Raises:
            RunFailed: it is not JSON.
        """
        content = self.read(key)
        try:
            return None if content is None else json.loads(content)
        except ValueError as error:
            raise RunFailed(f"not JSON: {error}", at=self._place(key)) from error

    # -- trees ---------------------------------------------------------------------------------------------------------

    def put_tree(self, prefix: str, files: Mapping[str, Path]) -> dict[str, Stamp]:
        """Put files under a prefix that nobody else writes to; they count once the caller wrote down what this gives.

        Args:
            prefix: of their keys.
            files: relative name -> file, which must not change meanwhile.
        """
        stamps = {}
        for name, path in files.items():
            stamps[name] = Stamp.of(path)
            self.create(f"{prefix}/{name}", path)
        return stamps

    def get_tree(self, prefix: str, files: Files, folder: Path) -> None:
        """Bring a tree into a folder, each file verified.

        Raises:
            RunFailed: an object is gone, or is not what was put there.
        """
        for name, stamp in files.items():
            self.get_file(f"{prefix}/{name}", stamp, _inside(folder, name))

    def get_file(self, key: str, stamp: Stamp, path: Path) -> None:
        """The same for one file; on failure nothing of it stays."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not self._patiently(lambda: self._objects.fetch(key, path), key):
                raise RunFailed("it is gone from the store", at=self._place(key))
            found = Stamp.of(path)
            if found != stamp:
                raise RunFailed(
                    f"damaged in the store: {found.bytes} bytes with sha256 {found.sha256[:12]}, "
                    f"put there as {stamp.bytes} bytes with {stamp.sha256[:12]}",
                    at=self._place(key),
                    fix="remove it and what belongs to it from the store, then start the run again",
                )
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _place(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def _patiently(self, ask: Callable[[], T], key: str) -> T:
        pause = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                return ask()
            except _Failed as error:
                if not left:
                    raise RunFailed(f"the store fails: {error}", at=self._place(key)) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")


def stamps_as_json(files: Files) -> dict[str, Any]:
    """As a record holds them."""
    return {name: {"bytes": stamp.bytes, "sha256": stamp.sha256} for name, stamp in files.items()}


def stamps_of_json(document: Mapping[str, Any]) -> dict[str, Stamp]:
    """The other way round."""
    return {name: Stamp(**stamp) for name, stamp in document.items()}


def files_of(folder: Path) -> dict[str, Path]:
    """All files below a folder, by relative name."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def _inside(folder: Path, name: str) -> Path:
    """Where a name from the store goes, which is never outside the folder."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise RunFailed(f"the store names a file outside the run's folder: {name!r}")
    return folder / parts


# -- kinds -------------------------------------------------------------------------------------------------------------


class _Failed(Exception):
    """Worth another try."""


class _Objects(Protocol):
    def create(self, key: str, content: bytes | Path) -> bool: ...
    def read(self, key: str) -> bytes | None: ...
    def fetch(self, key: str, path: Path) -> bool: ...
    def remove(self, key: str) -> None: ...


def _objects(uri: str, field: str) -> _Objects:
    parts = urlsplit(uri)
    if parts.scheme in ("", "file") and parts.path.startswith("/"):
        return _Folder(Path(unquote(parts.path) if parts.scheme else uri))
    if parts.scheme == "s3" and parts.netloc:
        return _S3(parts.netloc + parts.path, field)
    raise UsageError(f"not a store: {uri!r}", at=field, fix="an absolute folder, file:///..., or s3://BUCKET/PREFIX")


class _Folder:
    """Of a disk. An object is written beside its name and linked to it: whole, and only where none is."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, key: str, content: bytes | Path) -> bool:
        path = self._root / key
        with _file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                with temporary.open("wb") as file:
                    _copy(content, file.write)
                    file.flush()
                    os.fsync(file.fileno())
                return _linked(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes | None:
        path = self._root / key
        with _file_errors(path):
            return path.read_bytes() if path.is_file() else None

    def fetch(self, key: str, path: Path) -> bool:
        with _file_errors(path):
            if not (self._root / key).is_file():
                return False
            with path.open("wb") as file:
                _copy(self._root / key, file.write)
            return True

    def remove(self, key: str) -> None:
        with _file_errors(self._root / key):
            (self._root / key).unlink(missing_ok=True)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_full(error, path) or _Failed(str(error)) from error


def _linked(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _copy(content: bytes | Path, write: Callable[[bytes], object]) -> None:
    if isinstance(content, bytes):
        write(content)
        return
    with content.open("rb") as source:
        while block := source.read(_HASH_BYTES):
            write(block)


class _S3:
    """By s3fs. A put is seen whole or not at all; `mode="create"` is S3's own condition `If-None-Match: *`."""

    def __init__(self, root: str, field: str) -> None:
        self._root, self._field = root.rstrip("/"), field
        try:
            import s3fs
        except ImportError as error:
            raise MissingError(
                "a store in S3 needs s3fs", at=field, fix="pip install 'composer-executors[s3]'"
            ) from error
        self._fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        with self._errors(f"cannot open s3://{root}"):
            self._find_bucket(root.split("/")[0])

    def create(self, key: str, content: bytes | Path) -> bool:
        path = f"{self._root}/{key}"
        try:
            with self._errors(f"cannot write s3://{path}"):
                if isinstance(content, bytes):
                    self._fs.pipe_file(path, content, mode="create")
                else:
                    self._fs.put_file(str(content), path, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, key: str) -> bytes | None:
        try:
            with self._errors(f"cannot read s3://{self._root}/{key}"):
                content: bytes = self._fs.cat_file(f"{self._root}/{key}")
                return content
        except FileNotFoundError:
            return None

    def fetch(self, key: str, path: Path) -> bool:
        try:
            with self._errors(f"cannot read s3://{self._root}/{key}"):
                self._fs.get_file(f"{self._root}/{key}", str(path))
        except FileNotFoundError:
            return False
        return True

    def remove(self, key: str) -> None:
        with self._errors(f"cannot remove s3://{self._root}/{key}"):
            # of one key, and S3 does not mind where there is none
            bucket, _, name = f"{self._root}/{key}".partition("/")
            self._fs.call_s3("delete_object", Bucket=bucket, Key=name)

    def _find_bucket(self, bucket: str) -> None:
        try:
            self._fs.call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError as error:
            raise MissingError(
                f"there is no bucket {bucket}", at=self._field, fix="make it, or name another"
            ) from error

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's exceptions as ours; that an object is there or not is the caller's to judge."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise self._closed(f"{what}: no credentials") from error
        except PermissionError as error:
            raise self._closed(f"{what}: not allowed ({error})") from error
        except (BotoCoreError, ClientError, OSError, TimeoutError) as error:
            # s3fs knows it by an element of the answer that only AWS sends
            if _http_status(error.__cause__) == PRECONDITION_FAILED:
                raise FileExistsError(what) from error
            raise _Failed(f"{what}: {error}") from error

    def _closed(self, what: str) -> MissingError:
        fix = "export AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=..., and name both under executor.secrets"
        return MissingError(what, at=self._field, fix=fix)


def _http_status(error: BaseException | None) -> int | None:
    answer = getattr(error, "response", None)
    return answer["ResponseMetadata"].get("HTTPStatusCode") if isinstance(answer, dict) else None
