from __future__ import annotations

import textwrap
import time
from types import SimpleNamespace

import numpy
import pytest

from composer_core.data.rewards import Contains, ExactMatch, Length, PythonReward, Regex, build_rewards, columns_needed
from composer_core.data.scoring import checked
from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.plugins.builtin_settings import (
    ContainsSettings,
    ExactMatchSettings,
    LengthSettings,
    PythonRewardSettings,
    RegexSettings,
)
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Registry
from composer_core.plugins.settings import NoSettings
from composer_core.spec.model import Plugged


def chat(text):
    return [{"role": "assistant", "content": text}]


# -- the built-in ones -------------------------------------------------------------------------------------------------


def test_exact_match_finds_gsm8k_answers_in_texts_and_chats():
    reward = ExactMatch(ExactMatchSettings())
    answer = "7 * 300 + 25 = <<7*300+25=2125>>2125\n#### 2,125"
    scores = reward(["So it is 2125.", chat("$2,125.00"), "2,126", ""], answer=[answer] * 4)
    assert scores == [1.0, 1.0, 0.0, 0.0]
    assert reward.columns() == ("answer",)


def test_exact_match_does_not_apply_where_the_row_has_no_answer():
    assert ExactMatch(ExactMatchSettings(answer="target"))(["1", "1"], target=[None, 1]) == [None, 1.0]


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        ({"extract": "boxed"}, r"3 or \boxed{5}", "5"),
        ({"extract": "hash"}, "3\n#### 5", "5"),
        ({"extract": "last-number"}, "3, 5", "5, 3"),
        ({"extract": "whole"}, " 5\n", "so 5"),
        ({"extract": "regex", "pattern": r"<a>(.*?)</a>"}, "<a>3</a><a>5</a>", "5"),
    ],
    ids=lambda value: value["extract"] if isinstance(value, dict) else "",
)
def test_exact_match_extracts_as_told(settings, right, wrong):
    assert ExactMatch(ExactMatchSettings(**settings))([right, wrong], answer=["5", "5"]) == [1.0, 0.0]


def test_contains_looks_for_one_text_or_the_rows():
    assert Contains(ContainsSettings(text="Yes"))(["Yes!", chat("yes")]) == [1.0, 0.0]
    own = Contains(ContainsSettings(column="word", ignore_case=True))
    assert own(["a CAT", "a cat", "a cat"], word=["cat", "dog", None]) == [1.0, 0.0, None]
    assert (Contains(ContainsSettings(text="x")).columns(), own.columns()) == ((), ("word",))


def test_regex_scores_a_share_any_or_the_whole():
    texts = ["12ab", "", chat("1234")]
    # 2 of 4 characters are digits; nothing; all
    assert Regex(RegexSettings(pattern="[0-9]"))(texts) == [0.5, 0.0, 1.0]
    assert Regex(RegexSettings(pattern="[0-9]", score="any"))(texts) == [1.0, 0.0, 1.0]
    assert Regex(RegexSettings(pattern="[0-9]+", score="whole"))(texts) == [0.0, 0.0, 1.0]


def test_length_falls_linearly_on_both_sides_of_the_target():
    # |n - 10| / 5 off the top: 10 -> 1, 8 -> 0.6, 12 -> 0.6, 15 -> 0, 30 -> 0 (never negative)
    reward = Length(LengthSettings(target=10, tolerance=5))
    assert reward(["x" * n for n in (10, 8, 12, 15, 30)]) == pytest.approx([1.0, 0.6, 0.6, 0.0, 0.0])
    assert Length(LengthSettings(target=2, tolerance=2, unit="words"))(["one two", "one"]) == [1.0, 0.5]


