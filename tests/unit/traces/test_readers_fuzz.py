"""Damaged files: no reader ever raises, and every line of a JSONL file is a record or is counted as none."""

from __future__ import annotations

import json
import random

import pytest
from trace_files import DATA, EXPECTED, read

from composer_core.traces.convert import to_atif
from composer_core.traces.messages import to_messages
from composer_core.traces.states import states

JUNK = (None, True, -1, 1.5, 2**70, "", "x", [], {}, [None], {"type": []}, [[]], {"role": {}})
FILES = {  # one of each layout, small enough to be damaged often
    "claude-code/cc-1.0-edge-cases.jsonl": "lines",
    "claude-code/cc-2.1.14-coverage-fix.jsonl": "lines",
    "claude-code/cc-2.1.29-all-errors-agent.jsonl": "lines",
    "codex/rollout-2026-sample.jsonl": "lines",
    "openai-chat/plain-conversations.jsonl": "lines",
    "atif/openhands_hello-world.trajectory.json": "document",
    "atif/login-trace.trajectory.json": "document",
    "swe-agent/test-repo-i1.traj": "document",
    "mini-swe-agent/github_issue.traj.json": "document",
    "openhands/basic.json": "document",
    "inspect/log_tool_call_error.json": "document",
    "inspect/log_images_tc.json": "document",
    "openai-chat/glaive-toolcall-sharegpt.json": "document",
}


def damage(value, chance):
    """One place of a JSON value, replaced, removed, or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(sorted(value))
        what = chance.random()
        if what < 0.15:
            return {other: item for other, item in value.items() if other != key}
        if what < 0.4:
            return {**value, key: chance.choice(JUNK)}
        return {**value, key: damage(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        what = chance.random()
        if what < 0.15:
            return value[:at] + value[at + 1 :]
        if what < 0.3:
            return value[: at + 1] + value[at:]
        return [*value[:at], damage(value[at], chance), *value[at + 1 :]]
    return chance.choice(JUNK)


def damage_line(line, chance):
    """A line as a crash, a merge or a strange writer might leave it."""
    what = chance.random()
    if what < 0.08:
        return line[: chance.randrange(len(line))]
    if what < 0.12:
        return bytes(chance.randrange(256) for _ in range(20)).replace(b"\n", b"")
    if what < 0.14:
        return b"[" * 3000
    return json.dumps(damage(json.loads(line), chance)).encode()


def check(path, format):
    """Read everything there is to read of a file, and what may be made of it."""
    traces, tally = read(path, format)
    for trace in traces:
        steps = list(trace.steps)
        json.dumps(to_messages(steps), ensure_ascii=False).encode()
        assert sum(1 for _ in states(trace, max_history_tokens=100)) <= len(steps)
        to_atif(trace)
    return tally


def damaged_lines(count, seed, folder):
    """Damage `count` lines of each JSONL file and compare the count of what was read."""
    chance = random.Random(seed)
    for name in [name for name, kind in FILES.items() if kind == "lines"]:
        lines = [line for line in (DATA / name).read_bytes().splitlines() if line.strip()]
        good = [line for line in lines if _is_json(line)]
        for start in range(0, count, len(good)):
            made = [damage_line(line, chance) for line in good[: count - start]]
            (folder / "f.jsonl").write_bytes(b"\n".join(made))
            tally = check(folder / "f.jsonl", EXPECTED[name]["format"])
            assert tally.records + tally.malformed_lines == sum(bool(line.strip()) for line in made), name


def damaged_documents(count, seed, folder):
    """Damage each document `count` times, a few places at once."""
    chance = random.Random(seed)
    for name in [name for name, kind in FILES.items() if kind == "document"]:
        value = json.loads((DATA / name).read_bytes())
        for _ in range(count):
            worse = value
            for _ in range(chance.randint(1, 4)):
                worse = damage(worse, chance)
            (folder / "f.json").write_text(json.dumps(worse))
            check(folder / "f.json", EXPECTED[name]["format"])


def _is_json(line):
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_300_damaged_records_are_read_or_counted(tmp_path):
    damaged_lines(40, seed=1, folder=tmp_path)
    damaged_documents(15, seed=1, folder=tmp_path)


@pytest.mark.slow
def test_10000_damaged_records_are_read_or_counted(tmp_path):
    damaged_lines(1600, seed=2, folder=tmp_path)
    damaged_documents(250, seed=2, folder=tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_point_never_raises(name, tmp_path):
    content = (DATA / name).read_bytes()
    path = tmp_path / "cut.jsonl"
    for at in range(0, len(content), max(1, len(content) // 12)):
        path.write_bytes(content[:at])
        check(path, EXPECTED[name]["format"])
