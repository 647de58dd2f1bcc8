"""What a worker without a shared disk puts into its run's store, and how anyone reads it there.

    rank=R/writer=W/claim.json          one start of the worker; the first free W is its own from then on
    rank=R/writer=W/lines/NAME/OFFSET   bytes of a growing file from that offset on
    rank=R/writer=W/begun.json          the files so far are all there: earlier writers are history, of which this one
                                        saw so many records
    rank=R/writer=W/tree=T/...          objects of a finished folder
    rank=R/writer=W/record=K.json       what happened, in order:
        {lines: NAME}                   a file has begun to grow
        {tree: NAME, prefix, files}     a folder is whole
        {removed: NAME}                 it is not wanted any more
        {lock: ...}                     the worker's lock.json
    rank=R/writer=W/end.json            the worker's exit code; all is there

A writer begins with all lines so far, so the newest one that has begun tells everything but trees, of which each has
put only its own. A writer that was thought dead and lives on disturbs nobody: it has keys of its own, and what it
writes down once a later one has begun does not count.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_executors.store import Stamp, Store, stamps_as_json, stamps_of_json


@dataclass(frozen=True)
class Tree:
    """A finished folder in the store."""

    name: str
    """Relative to the run directory."""
    prefix: str
    files: Mapping[str, Stamp]


class Writer:
    """One start of a worker. Two threads may use it."""

    def __init__(self, store: Store, rank: int, facts: Mapping[str, Any]) -> None:
        self._store = store
        self.number = 0
        while not store.create_json(f"{_base(rank, self.number)}/claim.json", dict(facts)):
            self.number += 1
        self._base = _base(rank, self.number)
        self._lock = threading.Lock()
        self._records = 0
        self._trees = 0
        self._grown: dict[str, int] = {}

    def append(self, name: str, content: bytes) -> None:
        """The next bytes of a growing file."""
        if name not in self._grown:
            self._record({"lines": name})
            self._grown[name] = 0
        self._store.create(_part(self._base, name, self._grown[name]), content)
        self._grown[name] += len(content)

    def grown(self, name: str) -> int:
        """How many bytes of a file are in the store."""
        return self._grown.get(name, 0)

    def begin(self, seen: Sequence[int]) -> None:
        """All lines so far are there; `seen` is what `Reader.seen` said of those before."""
        self._store.create_json(f"{self._base}/begun.json", {"seen": list(seen)})

    def tree(self, name: str, files: Mapping[str, Path]) -> Tree:
        """Put a finished folder."""
        self._trees += 1
        prefix = f"{self._base}/tree={self._trees}"
        tree = Tree(name, prefix, self._store.put_tree(prefix, files))
        self._record({"tree": name, "prefix": prefix, "files": stamps_as_json(tree.files)})
        return tree

    def remove(self, tree: Tree) -> None:
        """Take a folder away, whoever put it: first its record, so that nobody looks for half of it."""
        self._record({"removed": tree.name})
        for name in tree.files:
            self._store.remove(f"{tree.prefix}/{name}")

    def lock(self, document: Mapping[str, Any]) -> None:
        """Say which process works."""
        self._record({"lock": dict(document)})

    def end(self, exit_code: int) -> None:
        """Nothing more comes."""
        self._store.create_json(f"{self._base}/end.json", {"exit_code": exit_code})

    def _record(self, document: Mapping[str, Any]) -> None:
        with self._lock:
            self._store.create_json(f"{self._base}/record={self._records}.json", document)
            self._records += 1


class Reader:
    """Reads on where it stopped."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._claims: list[dict[str, Any]] = []
        self._begun: dict[int, list[int]] = {}
        self._records: dict[int, list[dict[str, Any]]] = {}

    def newest(self, launch: str) -> int | None:
        """The newest writer of a launch that has begun."""
        self._look()
        mine = [number for number, claim in enumerate(self._claims) if claim["launch"] == launch]
        return next((number for number in reversed(mine) if self._has_begun(number)), None)

    def trees(self) -> dict[str, Tree]:
        """Folders that are whole and still wanted, of all writers, in the order in which they came."""
        self._look()
        found: dict[str, Tree] = {}
        begun = [number for number in range(len(self._claims)) if self._has_begun(number)]
        for number in begun:
            counted = min([self._begun[later][number] for later in begun if later > number], default=None)
            for record in self.records(number)[:counted]:
                if "tree" in record:
                    found.pop(record["tree"], None)
                    found[record["tree"]] = Tree(record["tree"], record["prefix"], stamps_of_json(record["files"]))
                elif "removed" in record:
                    found.pop(record["removed"], None)
        return found

    def seen(self) -> list[int]:
        """How many records each writer has that `newest` or `trees` met."""
        return [len(self.records(number)) for number in range(len(self._claims))]

    def records(self, writer: int) -> list[dict[str, Any]]:
        """All that it has written down by now."""
        known = self._records.setdefault(writer, [])
        while (record := self._store.read_json(f"{self._at(writer)}/record={len(known)}.json")) is not None:
            known.append(record)
        return known

    def growing(self, writer: int) -> list[str]:
        """Names of its growing files."""
        return [record["lines"] for record in self.records(writer) if "lines" in record]

    def lock_of(self, writer: int) -> dict[str, Any] | None:
        """Its worker's lock.json."""
        locks = [record["lock"] for record in self.records(writer) if "lock" in record]
        return locks[-1] if locks else None

    def lines(self, writer: int, name: str, offset: int) -> bytes:
        """What a file has grown by since an offset at which a part ended."""
        parts = []
        while part := self._store.read(_part(self._at(writer), name, offset)):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _at(self, writer: int) -> str:
        return _base(self._rank, writer)

    def _look(self) -> None:
        while (claim := self._store.read_json(f"{self._at(len(self._claims))}/claim.json")) is not None:
            self._claims.append(claim)

    def _has_begun(self, writer: int) -> bool:
        if writer not in self._begun:
            begun = self._store.read_json(f"{self._at(writer)}/begun.json")
            if begun is not None:
                self._begun[writer] = begun["seen"]
        return writer in self._begun


def checkpoints(trees: Mapping[str, Tree]) -> dict[int, Tree]:
    """Those among folders that are checkpoints, by step, oldest first."""
    found = {int(name.rpartition("_")[2]): tree for name, tree in trees.items() if name.startswith("checkpoints/step_")}
    return dict(sorted(found.items()))


def marker_facts(text: str) -> dict[str, Any]:
    """What the marker of a complete folder says beside its files."""
    return {name: value for name, value in json.loads(text).items() if name not in ("time", "files")}


def _base(rank: int, writer: int) -> str:
    return f"rank={rank}/writer={writer}"


def _part(base: str, name: str, offset: int) -> str:
    return f"{base}/lines/{name}/{offset:012d}"
