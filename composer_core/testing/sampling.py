"""Sampling and scoring of the toy trainer: completions of a causal LM, token by token, and their rewards.

No key-value cache: every token reads the whole text again, which is a few milliseconds on a tiny model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from composer_core.data.scoring import weigh
from composer_core.run.context import NamedReward
from composer_core.run.metrics import eval_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Completion:
    """What was generated after one prompt."""

    prompt_ids: list[int]
    ids: list[int]
    """With the end token, where it came."""
    text: str
    """Without special tokens."""
    truncated: bool
    """It hit the length limit."""


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    limit: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Completion]:
    """One completion of at most `limit` tokens per prompt; leaves the policy in eval mode."""
    prompt_ids = [_ids(tokenizer, prompt) for prompt in prompts]
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    everyone = torch.arange(len(prompts))
    # right-padded and grown in place, so that positions count from 0 without further ado
    ids = torch.full((len(prompts), int(lengths.max()) + limit), tokenizer.pad_token_id)
    for i, prompt in enumerate(prompt_ids):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    policy.train(False)
    for _ in range(limit):
        width = int(lengths.max())
        mask = torch.arange(width)[None, :] < lengths[:, None]
        logits = policy(input_ids=ids[:, :width], attention_mask=mask.long(), use_cache=False).logits
        scores = logits[everyone, lengths - 1].float() / temperature
        tokens = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)
        going = ~ended
        ids[everyone[going], lengths[going]] = tokens[going]
        lengths = lengths + going.long()
        ended = ended | (tokens == tokenizer.eos_token_id)
        if ended.all():
            break
    completions = [ids[i, len(p) : int(lengths[i])].tolist() for i, p in enumerate(prompt_ids)]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [Completion(*parts) for parts in zip(prompt_ids, completions, texts, (~ended).tolist(), strict=True)]


def score(
    rewards: Sequence[NamedReward], rows: Sequence[Mapping[str, Any]], completions: Sequence[Completion]
) -> dict[str, list[float | None]]:
    """Each reward's scores, called as TRL calls it: a chat's completion is a list with one assistant message."""
    answers: list[Any] = [
        completion.text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": completion.text}]
        for row, completion in zip(rows, completions, strict=True)
    ]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    given = {"prompts": [row["prompt"] for row in rows], "completion_ids": [c.ids for c in completions]}
    return {reward.name: reward.score(answers, **given, **columns) for reward in rewards}


def evaluate(
    complete: Callable[[list[Prompt]], list[Completion]],
    rewards: Sequence[NamedReward],
    rows: Sequence[Mapping[str, Any]],
    *,
    batch: int,
) -> dict[str, float]:
    """Metrics under `eval/` of one completion per row, generated `batch` at a time; a score that does not apply is
    left out of its mean.
    """
    scores: dict[str, list[float | None]] = {reward.name: [] for reward in rewards}
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        for name, values in score(rewards, part, complete([row["prompt"] for row in part])).items():
            scores[name] += values
    return eval_metrics(scores, [weigh(rewards, scores, index=i) for i in range(len(rows))])


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
