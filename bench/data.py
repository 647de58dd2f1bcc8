"""How fast sessions are read, in how much memory, and how fast rollouts become rows.

    python bench/data.py [--quick] [--json]

Reading: a Claude Code session is indexed, and every step built once, against a bare `json.loads` loop over the same
lines; `ratio` is our speed over the loop's. Contenders run interleaved in one process; figures are medians. Memory:
the peak of a fresh process that does the same with 1 GB (`--quick`: 100 MB), over 150 MB. The sessions are synthetic
and written to a temporary folder: three records a turn, bodies of 0.2 to 12 KB, every fifth call in parallel.
Rows: `rows.py`. Teachers: `teachers.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from rows import prepare
from teachers import asking, cached

MEMORY_TARGET_MB = 150
READING_TARGET = 0.6
Figure = dict[str, object]

_WORDS = [
    "naïve", "→", "def", "return", "import", "self", "error:", "tests/unit/test_reader.py", "assert", "value", "the",
    "file", "is", "not", "\"quoted\"", "\\path", "0x7f", "==", "->", "{", "}", "\n", "\n    ", "line 42",
]  # fmt: skip


def write_session(path: Path, size: int, seed: int = 0) -> int:
    """A session of at least `size` bytes; returns the number of its records."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(_WORDS[n % 3 :], k=chance.randint(30, 1500))) for n in range(200)]
    written = records = turn = 0
    parent: str | None = None
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            turn += 1
            for kind, content in _turn(turn, chance, texts):
                uuid = f"{chance.getrandbits(128):032x}"
                message = {"role": kind, "content": content}
                if kind == "assistant":
                    usage = {"input_tokens": 9, "output_tokens": 99}
                    message |= {"id": f"msg_{turn:020}", "model": "claude-opus-4", "usage": usage}
                record = {"parentUuid": parent, "isSidechain": False, "sessionId": "s", "version": "2.1.29"}
                record |= {"type": kind, "message": message, "uuid": uuid, "timestamp": "2026-02-02T04:31:22.077Z"}
                line = json.dumps(record, ensure_ascii=False) + "\n"
                written += file.write(line)
                records, parent = records + 1, uuid
    return records


def _turn(turn: int, chance: random.Random, texts: list[str]) -> list[tuple[str, object]]:
    if turn % 20 == 1:
        return [("user", chance.choice(texts))]
    calls = [f"toolu_{turn}_{n}" for n in range(2 if turn % 5 == 0 else 1)]
    said = {"type": "text", "text": chance.choice(texts)[:400]}
    uses = [{"type": "tool_use", "id": c, "name": "Bash", "input": {"command": "ls " + c}} for c in calls]
    results = [{"type": "tool_result", "tool_use_id": c, "content": chance.choice(texts)} for c in calls]
    return [
        ("assistant", [said]),
        *(("assistant", [use]) for use in uses),
        *(("user", [result]) for result in results),
    ]


def read_steps(path: Path) -> int:
    """Read a session as a user of the library does; returns the number of steps."""
    from composer_core.plugins.settings import NoSettings
    from composer_core.traces.readers.claude_code import ClaudeCodeReader
    from composer_core.traces.stats import Tally

    return sum(1 for trace in ClaudeCodeReader(NoSettings()).read(path, Tally()) for _ in trace.steps)


def _loop(loads: Callable[[bytes], object], path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if loads(line))


def reading(folder: Path, *, quick: bool) -> Figure:
    """Our speed over that of a `json.loads` loop."""
    path = folder / "speed.jsonl"
    size, rounds = (15_000_000, 5) if quick else (60_000_000, 9)
    records = write_session(path, size)
    contenders: dict[str, Callable[[], int]] = {
        "json.loads loop": lambda: _loop(json.loads, path),
        "orjson.loads loop": lambda: _loop(orjson.loads, path),
        "traces, every step": lambda: read_steps(path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if number:  # the first round fills the file cache
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["json.loads loop"] / medians["traces, every step"]
    return {
        "figure": "reading a session, speed over a json.loads loop",
        "ratio": round(ratio, 3),
        "target": READING_TARGET,
        "met": ratio >= READING_TARGET,
        "peers": {f"{name} (MB/s)": round(path.stat().st_size / 1e6 / s, 1) for name, s in medians.items()},
        "n": records,
    }


def memory(folder: Path, *, quick: bool) -> Figure:
    """Peak memory of a process that reads one large session, over the target."""
    path = folder / "large.jsonl"
    records = write_session(path, 100_000_000 if quick else 1_000_000_000)
    # the peak that the kernel kept, not sampled: a spike between two samples would be missed
    code = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import data; "
        "data.read_steps(Path(sys.argv[1])); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    argv = [sys.executable, "-c", code, str(path), str(Path(__file__).parent)]
    peak = int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout) / 1024
    empty = folder / "empty.jsonl"
    empty.write_text("")
    argv[3] = str(empty)
    base = int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout) / 1024
    path.unlink()
    return {
        "figure": f"peak memory for a session of {'100 MB' if quick else '1 GB'}, over {MEMORY_TARGET_MB} MB",
        "ratio": round(peak / MEMORY_TARGET_MB, 3),
        "target": 1.0,
        "met": peak < MEMORY_TARGET_MB,
        "peers": {"peak (MB)": round(peak, 1), "the same with an empty file (MB)": round(base, 1)},
        "n": records,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller files, fewer rounds; under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for measure in (reading, memory, prepare, asking, cached):
            figure = measure(Path(folder), quick=options.quick)
            if options.json:
                print(json.dumps(figure), flush=True)
            else:
                met = "met" if figure["met"] else "MISSED"
                print(f"{figure['figure']}: {figure['ratio']} (target {figure['target']}: {met}) {figure['peers']}")


if __name__ == "__main__":
    main()
