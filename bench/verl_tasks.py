"""What the engines in `bench/verl.py` train on: models made on the spot, and a batch of random tokens for each.

All rollouts of a task are equally long and so are all sides of its pairs: nothing is padded, and a figure per token
means what it says. Engines stand in `verl_contenders.py`; to add a task, write a function like `tiny`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.hf.tiny import make_tiny, tiny_tokenizer
from composer_core.protocols import RolloutText, Row

FIRST_ID = 8
"""The tiny tokenizer's tokens below it are special."""


@dataclass(frozen=True)
class Task:
    """A model's folder, and how long what it reads is, in tokens."""

    folder: Path
    vocabulary: int
    prompts: int
    group: int
    """Rollouts of each prompt; all are of one micro-batch."""
    prompt: int
    response: int
    hint: int
    pairs: int
    answer: int
    """Of each side of a pair, behind a prompt."""

    @property
    def tokens(self) -> int:
        """N, of all rollouts."""
        return self.prompts * self.group * (self.prompt + self.response)

    @property
    def hinted(self) -> int:
        """K: every token of every response."""
        return self.prompts * self.group * self.response

    @cached_property
    def batch(self) -> Batch:
        """The same whenever it is asked for."""
        return _batch(self)


@dataclass(frozen=True)
class Batch:
    """What was sampled, and what channels hold of it."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    hinted: Sequence[Row]
    pairs: Sequence[Row]


def tiny(folder: Path) -> Task:
    """The built-in model, 64 completions of 16 tokens, 8 pairs."""
    make_tiny(folder / "tiny", seed=0)
    return Task(
        folder / "tiny",
        len(tiny_tokenizer()),
        prompts=4,
        group=16,
        prompt=5,
        response=16,
        hint=36,
        pairs=8,
        answer=16,
    )


def small(folder: Path) -> Task:
    """Qwen3 with 36 million random weights, 4 completions of 128 tokens, 2 pairs."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    made = _qwen3(folder / "small", vocabulary=32_000, **sizes)
    return Task(made, 32_000, prompts=1, group=4, prompt=32, response=128, hint=32, pairs=2, answer=96)


def wide(folder: Path) -> Task:
    """Nearly nothing but a vocabulary of 32,000: a tensor (N, V) is 131 MB, all weights are 8."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = _qwen3(folder / "wide", vocabulary=32_000, **sizes)
    return Task(made, 32_000, prompts=2, group=4, prompt=8, response=120, hint=8, pairs=2, answer=24)


def _qwen3(folder: Path, *, vocabulary: int, **sizes: int) -> Path:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _batch(task: Task) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(FIRST_ID, task.vocabulary, (length,), generator=generator).tolist()

    hint, prompts = text(task.hint), [own for _ in range(task.prompts) for own in [text(task.prompt)] * task.group]
    responses = [text(task.response) for _ in prompts]
    pairs = [
        pair_row(text(task.prompt), text(task.answer), text(task.answer), reference=(-30.0, -30.0))
        for _ in range(task.pairs)
    ]
    return Batch(prompts, responses, [_hinted(p, r, hint) for p, r in zip(prompts, responses, strict=True)], pairs)


def _hinted(prompt: Sequence[int], response: Sequence[int], hint: Sequence[int]) -> Row:
    student = range(len(prompt), len(prompt) + len(response))
    segment = Segment([*prompt, *hint, *response], student, [at + len(hint) for at in student])
    row = pack([segment], RolloutText("", prompt, response, [True] * len(response), 0.0))
    assert row is not None
    return row
