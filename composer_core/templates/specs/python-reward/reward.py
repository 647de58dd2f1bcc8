"""Rewards for spec.yaml: each takes the completions and the columns of their rows, and gives one number each."""

from typing import Any


def share_of_digits(completions: list[Any], **columns: Any) -> list[float | None]:
    """The share of an answer's characters that are digits; 0 for an empty one."""
    return [sum(character.isdigit() for character in text(c)) / max(1, len(text(c))) for c in completions]


def near_target(completions: list[Any], target: list[int | None], **columns: Any) -> list[float | None]:
    """1 when the answer is as long as the row's `target` says, less the further away; None where there is none."""
    return [
        None if wanted is None else 1 / (1 + abs(len(text(completion)) - wanted))
        for completion, wanted in zip(completions, target, strict=True)
    ]


def text(completion: Any) -> str:
    """A completion is a text, or a list of chat messages whose last one is the answer."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])