# -- python ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def user_file(tmp_path):
    """A reward file with this text; returns the settings for one of its functions."""

    def _write(text, *, function="score", name="rewards.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return PythonRewardSettings(function=f"{file}:{function}")

    return _write


@pytest.fixture
def complaint(tmp_path):
    """The whole message that `PythonReward(settings)` ends with, the temporary folder taken off."""

    def _complaint(settings):
        with pytest.raises(UsageError) as caught:
            PythonReward(settings)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return _complaint


def test_a_users_function_gets_columns_by_name_and_names_those_it_needs(user_file):
    settings = user_file(
        """
        from dataclasses import dataclass

        @dataclass
        class Grade:      # dataclasses look their module up: it must be importable by its name
            value: float

        def score(completions, target, prompts, bonus=0, **columns):
            return [Grade(float(c == t)).value + bonus for c, t in zip(completions, target)]
        """
    )
    reward = PythonReward(settings)
    assert reward(["1", "2"], prompts=["", ""], target=["1", "1"], other=[0, 0]) == [1.0, 0.0]
    assert reward.columns() == ("target",)


def test_two_files_of_the_same_name_do_not_meet(tmp_path):
    rewards = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "json.py").write_text(f"def score(completions, **columns): return [{value}.0]", encoding="utf-8")
        rewards.append(PythonReward(PythonRewardSettings(function=f"{folder}/json.py:score")))
    assert [reward(["x"]) for reward in rewards] == [[1.0], [2.0]]
    import json

    assert json.loads("1") == 1


