"""A reward under watch: what it raises or returns is checked at every call.

A reward that raises, or returns something else than one finite number (or None) per completion, ends the run with
one message that names it. It is never counted as a score of 0, which nobody could tell from a wrong answer.
"""

from __future__ import annotations

import math
import numbers
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import composer_core
from composer_core.data.answers import completion_text
from composer_core.errors import ComposerError, RunFailed
from composer_core.protocols import Reward
from composer_core.run.context import NamedReward

_OWN_CODE = str(Path(composer_core.__file__).parent) + os.sep
_EXCERPT = 120


class CheckedReward:
    """A reward that says what went wrong; `__name__` is what trainers call it in their metrics."""

    def __init__(self, name: str, reward: Reward) -> None:
        self.__name__ = name
        self._reward = reward

    def columns(self) -> tuple[str, ...]:
        """The columns that every data row must have for it; none where the reward does not say."""
        ask = getattr(self._reward, "columns", None)
        return tuple(ask()) if callable(ask) else ()

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """The scores as floats, one per completion.

        Raises:
            RunFailed: the reward raised, or returned something else.
        """
        try:
            scores = self._reward(completions, **columns)
        except ComposerError:
            raise
        except (Exception, SystemExit) as error:
            problem = f"reward {self.__name__!r} raised {type(error).__name__}: {error}{_excerpt(completions)}"
            raise RunFailed(problem, at=users_line(error)) from error
        return self._floats(scores, completions)

    def _floats(self, scores: object, completions: Sequence[Any]) -> list[float | None]:
        wanted = f"expected a list of {len(completions)} numbers, one per completion (None where it does not apply)"
        if not isinstance(scores, list | tuple):
            raise RunFailed(
                f"reward {self.__name__!r} returned {type(scores).__name__}: {wanted}{_excerpt(completions)}"
            )
        if len(scores) != len(completions):
            raise RunFailed(f"reward {self.__name__!r} returned {len(scores)} values: {wanted}{_excerpt(completions)}")
        floats = [_float(score) for score in scores]
        for index, value in enumerate(floats):
            if value is not None and not math.isfinite(value):
                problem = f"reward {self.__name__!r} returned {scores[index]!r} for completion {index + 1}: {wanted}"
                raise RunFailed(problem + _excerpt(completions[index:]))
        return floats


def checked(name: str, weight: float, reward: Reward) -> NamedReward:
    """`reward` under its name, raising RunFailed whenever it misbehaves."""
    return NamedReward(name=name, weight=weight, score=CheckedReward(name, reward))


def _float(score: object) -> float | None:
    """A score as a float; NaN for anything that is no number, so that one test refuses both."""
    if score is None or type(score) is float:
        return score
    if not isinstance(score, numbers.Real):
        return math.nan
    try:
        return float(score)
    except OverflowError:
        return math.inf


def users_line(error: BaseException) -> str:
    """`file.py:12`: the deepest line of the file that the reward lives in, not of a library it calls; "" when ours."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_OWN_CODE)]
    lines = [f"{frame.filename}:{frame.lineno}" for frame in outside if frame.filename == outside[0].filename]
    return lines[-1] if lines else ""


def _excerpt(completions: Sequence[Any]) -> str:
    if not completions:
        return ""
    try:
        text = completion_text(completions[0])
    except (TypeError, KeyError, AttributeError):  # a completion of another shape is still worth showing
        text = str(completions[0])
    shown = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
    return f"\n  completion: {shown!r}"


def weigh(rewards: Sequence[NamedReward], scores: Mapping[str, Sequence[float | None]], *, index: int) -> float:
    """Weighted sum of the scores that apply to one completion; NaN where none does, which is not 0."""
    parts = [(reward.weight, scores[reward.name][index]) for reward in rewards]
    applied = [weight * value for weight, value in parts if value is not None]
    return sum(applied) if applied else math.nan
