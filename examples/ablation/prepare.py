"""What the runs of one seed start from: a folder with the model, the prompts and three files of preference pairs.

    model/                    the start model (`sft.py`)
    prompts.jsonl             one row per secret key, with a column for each kind of hint
    pairs.jsonl               recorded answers of the start model against a teacher that is right 9 times in 10
    half-pairs.jsonl          the same for the second half of the keys; column `half_hint` has the first half
    never-right-pairs.jsonl   against a teacher that is never right

The pairs come out of the product's own replay: a scripted teacher is asked about every recorded answer, an answer that
differs from it makes a pair, and the start model's log-probs are stored with it. A folder is made once and then reused.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from sft import write_start_model
from task import ANSWER_TOKENS, VALUES, Task, hint, make_task, question

from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.plugins.teacher_settings import ScriptedSettings
from composer_core.teachers.database import Database
from composer_core.teachers.pairs import Pair, extract_pairs, save_pairs
from composer_core.teachers.reference import with_reference
from composer_core.teachers.replay import replay_trace
from composer_core.teachers.scripted import ScriptedTeacher
from composer_core.testing.sampling import sample
from composer_core.traces.model import TraceState

ANSWERS_PER_KEY = 32
"""Recorded answers of the start model, each shown to the teacher once."""
TEACHER_RIGHT = 0.9


def prepare(folder: Path, *, seed: int) -> None:
    """Make the folder, or leave a finished one as it is."""
    if folder.is_dir():
        return
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    part.mkdir(parents=True)
    task = make_task(seed)
    write_start_model(part / "model", task, seed=seed)
    fill(part, task, seed=seed)
    try:
        part.rename(folder)
    except OSError:  # another process was faster: the same seed makes the same folder
        shutil.rmtree(part)


def fill(folder: Path, task: Task, *, seed: int) -> None:
    """Everything beside the model, which must be there."""
    rng = random.Random(f"data-{seed}")
    rows = prompt_rows(task, rng)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    states = recorded_states(folder / "model", task, seed=seed)
    pairs = ask(folder, states, _said(states, task, rng, right=TEACHER_RIGHT), name="teacher")
    half = list(task.secrets)[len(task.secrets) // 2 :]
    save_pairs(pairs, folder / "pairs.jsonl")
    save_pairs([pair for pair in pairs if _key(pair) in half], folder / "half-pairs.jsonl")
    wrong = ask(folder, states, _said(states, task, rng, right=0.0), name="never-right")
    save_pairs(wrong, folder / "never-right-pairs.jsonl")


def prompt_rows(task: Task, rng: random.Random) -> list[dict[str, str | None]]:
    """Rows of prompts.jsonl: what a run asks, what is right, and what each kind of hint says (null: nothing)."""
    hinted = list(task.secrets)[: len(task.secrets) // 2]
    rows: list[dict[str, str | None]] = []
    for key, value in task.secrets.items():
        told = hint("full", value, rng)
        rows.append(
            {
                "prompt": question(key),
                "answer": value,
                "hint": told,
                "half_hint": told if key in hinted else None,
                "wrong_hint": hint("full", _other(value, rng), rng),
                "void_hint": hint("void", value, rng),
            }
        )
    return rows


def recorded_states(model: Path, task: Task, *, seed: int) -> list[TraceState]:
    """What the start model answers when it is asked each secret key `ANSWERS_PER_KEY` times."""
    tokenizer = load_tokenizer(model)
    asked = [key for key in task.secrets for _ in range(ANSWERS_PER_KEY)]
    prompts: list[str | list[dict[str, Any]]] = [[{"role": "user", "content": question(key)}] for key in asked]
    answers = sample(
        load_policy(model, dtype="float32"),
        tokenizer,
        prompts,
        limit=ANSWER_TOKENS,
        temperature=1.0,
        generator=torch.Generator().manual_seed(seed),
    )
    return [
        TraceState(
            state_id=f"{key}::{number:04d}",
            messages=[{"role": "user", "content": question(key)}],
            action={"role": "assistant", "content": answer.text},
            step=number,
        )
        for number, (key, answer) in enumerate(zip(asked, answers, strict=True))
    ]


def _said(states: Sequence[TraceState], task: Task, rng: random.Random, *, right: float) -> dict[str, str]:
    """State -> the teacher's answer: right with this probability, else some other value."""
    values = {state.state_id: task.secrets[state.state_id[0]] for state in states}
    return {name: value if rng.random() < right else _other(value, rng) for name, value in values.items()}


def ask(folder: Path, states: Sequence[TraceState], said: Mapping[str, str], *, name: str) -> list[Pair]:
    """Ask a teacher that follows a script, and make pairs of its answers."""
    script = folder / f"{name}-answers.jsonl"
    lines = [{"state_id": key, "message": {"role": "assistant", "content": value}} for key, value in said.items()]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    file = folder / "teachers.sqlite"
    teacher: Any = ScriptedTeacher(ScriptedSettings(path=str(script)))
    answers = asyncio.run(replay_trace(states, {name: teacher}, database=file))
    pairs, _ = extract_pairs(states, answers, agreement=1)
    with closing(Database(file)) as database:
        scored, dropped = with_reference(pairs, folder / "model", database, name="start model")
    assert not dropped, dropped
    return scored


def _other(value: str, rng: random.Random) -> str:
    return rng.choice([other for other in VALUES if other != value])


def _key(pair: Pair) -> str:
    return pair.state_id[0]
