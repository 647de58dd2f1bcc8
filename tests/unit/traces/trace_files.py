"""Where the recorded sessions stand, and how the tests read one file."""

from __future__ import annotations

import json
from pathlib import Path

from composer_core.plugins.registry import Registry
from composer_core.traces.files import load_readers
from composer_core.traces.stats import Tally

DATA = Path(__file__).parents[2] / "data" / "traces"
EXPECTED = json.loads((DATA / "expected_counts.json").read_text())
READERS = load_readers(Registry.discover(third_party=False))


def read(path, format):
    """Traces and tally of one file."""
    tally = Tally()
    return list(READERS[format].read(Path(path), tally)), tally


def write_lines(path, *records):
    """A JSONL file; a record that is text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path
