"""From paths to traces: which files are sessions, who reads each, and which sub-agent belongs to which session.

A file that is named must be readable and of a known format; what a folder holds besides sessions is skipped, and
said. Sub-agents' files are read after the sessions of their folder and hung below the call that started them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_core.errors import UsageError
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Registry
from composer_core.protocols import TraceReader
from composer_core.traces.model import Origin, Trace
from composer_core.traces.stats import Tally

AUTO = "auto"
SUFFIXES = frozenset({".jsonl", ".json", ".traj", ".eval", ".ndjson"})
"""What is looked at inside a folder; a file that is named may be called anything."""
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class TraceFile:
    """A file and its reader."""

    path: Path
    format: str
    reader: TraceReader
    prefix: str = ""
    """What trace ids begin with in place of the file's stem, where several files share the stem."""

    def read(self, tally: Tally) -> Iterator[Trace]:
        """The file's traces; the tally is complete when they are exhausted.

        Raises:
            UsageError: the file cannot be read.
        """
        tally.file, tally.format = str(self.path), self.format
        try:
            for trace in self.reader.read(self.path, tally):
                yield self._named(trace)
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror or error}", at=str(self.path)) from error

    def _named(self, trace: Trace) -> Trace:
        if not self.prefix:
            return trace
        stem, origin = self.path.stem, trace.origin
        if origin is not None and origin.trace.startswith(stem):
            origin = replace(origin, trace=self.prefix + origin.trace.removeprefix(stem))
        return replace(trace, id=self.prefix + trace.id.removeprefix(stem), origin=origin)


@dataclass
class TraceFiles:
    """What was found under some paths."""

    files: list[TraceFile] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    """Files of the folders that are no sessions, and why."""

    def read(self, *, tallies: list[Tally] | None = None) -> Iterator[Trace]:
        """All traces, file by file, sub-agents joined to their sessions.

        Args:
            tallies: receives one tally per file, in order.
        """
        sessions: dict[str, Trace] = {}
        for file in self.files:
            tally = Tally()
            if tallies is not None:
                tallies.append(tally)
            for trace in file.read(tally):
                session = trace.extra.get("session")
                if trace.origin is None and isinstance(session, str) and session:
                    sessions[session] = replace(trace, steps=())
                yield _joined(trace, sessions)


def load_readers(registry: Registry, format: str = AUTO) -> dict[str, TraceReader]:
    """The readers that may read, by name: one of them, or all.

    Raises:
        UsageError: no reader of that name.
        MissingError: a reader needs a package that is not installed.
    """
    names = registry.names(Kind.READER) if format == AUTO else [format]
    readers = {}
    for name in names:
        _, contribution = registry.get(Kind.READER, name)
        readers[name.rpartition("/")[2]] = contribution.load()(contribution.settings())
    return readers


def find_traces(paths: Sequence[Path], registry: Registry, *, format: str = AUTO) -> TraceFiles:
    """Look for sessions in files and, recursively, in folders. Reads the beginning of each file only.

    Raises:
        UsageError: nothing is there, a named file is of no known format or cannot be read, or two readers claim it.
    """
    readers = load_readers(registry, format)
    found = TraceFiles()
    for path in (path.expanduser() for path in paths):
        if path.is_dir():
            _search(path, readers, found, format)
        elif path.exists():
            found.files.append(_named_file(path, readers, format))
        else:
            raise UsageError("no such file or folder", at=str(path))
    found.files = _distinct(sorted(found.files, key=lambda file: _is_subagent(file.path)))
    return found


def require_turns(tallies: Sequence[Tally]) -> None:
    """Refuse files of which nothing can be learnt, once they are read.

    Raises:
        UsageError: none of them has a turn of an assistant.
    """
    if tallies and not any(tally.assistant_turns for tally in tallies):
        which = tallies[0].file if len(tallies) == 1 else f"{tallies[0].file} and {len(tallies) - 1} more"
        raise UsageError(
            "there is no assistant turn in it", at=which, fix="`composer-run traces stats` shows what each file holds"
        )


def _search(folder: Path, readers: Mapping[str, TraceReader], found: TraceFiles, format: str) -> None:
    candidates = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files: list[TraceFile] = []
    for path in candidates:
        try:
            name = _recognise(path, readers)
        except OSError as error:
            found.skipped.append((path, f"cannot be read: {error.strerror or error}"))
            continue
        if name is None:
            found.skipped.append((path, "empty" if not path.stat().st_size else "no format that is known"))
        else:
            files.append(TraceFile(path, name, readers[name]))
    if not files:
        what = f"none of its {len(candidates)} files is a session" if candidates else "no session file in it"
        wanted = f"of format {format}" if format != AUTO else f"a reader knows {', '.join(sorted(readers))}"
        raise UsageError(f"{what}: {wanted}", at=str(folder), fix=f"files must end in {', '.join(sorted(SUFFIXES))}")
    found.files += files


def _named_file(path: Path, readers: Mapping[str, TraceReader], format: str) -> TraceFile:
    if format != AUTO:  # named by the user: taken at their word, whatever it looks like
        [(name, reader)] = readers.items()
        return TraceFile(path, name, reader)
    try:
        found = _recognise(path, readers)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", at=str(path)) from error
    if found is None:
        known = ", ".join(sorted(readers))
        raise UsageError(
            f"no trace reader knows this format; there are {known}", at=str(path), fix="name it: --format openai-chat"
        )
    return TraceFile(path, found, readers[found])


def _recognise(path: Path, readers: Mapping[str, TraceReader]) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    claims = [name for name, reader in readers.items() if reader.recognises(path, head)]
    if len(claims) > 1:
        raise UsageError(
            f"claimed by the readers {' and '.join(claims)}", at=str(path), fix=f"name one: --format {claims[0]}"
        )
    return claims[0] if claims else None


def _is_subagent(path: Path) -> bool:
    return path.name.startswith("agent-") or path.parent.name == "subagents"


def _distinct(files: Sequence[TraceFile]) -> list[TraceFile]:
    """Give files that share a stem a prefix with their folder, numbered where that is shared too."""
    stems = Counter(file.path.stem for file in files)
    taken: Counter[str] = Counter()
    named = []
    for file in files:
        if stems[file.path.stem] > 1:
            prefix = f"{file.path.parent.name}/{file.path.stem}"
            taken[prefix] += 1
            file = replace(file, prefix=prefix if taken[prefix] == 1 else f"{prefix}~{taken[prefix]}")
        named.append(file)
    return named


def _joined(trace: Trace, sessions: Mapping[str, Trace]) -> Trace:
    """A trace of a file of its own, hung below its session where that was read."""
    origin = trace.origin
    session = sessions.get(origin.trace) if origin is not None else None
    if origin is None or session is None:
        return trace
    calls = session.extra.get("agent_calls") or {}
    agent = trace.extra.get("agent_id")
    start = calls.get(agent) if isinstance(agent, str) else None
    owner, step, call_id = start or (session.id, origin.step, origin.call_id)
    return replace(trace, origin=Origin(origin.kind, owner, step, call_id))
