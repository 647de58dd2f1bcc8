"""The core's own rewards. Each is made with its settings and called as `reward(completions, **columns)`.

A completion is a text or a list of chat messages; a column is a list with one value per completion. A score of None
means "does not apply", which is not 0. `build_rewards` makes a run's, each watched by `scoring.checked`.

To add one: settings in `plugins/builtin_settings.py`, a line in `plugins/builtin.py`, a class here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_core.data import answers
from composer_core.data.answers import completion_text
from composer_core.data.graders import SandboxedPython
from composer_core.data.python_file import load_function, needed_columns
from composer_core.data.scoring import CheckedReward, checked, users_line
from composer_core.errors import ComposerError, RunFailed
from composer_core.plugins.builtin_settings import (
    ContainsSettings,
    ExactMatchSettings,
    LengthSettings,
    PythonRewardSettings,
    RegexSettings,
)
from composer_core.plugins.contributions import Kind, RewardPlugin
from composer_core.plugins.registry import Registry
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.run.context import NamedReward
from composer_core.sandbox import Sandbox
from composer_core.spec.model import Plugged, RunSpec


class ExactMatch:
    """1 where the extracted answer equals the row's, else 0; None where the row has none."""

    def __init__(self, settings: ExactMatchSettings) -> None:
        self.settings = settings
        self._find = _finder(settings)

    def columns(self) -> tuple[str, ...]:
        """The column with the expected answer."""
        return (self.settings.answer,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score each completion against its row's answer."""
        return [
            None if answer is None else self._score(completion_text(completion), answer)
            for completion, answer in zip(completions, columns[self.settings.answer], strict=True)
        ]

    def _score(self, text: str, answer: Any) -> float:
        return float(answers.same_answer(self._find(text), answers.expected_answer(answer)))


def _finder(settings: ExactMatchSettings) -> Callable[[str], str | None]:
    if settings.pattern is not None:
        return answers.last_group(settings.pattern)
    return {
        "boxed": answers.last_boxed,
        "hash": answers.after_mark,
        "last-number": answers.last_number,
        "whole": answers.whole,
    }[settings.extract]


class Contains:
    """1 where the completion contains the text, or its row's; else 0; None where the row has none."""

    def __init__(self, settings: ContainsSettings) -> None:
        self.settings = settings

    def columns(self) -> tuple[str, ...]:
        """The column with the text to look for, if it is not the same for all."""
        return () if self.settings.column is None else (self.settings.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Look for the text in each completion."""
        column = self.settings.column
        wanted = [self.settings.text] * len(completions) if column is None else columns[column]
        return [
            None if text is None else float(self._fold(str(text)) in self._fold(completion_text(completion)))
            for completion, text in zip(completions, wanted, strict=True)
        ]

    def _fold(self, text: str) -> str:
        return text.casefold() if self.settings.ignore_case else text


class Regex:
    """How much of the completion matches a pattern, from 0 to 1."""

    def __init__(self, settings: RegexSettings) -> None:
        self.settings = settings
        self._pattern = re.compile(settings.pattern)

    def columns(self) -> tuple[str, ...]:
        """None: the pattern is the same for all rows."""
        return ()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score each completion by itself."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        if self.settings.score == "any":
            return float(self._pattern.search(text) is not None)
        if self.settings.score == "whole":
            return float(self._pattern.fullmatch(text) is not None)
        matched = sum(match.end() - match.start() for match in self._pattern.finditer(text))
        return matched / len(text) if text else 0.0


class Length:
    """1 at the target length, falling linearly to 0 at the tolerance."""

    def __init__(self, settings: LengthSettings) -> None:
        self.settings = settings

    def columns(self) -> tuple[str, ...]:
        """None: the target is the same for all rows."""
        return ()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score each completion by itself."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        length = len(text) if self.settings.unit == "characters" else len(text.split())
        return max(0.0, 1 - abs(length - self.settings.target) / self.settings.tolerance)


class PythonReward:
    """Calls the function as TRL does: everything by keyword, so it runs there unchanged."""

    def __init__(self, settings: PythonRewardSettings) -> None:
        file, _, name = settings.function.rpartition(":")
        path = Path(file).expanduser()
        self._function = load_function(path, name)
        self._columns = needed_columns(inspect.signature(self._function), name, at=str(path))

    def columns(self) -> tuple[str, ...]:
        """The parameters without a default: the function cannot be called without them."""
        return self._columns

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """What the function returns, as it is; `checked` looks at it."""
        return self._function(completions=completions, **columns)  # type: ignore[no-any-return]


def python_reward(settings: PythonRewardSettings, *, sandbox: Sandbox | None = None) -> PythonReward | SandboxedPython:
    """The function in this process, or in a sandbox where there is one."""
    return PythonReward(settings) if sandbox is None else SandboxedPython(settings, sandbox=sandbox)


# -- a run's rewards ---------------------------------------------------------------------------------------------------


def build_rewards(spec: RunSpec, registry: Registry) -> list[NamedReward]:
    """Load and make all rewards of a spec, in its order, under unique names.

    Raises:
        ComposerError: one is not installed, or cannot be made with its settings.
    """
    return [build_reward(name, plugged, registry=registry) for name, plugged in named(spec.data.rewards)]


def build_reward(name: str, plugged: Plugged, *, registry: Registry) -> NamedReward:
    """Load and make one reward.

    Raises:
        ComposerError: it is not installed, or cannot be made with its settings.
    """
    owner, contribution = registry.get(Kind.REWARD, plugged.use)
    assert isinstance(contribution, RewardPlugin)
    make = contribution.load()
    try:
        asked = contribution.sandbox(plugged.settings)
        sandbox = {} if asked is None else {"sandbox": make_sandbox(asked, registry)}
        reward = make(plugged.settings, **sandbox)
    except ComposerError:
        raise
    except Exception as error:  # a plugin's constructor may raise anything
        problem = f"reward {name!r} of {owner} cannot be made: {type(error).__name__}: {error}"
        raise RunFailed(problem, at=users_line(error)) from error
    return checked(name, plugged.weight, reward)


def make_sandbox(settings: SandboxSettings, registry: Registry) -> Sandbox:
    """The sandbox that a block names.

    Raises:
        ComposerError: it is not installed, does not work here, or cannot have these settings.
    """
    _, contribution = registry.get(Kind.SANDBOX, settings.use)
    made: Sandbox = contribution.load()(settings)
    return made


def named(rewards: Sequence[Plugged]) -> Iterator[tuple[str, Plugged]]:
    """Each reward with a name of its own: `python`, `python-2`, ..."""
    taken: set[str] = set()
    for plugged in rewards:
        name, number = plugged.name, 1
        while name in taken:
            number += 1
            name = f"{plugged.name}-{number}"
        taken.add(name)
        yield name, plugged


def columns_needed(rewards: Sequence[NamedReward]) -> Mapping[str, str]:
    """Column -> who needs it, for `load_prompts`."""
    needed: dict[str, str] = {}
    for reward in rewards:
        if isinstance(reward.score, CheckedReward):
            for column in reward.score.columns():
                needed.setdefault(column, f"reward {reward.name!r}")
    return needed