FIX = "\n  fix: def score(completions, **columns) -> list[float | None]"
UNUSABLE = {
    "no-function": (
        "def scores(completions, **columns): ...",
        "rewards.py: no function 'score' in this file\n  fix: did you mean scores?",
    ),
    "nothing-like-it": (
        "import math\ndef grade(completions, **columns): ...",
        "rewards.py: no function 'score' in this file\n  fix: it defines grade",
    ),
    "not-callable": ("score = 3", f"rewards.py: 'score' is int, not a function{FIX}"),
    "async": (
        "async def score(completions, **columns): ...",
        "rewards.py: 'score' is async; a reward is called as a plain function"
        "\n  fix: make it a plain `def`; for parallel requests use threads inside it",
    ),
    "no-completions": ("def score(answers, **columns): ...", f"rewards.py: 'score' takes no `completions`{FIX}"),
    "no-columns": (
        "def score(completions): ...",
        f"rewards.py: 'score' takes no **columns, but is called with every column of the data{FIX}",
    ),
    "by-position": (
        "def score(completions, /, **columns): ...",
        f"rewards.py: 'score' takes 'completions' by position only{FIX}",
    ),
    "prompt": (
        "def score(completions, prompt, **columns): ...",
        "rewards.py: 'score' takes `prompt`; a reward gets a list called `prompts`\n  fix: rename it",
    ),
    "does-not-load": (
        "import no_such_module_anywhere",
        "rewards.py: this reward file does not load: ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "exits": ("raise SystemExit(3)", "rewards.py: this reward file does not load: SystemExit: 3"),
}


@pytest.mark.parametrize(("text", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_unusable_reward_file_is_refused_when_it_is_loaded(user_file, complaint, text, message):
    assert complaint(user_file(text)) == message


def test_a_missing_reward_file_is_refused(tmp_path, complaint):
    assert complaint(PythonRewardSettings(function=f"{tmp_path}/none.py:score")) == (
        "none.py: no such reward file\n  fix: paths are relative to the spec"
    )


# -- under watch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def failure(user_file, tmp_path):
    """The whole message of a run whose reward function has this body."""

    def _failure(body, completions=("abc", "d")):
        settings = user_file(f"import json\n\ndef score(completions, **columns):\n    {body}\n")
        reward = checked("python", 1.0, PythonReward(settings)).score
        with pytest.raises(RunFailed) as caught:
            reward(list(completions))
        return str(caught.value).replace(f"{tmp_path}/", "")

    return _failure


WANTED = "expected a list of 2 numbers, one per completion (None where it does not apply)"
SAMPLE = "\n  completion: 'abc'"
MISBEHAVIOUR = {
    # line 4 is the body's line
    "raises": ("return [1 / 0]", f"rewards.py:4: reward 'python' raised ZeroDivisionError: division by zero{SAMPLE}"),
    # raised inside json/decoder.py: the user's line is the one that helps
    "raises-in-a-library": (
        "return [json.loads(c) for c in completions]",
        "rewards.py:4: reward 'python' raised JSONDecodeError: Expecting value: line 1 column 1 (char 0)" + SAMPLE,
    ),
    "exits": ("raise SystemExit('enough')", f"rewards.py:4: reward 'python' raised SystemExit: enough{SAMPLE}"),
    "short": ("return [1.0]", f"reward 'python' returned 1 values: {WANTED}{SAMPLE}"),
    "scalar": ("return 1.0", f"reward 'python' returned float: {WANTED}{SAMPLE}"),
    "nothing": ("pass", f"reward 'python' returned NoneType: {WANTED}{SAMPLE}"),
    "nan": (
        "return [1.0, float('nan')]",
        f"reward 'python' returned nan for completion 2: {WANTED}\n  completion: 'd'",
    ),
    "inf": ("return [float('inf'), 1]", f"reward 'python' returned inf for completion 1: {WANTED}{SAMPLE}"),
    "text": ("return ['1', 1]", f"reward 'python' returned '1' for completion 1: {WANTED}{SAMPLE}"),
}


@pytest.mark.parametrize(("body", "message"), MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
def test_a_misbehaving_reward_ends_the_run_with_its_name_and_line(failure, body, message):
    assert failure(body) == message


def test_the_place_is_the_deepest_line_of_the_users_own_file(user_file, tmp_path):
    settings = user_file(
        """
        def grade(completion):
            return int(completion)

        def score(completions, **columns):
            return [grade(c) for c in completions]
        """
    )
    with pytest.raises(RunFailed) as caught:
        checked("python", 1.0, PythonReward(settings)).score(["abc"])
    assert caught.value.at == f"{tmp_path}/rewards.py:3"


def test_a_long_completion_is_shown_in_part(failure):
    assert failure("return 1", completions=["x" * 500]).splitlines()[-1] == f"  completion: '{'x' * 120}...'"


def test_a_number_too_large_for_a_float_is_not_finite(failure):
    assert failure("return [1, 10 ** 400]").startswith("reward 'python' returned 1000000")


def test_booleans_integers_and_none_are_scores():
    reward = checked("mixed", 0.5, lambda completions, **columns: [True, 2, None, numpy.float32(0.5)])
    assert (reward.name, reward.weight) == ("mixed", 0.5)
    assert reward.score(["a"] * 4) == [1.0, 2.0, None, 0.5]
    assert reward.score.__name__ == "mixed"


def test_our_own_errors_pass_through_unchanged():
    def stop(completions, **columns):
        raise MissingError("the grader is not installed")

    with pytest.raises(MissingError, match=r"^the grader is not installed$"):
        checked("python", 1.0, stop).score(["a"])


def test_watching_costs_under_50_microseconds_a_call():
    scores = [0.5] * 64
    completions = ["x"] * 64
    reward = checked("python", 1.0, lambda completions, **columns: scores).score
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        reward(completions)
        best = min(best, time.perf_counter() - start)
    assert best < 50e-6  # the best of many: what the code takes, not what a busy machine adds


# -- a run's rewards ---------------------------------------------------------------------------------------------------


def run_spec(*rewards):
    """Only what `build_rewards` reads of a spec."""
    return SimpleNamespace(data=SimpleNamespace(rewards=list(rewards)))


def plugged(use, settings, weight=1.0):
    return Plugged(kind=Kind.REWARD, use=use, owner="composer-core", settings=settings, weight=weight)


def test_rewards_of_one_kind_get_names_of_their_own(user_file):
    python = user_file("def score(completions, task, **columns): return [0] * len(completions)")
    registry = Registry.discover(third_party=False)
    spec = run_spec(
        plugged("python", python),
        plugged("exact-match", ExactMatchSettings(), 2.0),
        plugged("python", python),
        plugged("composer-core/python", python),
    )
    rewards = build_rewards(spec, registry)
    assert [(r.name, r.weight) for r in rewards] == [
        ("python", 1.0),
        ("exact-match", 2.0),
        ("python-2", 1.0),
        ("python-3", 1.0),
    ]
    assert columns_needed(rewards) == {"task": "reward 'python'", "answer": "reward 'exact-match'"}


def test_a_third_party_reward_that_cannot_be_made_says_whose_it_is(tmp_path):
    file = tmp_path / "licensed.py"
    file.write_text(
        textwrap.dedent(
            """
            from composer_core.plugins.contributions import RewardPlugin
            from composer_core.plugins.hookspecs import hookimpl

            @hookimpl
            def composer_rewards():
                yield RewardPlugin(name="licensed", summary="", target=f"{__name__}:make")

            def make(settings):
                raise ValueError("no licence key")
            """
        ),
        encoding="utf-8",
    )
    registry = Registry()
    registry.add_file(file)
    with pytest.raises(RunFailed) as caught:
        build_rewards(run_spec(plugged("licensed", NoSettings())), registry)
    assert str(caught.value) == (
        f"{file}:10: reward 'licensed' of licensed.py (local file) cannot be made: ValueError: no licence key"
    )
