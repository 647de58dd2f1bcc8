"""A small batch with something for every part of `compose_loss`, to try it on a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Lesson:
    question: str
    answer: str
    hint: str
    better: str
    """What teachers would have answered."""


LESSONS: Mapping[str, _Lesson] = {
    "factorial": _Lesson(
        question="Write a Python function that computes n factorial.",
        answer="def factorial(n):\n    return n * factorial(n - 1)",
        hint="The call for 3 did not end: RecursionError. What stops it at 0?",
        better="def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    ),
    "binary_search": _Lesson(
        question="Write a Python function that finds x in a sorted list a, or gives -1.",
        answer="def find(a, x):\n    return a.index(x)",
        hint="find([1, 3], 2) raised ValueError, and it looked at every entry.",
        better=(
            "from bisect import bisect_left\n\ndef find(a, x):\n    i = bisect_left(a, x)\n"
            "    return i if i < len(a) and a[i] == x else -1"
        ),
    ),
}


def build_batch(
    tokenizer: Any,
    *,
    device: torch.device | str = "cpu",
    seed: int = 42,
    variant: str = "factorial",
    align_sdpo_shapes: bool = False,
) -> dict[str, Tensor]:
    """Inputs of `compose_loss`, one row each.

    The reference log-probs are made up, about 2 nats per token: they show that the parts fit together, not a training
    signal.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        device: of the tensors.
        seed: of the reference log-probs; the global generator is left alone.
        variant: `factorial` or `binary_search`.
        align_sdpo_shapes: pad student and teacher to one length; nothing is cut.

    Raises:
        ValueError: an unknown variant.
    """
    if variant not in LESSONS:
        raise ValueError(f"variant must be one of {', '.join(LESSONS)}, got {variant!r}")
    lesson = LESSONS[variant]
    hinted = f"{lesson.question}\n\n{lesson.hint}"
    rows = {
        ("input_ids", "response_mask"): _row(tokenizer, lesson.question, lesson.answer),
        ("ctx_teacher_input_ids", "sdpo_loss_mask"): _row(tokenizer, hinted, lesson.answer),
        ("dpo_chosen_input_ids", "dpo_chosen_response_mask"): _row(tokenizer, lesson.question, lesson.better),
        ("dpo_rejected_input_ids", "dpo_rejected_response_mask"): _row(tokenizer, lesson.question, lesson.answer),
    }
    aligned = [("input_ids", "response_mask"), ("ctx_teacher_input_ids", "sdpo_loss_mask")]
    longest = max(len(rows[keys][0]) for keys in aligned) if align_sdpo_shapes else 0
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    batch: dict[str, Tensor] = {}
    for keys, (ids, mask) in rows.items():
        missing = max(longest - len(ids), 0) if keys in aligned else 0
        for key, values, filler in zip(keys, (ids, mask), (pad or 0, 0), strict=True):
            batch[key] = torch.tensor([[*values, *[filler] * missing]], device=device)
    generator = torch.Generator().manual_seed(seed)
    for side in ("chosen", "rejected"):
        tokens = batch[f"dpo_{side}_response_mask"].sum(-1).cpu()
        batch[f"dpo_{side}_ref_logprobs"] = (-2 * tokens * (0.9 + 0.2 * torch.rand(1, generator=generator))).to(device)
    return batch


def _row(tokenizer: Any, question: str, answer: str) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids of a question and its answer, and 1 where the answer stands."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    answered = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        answered.append(tokenizer.eos_token_id)
    return [*asked, *answered], [0] * len(asked) + [1] * len(answered)
