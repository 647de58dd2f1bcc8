"""How fast rollouts become rows of the channel `sdpo`; `bench/data.py` prints the figures.

A rollout of 2,000 tokens gets one hint, of a text of its own, so every row tokenises one. One core, processor time:
it stays the same while other programs run. The built-in model's tokenizer has one token per character.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from composer_core.channels.hinting import Hinting
from composer_core.channels.settings import HintSettings
from composer_core.protocols import RolloutText, Row

ROWS_TARGET = 2000
"""Rows per second."""
TOKENS = 2000
HINT_CHARACTERS = 200
QUESTION = [{"role": "user", "content": "What goes wrong in this program? " * 6}]


def rollouts(tokenizer: Any, number: int) -> list[RolloutText]:
    """Failed rollouts with different hints."""
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = (tokenizer.encode("the answer is ", add_special_tokens=False) * TOKENS)[: TOKENS - len(prompt)]
    hints = [f"{index} of them, and so on; ".ljust(HINT_CHARACTERS, "x") for index in range(number)]
    columns = [{"prompt": QUESTION, "answer": hint} for hint in hints]
    action = [True] * len(answer)
    return [RolloutText(str(i), prompt, list(answer), action, 0.0, row, tokenizer) for i, row in enumerate(columns)]


def rows(hinting: Hinting, made: list[RolloutText]) -> list[Row | None]:
    return [hinting.row(rollout) for rollout in made]


def prepare(folder: Path, *, quick: bool) -> dict[str, object]:
    """Rows per second of the slowest way to place a hint, over the target."""
    from composer_core.hf.models import load_tokenizer
    from composer_core.hf.tiny import make_tiny

    make_tiny(folder / "tiny", seed=0)
    tokenizer = load_tokenizer(folder / "tiny")
    number, rounds = (200, 5) if quick else (1000, 9)
    made = rollouts(tokenizer, number)
    ways: dict[str, Callable[[], object]] = {
        f"at: {at}": partial(rows, Hinting(HintSettings(at=at), success=1.0), made)
        for at in ("turn", "prompt-end", "system")
    }
    ways["tokenizer alone, the hints"] = lambda: [
        tokenizer.encode(of.columns["answer"], add_special_tokens=False) for of in made
    ]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number_of_round in range(rounds + 1):
        for name, run in ways.items():
            start = time.process_time()
            run()
            if number_of_round:  # the first round finds the hint templates
                seconds[name].append(time.process_time() - start)
    per_second = {name: number / statistics.median(times) for name, times in seconds.items()}
    slowest = min(per_second.values())
    return {
        "figure": f"prepare of {TOKENS}-token rollouts, over {ROWS_TARGET} rows/s of one core",
        "ratio": round(slowest / ROWS_TARGET, 3),
        "target": 1.0,
        "met": slowest >= ROWS_TARGET,
        "peers": {f"{name} (rows/s)": round(rate) for name, rate in per_second.items()},
        "n": number,
    }
