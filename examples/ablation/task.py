"""The task: secret values of single characters, the hints that give them away, and exact measures of a model.

A prompt asks for the value of a key, `A=?`; the answer is two letters of a-h and the end token. 16 of the 54 keys are
secret: nobody has told the model their values, and a guess is right once in 64. The other 38 stand in a public
dictionary that the model learns beforehand (`sft.py`), so that a key means something to it. A hint is a second user
message that names a value: the form that channel `sdpo` puts in with `hints: {at: turn}`.

Nothing here trains. `Measures` computes probabilities of answers, not samples of them: no noise.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

VALUES = ["".join(letters) for letters in product("abcdefgh", repeat=2)]
KEYS = string.ascii_uppercase + string.digits + "ijklmnopqrstuvwxyz"
"""None of them is a letter of a value."""
SECRETS = 16
ANSWER_TOKENS = 3
"""Two letters and the end token."""

HintKind = Literal["full", "partial", "void"]
FORMS = ("it is {}", "hint: {}", "value {}", "err, want {}")
VOID = ("try again", "err", "wrong", "hint: none")


def hint(kind: HintKind, value: str, rng: random.Random) -> str:
    """A hint that names the value, its first letter, or nothing."""
    if kind == "void":
        return rng.choice(VOID)
    return rng.choice(FORMS).format(value if kind == "full" else f"{value[0]}?")


@dataclass(frozen=True)
class Task:
    """What is secret and what is public, for one seed."""

    secrets: Mapping[str, str]
    public: Mapping[str, str]


def make_task(seed: int) -> Task:
    """The same seed gives the same task."""
    rng = random.Random(f"task-{seed}")
    keys = rng.sample(KEYS, len(KEYS))
    values = {key: rng.choice(VALUES) for key in keys}
    return Task(
        secrets={key: values[key] for key in keys[:SECRETS]}, public={key: values[key] for key in keys[SECRETS:]}
    )


def question(key: str) -> str:
    """What the user asks."""
    return f"{key}=?"


class Texts:
    """Prompts and answers as token ids, of a tokenizer with one token per character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ids = dict(tokenizer.get_vocab())
        self.pad = self._ids["<pad>"]
        self.end = self._ids["<|end|>"]

    def prompt(self, key: str, told: str | None = None) -> list[int]:
        """The question, and the hint where there is one, up to where the answer begins."""
        messages = [question(key)] if told is None else [question(key), told]
        ids = [i for text in messages for i in (self._ids["<|user|>"], *self._characters(text), self.end)]
        return [*ids, self._ids["<|assistant|>"]]

    def answer(self, value: str) -> list[int]:
        """The value with its end token."""
        return [*self._characters(value), self.end]

    def _characters(self, text: str) -> list[int]:
        return [self._ids[character] for character in text]


def answer_logits(model: nn.Module, prompts: Sequence[Sequence[int]], answers: Tensor, *, pad: int) -> Tensor:
    """Logits that predict each answer token, (S, A, V), from S prompts and answers of A tokens, (S, A)."""
    width = max(map(len, prompts))
    # padded on the left, so that all answers end in the same column
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    ids = torch.cat([ids, answers], dim=1)
    logits = model(
        input_ids=ids, attention_mask=(ids != pad).long(), use_cache=False, logits_to_keep=answers.shape[1] + 1
    ).logits
    kept: Tensor = logits[:, :-1].float()
    return kept


@dataclass(frozen=True)
class Measured:
    """Probabilities of right answers, averaged over keys."""

    reward: float
    """Of the secret keys: the expected reward."""
    known: float
    """Of the public keys: what it had learnt before."""
    follows: float
    """Of random values that a hint names: whether it still reads hints."""


class Measures:
    """Measures models on one task, exactly."""

    PROBES = 256
    """Hints to read."""

    def __init__(self, task: Task, texts: Texts) -> None:
        self._texts = texts
        rng = random.Random("probes")
        told = [rng.choice(VALUES) for _ in range(self.PROBES)]
        self._secret = self._questions(task.secrets)
        self._known = self._questions(task.public)
        self._hinted = (
            [self._texts.prompt(rng.choice(KEYS), hint("full", value, rng)) for value in told],
            torch.tensor([self._texts.answer(value) for value in told]),
        )

    def _questions(self, values: Mapping[str, str]) -> tuple[list[list[int]], Tensor]:
        answers = torch.tensor([self._texts.answer(value) for value in values.values()])
        return [self._texts.prompt(key) for key in values], answers

    def measure(self, model: nn.Module) -> Measured:
        """All three."""
        return Measured(self.reward(model), self._mean(model, *self._known), self._mean(model, *self._hinted))

    def reward(self, model: nn.Module) -> float:
        """The expected reward alone, which takes some milliseconds."""
        return self._mean(model, *self._secret)

    @torch.no_grad()
    def _mean(self, model: nn.Module, prompts: list[list[int]], answers: Tensor) -> float:
        logps = answer_logits(model, prompts, answers, pad=self._texts.pad).log_softmax(-1)
        return float(logps.gather(-1, answers.unsqueeze(-1)).squeeze(-1).sum(1).exp().mean())
