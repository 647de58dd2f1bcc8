"""Strict YAML with places: text in, plain data and the line and column of every key out.

Built on PyYAML's events, because its loaders drop what we need (places, repeated keys) and add what we do not want:
tags that make objects, and YAML 1.1's surprises. Here `no`, `off`, `12:30:00` and dates are text, `1e-5` is a number,
`010` is ten. Keys are always text. JSON is a subset. Nothing here knows what a spec holds.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from composer_core.errors import Problem, SpecError

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 20_000
"""After aliases are written out: a few lines of nested aliases can stand for billions of values."""

_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Place:
    """Where a value was written: a line of a file (both count from 1), or no line for the command line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Document:
    """Plain data, and for each dotted key (`loss.channels[0].beta`; "" is the whole) where it was written."""

    data: Any
    places: Mapping[str, Place]


def dotted(parent: str, part: str | int) -> str:
    """The key of a child: `dotted("loss.channels", 0)` is `loss.channels[0]`."""
    if isinstance(part, int):
        return f"{parent}[{part}]"
    return f"{parent}.{part}" if parent else part


def parse(text: str, source: str) -> Document:
    """Parse one YAML or JSON document; `source` is what messages call it.

    Raises:
        SpecError: with the one place where reading stopped.
    """
    if len(text) > MAX_BYTES:
        problem = f"{len(text)} characters are more than the {MAX_BYTES} that a spec may have"
        raise SpecError([Problem("", problem, source=source)])
    if (bad := _UNPRINTABLE.search(text)) is not None:
        line_start = text.rfind("\n", 0, bad.start()) + 1
        line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - line_start + 1
        raise SpecError([Problem("", f"character {bad.group()!r} cannot stand in YAML", "", source, line, column)])
    reader = _Reader(source, yaml.parse(text, Loader=_LOADER), text)
    return Document(reader.document(), reader.places)


@dataclass
class _Anchor:
    key: str
    nodes: int
    value: Any = None
    done: bool = False


@dataclass
class _Reader:
    source: str
    events: Iterator[Any]
    text: str
    places: dict[str, Place] = field(default_factory=dict)
    anchors: dict[str, _Anchor] = field(default_factory=dict)
    nodes: int = 0

    def document(self) -> Any:
        """The only document of the stream; None when there is none."""
        data = None
        documents = 0
        while not isinstance(event := self.next(), yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.fail(event, "a second document starts here", "keep one document in a file")
                data = self.value(self.next(), "", 0)
        return data

    def next(self) -> Any:
        try:
            return next(self.events)
        except yaml.MarkedYAMLError as error:
            self.fail_syntax(error)

    def fail(self, event: Any, problem: str, fix: str = "", key: str = "") -> NoReturn:
        mark = event.start_mark
        raise SpecError([Problem(key, problem, fix, self.source, mark.line + 1, mark.column + 1)])

    def fail_syntax(self, error: Any) -> NoReturn:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark is not None else (0, 0)
        lines = self.text.splitlines()
        here = lines[line] if line < len(lines) else ""
        if here.lstrip(" ").startswith("\t") or here[column : column + 1] == "\t":
            problem, fix = "a tab stands here, YAML is indented with spaces", "replace the tab by spaces"
        else:
            context = f" {error.context}" if error.context else ""
            problem, fix = f"not readable as YAML: {error.problem}{context}", ""
        raise SpecError([Problem("", problem, fix, self.source, line + 1, column + 1)]) from error

    def value(self, event: Any, key: str, depth: int) -> Any:
        self.places.setdefault(key, self.place(event))
        self.count(event, 1)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, key)
        if event.tag not in (None, "!"):
            self.fail(event, f"tag {event.tag!r} is not read in a spec", "write the plain value", key)
        if depth > MAX_DEPTH:
            self.fail(event, f"nested more than {MAX_DEPTH} deep", key=key)
        if event.anchor is None:
            return self.content(event, key, depth)
        anchor = self.anchors[event.anchor] = _Anchor(key, self.nodes)
        anchor.value = self.content(event, key, depth)
        anchor.nodes, anchor.done = self.nodes - anchor.nodes + 1, True
        return anchor.value

    def content(self, event: Any, key: str, depth: int) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(key, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(key, depth)
        return self.scalar(event, key)

    def mapping(self, parent: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.fail(event, "a key must be plain text", key=parent)
            name = event.value
            key = dotted(parent, name)
            if name == "<<" and event.implicit[0]:
                self.fail(event, "merge keys (<<) are not read in a spec", "write the keys out", parent)
            if name in found:
                self.fail(event, f"this key stands twice (first at line {lines[name]})", "remove one of them", key)
            self.places[key] = self.place(event)
            lines[name] = self.places[key].line
            found[name] = self.value(self.next(), key, depth + 1)
        return found

    def sequence(self, parent: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            found.append(self.value(event, dotted(parent, len(found)), depth + 1))
        return found

    def alias(self, event: Any, key: str) -> Any:
        anchor = self.anchors.get(event.anchor)
        if anchor is None:
            self.fail(event, f"no anchor &{event.anchor} stands before this", key=key)
        if not anchor.done:
            self.fail(event, f"*{event.anchor} contains itself", key=key)
        self.count(event, anchor.nodes - 1)  # its own one is counted
        if anchor.nodes == 1:
            return anchor.value
        # What the alias stands for keeps the places of the anchor, where a mistake in it has to be corrected.
        inside = (anchor.key + ".", anchor.key + "[")
        copied = {key + old[len(anchor.key) :]: place for old, place in self.places.items() if old.startswith(inside)}
        self.places.update(copied)
        return copy.deepcopy(anchor.value)

    def count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.fail(event, f"more than {MAX_NODES} values, counting what aliases stand for")

    def scalar(self, event: Any, key: str) -> Any:
        text = event.value
        if not event.implicit[0]:  # quoted, or a block of text
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > 300:
                self.fail(event, "this number has more than 300 digits", key=key)
            return int(text.lstrip("+"), 0 if text[1:2] in ("x", "o") else 10)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                self.fail(event, f"{text} is too large for a number", key=key)
            return number
        return text

    def place(self, event: Any) -> Place:
        return Place(self.source, event.start_mark.line + 1, event.start_mark.column + 1)
