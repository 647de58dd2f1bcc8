"""Money and tokens that teachers may cost, over all processes that share a scope.

A call is reserved at its worst before it is sent, and settled at what it cost; so calls in flight can never add up to
more than the limit. Whole nano-dollars: sums of floats would drift by a cent in the end. Where nobody can know whether
a call was billed (the connection broke, a process was killed) its reservation stays, as `doubt`.
"""

from __future__ import annotations

import math
import os
import sqlite3
from dataclasses import dataclass

from composer_core.protocols import Cost
from composer_core.run.processes import is_running, process_start
from composer_core.teachers.database import Database

_NANO = 1_000_000_000


@dataclass(frozen=True)
class Spent:
    """Where a scope stands; dollars and tokens."""

    usd: float
    tokens: int
    doubt_usd: float
    """Of it: calls that may or may not have been billed."""
    reserved_usd: float
    """On top: calls under way."""


class Budget:
    """The limits of one scope, such as one pairs file."""

    def __init__(self, database: Database, scope: str, *, usd: float | None = None, tokens: int | None = None) -> None:
        self._database = database
        self._scope = scope
        self._nanousd = None if usd is None else math.floor(usd * _NANO + 0.5)
        self._tokens = tokens
        self._process = process_mark(os.getpid())
        self.sweep()

    def reserve(self, cost: Cost) -> int | None:
        """Hold the worst case of a call; None where it does not fit beside what is spent and under way."""
        nano = _nano(cost.usd)
        with self._database.write() as connection:
            row = connection.execute(
                "SELECT COALESCE(SUM(nanousd), 0), COALESCE(SUM(tokens), 0) FROM money WHERE scope = ?", (self._scope,)
            ).fetchone()
            if self._nanousd is not None and row[0] + nano > self._nanousd:
                return None
            if self._tokens is not None and row[1] + cost.tokens > self._tokens:
                return None
            return connection.execute(
                "INSERT INTO money (scope, nanousd, tokens, state, process) VALUES (?, ?, ?, 'reserved', ?)",
                (self._scope, nano, cost.tokens, self._process),
            ).lastrowid

    def settle(self, reservation: int, cost: Cost, *, within: sqlite3.Connection) -> None:
        """Book what a call really cost, in the transaction that keeps its reply."""
        within.execute(
            "UPDATE money SET nanousd = ?, tokens = ?, state = 'spent' WHERE id = ?",
            (_nano(cost.usd), cost.tokens, reservation),
        )

    def release(self, reservation: int) -> None:
        """Give a reservation back: the call was not billed."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM money WHERE id = ?", (reservation,))

    def doubt(self, reservation: int) -> None:
        """Keep a reservation as spent: nobody can know whether the call was billed."""
        with self._database.write() as connection:
            connection.execute("UPDATE money SET state = 'doubt' WHERE id = ?", (reservation,))

    def others_under_way(self) -> bool:
        """Whether a reservation is open that may yet be settled for less."""
        self.sweep()
        return bool(self._database.read("SELECT 1 FROM money WHERE scope = ? AND state = 'reserved'", self._scope))

    def sweep(self) -> None:
        """Reservations of processes that are gone become doubt: their calls may have been billed."""
        rows = self._database.read(
            "SELECT DISTINCT process FROM money WHERE scope = ? AND state = 'reserved'", self._scope
        )
        gone = [str(process) for (process,) in rows if process != self._process and not _alive(str(process))]
        if not gone:
            return
        with self._database.write() as connection:
            connection.executemany(
                "UPDATE money SET state = 'doubt' WHERE scope = ? AND state = 'reserved' AND process = ?",
                [(self._scope, process) for process in gone],
            )

    def spent(self) -> Spent:
        """Where the scope stands now."""
        rows = self._database.read(
            "SELECT state, SUM(nanousd), SUM(tokens) FROM money WHERE scope = ? GROUP BY state", self._scope
        )
        by_state = {str(state): (int(str(nano)), int(str(tokens))) for state, nano, tokens in rows}
        spent, doubt, reserved = (by_state.get(state, (0, 0)) for state in ("spent", "doubt", "reserved"))
        return Spent((spent[0] + doubt[0]) / _NANO, spent[1] + doubt[1], doubt[0] / _NANO, reserved[0] / _NANO)


def process_mark(pid: int) -> str:
    """A process's id with its start time."""
    return f"{pid}@{process_start(pid)}"


def _alive(mark: str) -> bool:
    pid, _, start = mark.partition("@")
    return is_running(int(pid), start)


def _nano(usd: float) -> int:
    # up: a fraction of a nano-dollar too much is safe, too little is not
    return math.ceil(round(usd * _NANO, 3))
