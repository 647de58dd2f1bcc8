"""A reward needs nothing but this call."""

from __future__ import annotations

from typing import Any

from composer_core.plugins.settings import NoSettings


class Polite:
    """1 when the answer says please, else 0."""

    def __init__(self, settings: NoSettings) -> None:
        pass

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """Score texts, or lists of chat messages by their last one."""
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [float("please" in text.lower()) for text in texts]
