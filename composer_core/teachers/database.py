"""The one SQLite file behind replies, money and reference log-probs; shared by all processes of a machine."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_core.errors import MissingError, RunFailed
from composer_core.hf.cache import cache_root

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL, time REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS money (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, nanousd INTEGER NOT NULL, tokens INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'spent', 'doubt')), process TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS money_by_scope ON money (scope, state);
CREATE TABLE IF NOT EXISTS reference (key TEXT PRIMARY KEY, chosen REAL NOT NULL, rejected REAL NOT NULL) WITHOUT ROWID;
"""
_BUSY_MS = 60_000


def default_database() -> Path:
    """`teachers.sqlite` in the cache folder: replies serve every run that asks the same."""
    return cache_root() / "teachers.sqlite"


class Database:
    """A connection that commits each block. One per thread."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            MissingError: it cannot be opened, or is not such a database.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, isolation_level=None)
            # WAL: readers and one writer at once. NORMAL: a commit survives the process's death, which is what
            # counts for a reply that was paid for; only a power cut could take the last ones.
            self._connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(_SCHEMA)
            os.chmod(path, 0o600)  # replies hold whatever the sessions held
        except (OSError, sqlite3.Error) as error:
            raise MissingError(
                f"the teachers' database cannot be used: {error}", at=str(path), fix="set COMPOSER_CACHE elsewhere"
            ) from error

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between.

        Raises:
            RunFailed: the file cannot be written, as on a full disk.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise RunFailed(f"the teachers' database cannot be written: {error}", at=str(self.path)) from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def read(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """All rows of a query."""
        return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Release the file."""
        self._connection.close()
