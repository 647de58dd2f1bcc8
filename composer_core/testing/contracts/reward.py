# ruff: noqa: D102 - the name of a test is its sentence
"""What every reward must do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from composer_core.protocols import Reward


class RewardContract:
    """Give the fixture `reward`; override `completions` and `columns` where the defaults do not fit.

    `columns` is the data row every completion belongs to.
    """

    @pytest.fixture
    def completions(self) -> Sequence[str]:
        """Texts to score."""
        return ["Yes, please: 42", "no", "The answer is 7."]

    @pytest.fixture
    def columns(self) -> Mapping[str, Any]:
        """Columns the reward needs, with the value of one row."""
        return {}

    def test_gives_one_number_or_none_per_completion(
        self, reward: Reward, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> None:
        for some in (list(completions), list(completions[:1])):
            scores = _score(reward, some, columns)
            assert len(scores) == len(some)
            assert all(score is None or math.isfinite(score) for score in scores)

    def test_scores_chat_messages_like_their_text(
        self, reward: Reward, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> None:
        chats = [[{"role": "assistant", "content": completion}] for completion in completions]
        assert _score(reward, chats, columns) == _score(reward, list(completions), columns)

    def test_ignores_columns_it_does_not_know(
        self, reward: Reward, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> None:
        more = {**columns, "prompts": "Say something.", "unheard_of": {"nested": [1]}}
        assert _score(reward, list(completions), more) == _score(reward, list(completions), columns)

    def test_scores_an_empty_completion(self, reward: Reward, columns: Mapping[str, Any]) -> None:
        for empty in ("", [{"role": "assistant", "content": ""}]):
            (score,) = _score(reward, [empty], columns)
            assert score is None or math.isfinite(score)


def _score(reward: Reward, completions: list[Any], columns: Mapping[str, Any]) -> list[float | None]:
    return reward(completions, **{name: [value] * len(completions) for name, value in columns.items()})
