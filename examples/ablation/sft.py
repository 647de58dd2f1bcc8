"""The start model: the built-in tiny model, taught to know a dictionary and to read hints. Half a minute a seed.

    40 %  no hint: a public key gets its value, a secret one a random value (so it learns the form, and to guess)
    35 %  a hint that names a random value: the hint wins over the dictionary
    13 %  a hint that names the first letter only
    12 %  a hint without information: as without a hint

Plain cross-entropy on the answer: what comes before the runs that are compared, and not part of them. The same seed
gives the same weights on the same machine and torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from task import KEYS, VALUES, Task, Texts, answer_logits, hint

STEPS, BATCH, WARMUP = 600, 128, 50
LEARNING_RATE, LOWEST_SHARE = 2e-3, 0.05
ABOUT_PUBLIC_KEYS = 0.6


def write_start_model(folder: Path, task: Task, *, seed: int, steps: int = STEPS) -> None:
    """Train and save the model as a Hugging Face folder, which must be empty or missing."""
    from composer_core.hf.models import load_policy, load_tokenizer
    from composer_core.hf.tiny import make_tiny

    make_tiny(folder, seed=seed)
    tokenizer = load_tokenizer(folder)
    model = load_policy(folder, dtype="float32")
    teach(model, task, Texts(tokenizer), seed=seed, steps=steps)
    model.save_pretrained(folder)


def teach(model: torch.nn.Module, task: Task, texts: Texts, *, seed: int, steps: int) -> None:
    """The loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * max(LOWEST_SHARE, 1 - step / steps)
    )
    examples = _examples(task, texts, random.Random(f"sft-{seed}"))
    model.train()
    for _ in range(steps):
        prompts, answers = zip(*(next(examples) for _ in range(BATCH)), strict=True)
        target = torch.tensor(answers)
        logits = answer_logits(model, prompts, target, pad=texts.pad)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _examples(task: Task, texts: Texts, rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) without end."""
    secret, public = list(task.secrets), list(task.public)
    assert len(secret) + len(public) == len(KEYS)
    while True:
        key = rng.choice(public if rng.random() < ABOUT_PUBLIC_KEYS else secret)
        guess = rng.choice(VALUES)
        remembered = task.public.get(key, guess)
        kind = rng.random()
        if kind < 0.40:
            yield texts.prompt(key), texts.answer(remembered)
        elif kind < 0.75:
            yield texts.prompt(key, hint("full", guess, rng)), texts.answer(guess)
        elif kind < 0.88:
            yield texts.prompt(key, hint("partial", guess, rng)), texts.answer(guess)
        else:
            yield texts.prompt(key, hint("void", guess, rng)), texts.answer(remembered)
