"""The core's own rewards pass the suite."""

import pytest

from composer_core.data.rewards import Contains, ExactMatch, Length, PythonReward, Regex
from composer_core.plugins.builtin_settings import (
    ContainsSettings,
    ExactMatchSettings,
    LengthSettings,
    PythonRewardSettings,
    RegexSettings,
)
from composer_core.testing.contracts import RewardContract


class TestExactMatch(RewardContract):
    @pytest.fixture(params=["last-number", "boxed", "hash", "whole"])
    def reward(self, request):
        return ExactMatch(ExactMatchSettings(extract=request.param))

    @pytest.fixture
    def columns(self):
        return {"answer": "42"}


class TestContains(RewardContract):
    @pytest.fixture
    def reward(self):
        return Contains(ContainsSettings(text="please"))


class TestContainsAColumn(RewardContract):
    @pytest.fixture
    def reward(self):
        return Contains(ContainsSettings(column="wanted"))

    @pytest.fixture
    def columns(self):
        return {"wanted": "answer"}


class TestRegex(RewardContract):
    @pytest.fixture(params=["share", "any", "whole"])
    def reward(self, request):
        return Regex(RegexSettings(pattern="[0-9]+", score=request.param))


class TestLength(RewardContract):
    @pytest.fixture(params=["characters", "words"])
    def reward(self, request):
        return Length(LengthSettings(target=3, tolerance=5, unit=request.param))


class TestPython(RewardContract):
    @pytest.fixture
    def reward(self, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text(
            "def polite(completions, **columns):\n"
            "    texts = [c if isinstance(c, str) else c[-1]['content'] for c in completions]\n"
            "    return [1.0 if 'please' in text else None for text in texts]\n"
        )
        return PythonReward(PythonRewardSettings(function=f"{file}:polite"))
