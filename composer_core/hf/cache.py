"""Folders that are complete or absent: how models are made and kept on this machine.

A folder is filled under a temporary name beside its destination and renamed when it is whole, so a process killed
at any moment leaves no half-written model under a name that anybody reads. What models are made of is not here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_core.errors import MissingError

CACHE_VARIABLE = "COMPOSER_CACHE"
_PART = ".part"


def cache_root() -> Path:
    """Where made models are kept: the environment variable COMPOSER_CACHE, default `~/.cache/composer`."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "composer"


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder to fill; on leaving without an exception it becomes `destination`, else it is removed.

    Raises:
        FileExistsError: `destination` is there already and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} exists already")
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=_PART, dir=destination.parent))
    try:
        yield part
        part.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared
        part.rename(destination)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def cached_folder(name: str, *, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make(folder)` when it is not there yet.

    Of several processes that want it at once, one makes it and the others wait: a conversion takes gigabytes.

    Raises:
        MissingError: the cache cannot be written.
    """
    models = cache_root() / "models"
    folder = models / name
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f".{name}.lock"):
            if not folder.is_dir():
                _sweep(models, name)
                with new_folder(folder) as part:
                    make(part)
    except OSError as error:
        raise MissingError(
            f"the model cache cannot be written: {error.strerror or error}",
            at=str(models),
            fix=f"free some space, or set {CACHE_VARIABLE} to a folder you can write",
        ) from error
    return folder


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    import fcntl  # POSIX; imported here so that the module can be read on any system

    with lock.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel gives it back when the holder dies, however it dies
        yield


def _sweep(models: Path, name: str) -> None:
    """Remove what a killed process left; only called under the lock, so nobody is filling it."""
    for leftover in models.glob(f".{name}.*{_PART}"):
        shutil.rmtree(leftover, ignore_errors=True)
