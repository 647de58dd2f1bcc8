"""Rewards that run something for each completion: without a sandbox, or with one whose results are written down."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from types import SimpleNamespace

import pytest

from composer_core.data.graders import CommandReward, SandboxedPython
from composer_core.data.rewards import build_rewards
from composer_core.data.scoring import checked
from composer_core.data.unconfined import Unconfined
from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.plugins.builtin_settings import CommandRewardSettings, PythonRewardSettings
from composer_core.plugins.contributions import Kind, SandboxPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.sandbox import Limits, Result
from composer_core.spec.model import Plugged

OWN = {"use": "none", "seconds": 20}


class Scripted:
    """A sandbox whose results are written down; keeps what it was asked."""

    python = "python9"

    def __init__(self, *results):
        self.results = list(results)
        self.asked = []

    def run_batch(self, candidates, limits, *, workers=None):
        self.asked.append((candidates, limits))
        return [self.results.pop(0) for _ in candidates]


def ended(stdout="", exit=0, **how):
    usual = {"stderr": "", "timed_out": False, "oom": False, "truncated": False, "seconds": 0.1}
    return Result(exit=exit, stdout=stdout, **{**usual, **how})


def command(*argv, **settings):
    settings = CommandRewardSettings(command=list(argv), sandbox=OWN, **settings)
    return CommandReward(settings, sandbox=Unconfined(settings.sandbox))


@pytest.fixture
def python(tmp_path):
    def make(code, name="score", sandbox=None, **settings):
        file = tmp_path / "own.py"
        file.write_text(textwrap.dedent(code), encoding="utf-8")
        settings = PythonRewardSettings(
            function=f"{file}:{name}", **{"sandbox": {"use": "bubblewrap", "seconds": 20}, **settings}
        )
        return SandboxedPython(settings, sandbox=sandbox or Here(settings.sandbox))

    return make


class Here(Unconfined):
    """Runs workers on this machine, with the candidates' folder where it really is."""

    def run_batch(self, candidates, limits, *, workers=None):
        here = [
            type(one)(tuple(part.removeprefix("/candidate/") for part in one.argv), one.stdin, one.files)
            for one in candidates
        ]
        return super().run_batch(here, limits, workers=workers)


# -- a function --------------------------------------------------------------------------------------------------------


def test_a_function_gets_one_completion_at_a_time_with_its_columns(python):
    reward = python("""
        import os
        def score(completions, answer, prompts, bonus=0, **columns):
            print("noise on stdout")
            assert len(completions) == 1 and "trainer_state" not in columns
            return [None if answer[0] is None else len(completions[0]) + answer[0] + len(prompts[0])]
    """)
    assert reward.columns() == ("answer",)
    scores = reward(["a", "bb", "ccc"], answer=[10, 20, None], prompts=["p"] * 3, trainer_state=object())
    assert scores == [12.0, 23.0, None]


def test_a_completion_that_ends_the_process_costs_its_own_score_alone(python, caplog):
    reward = python("""
        import os
        def score(completions, **columns):
            exec(completions[0])
            return [1]
    """)
    with caplog.at_level(logging.WARNING):
        scores = reward(["pass", "os._exit(0)", "raise MemoryError", "pass"])
    assert scores == [1.0, None, None, 1.0]
    assert caplog.messages == [
        "reward own.py:score: no answer for 2 completions, which are left out: "
        "1 ended with exit code 0, 1 ended with exit code 1"
    ]


def test_unanswered_says_what_such_a_completion_scores(python, caplog):
    look = ended(json.dumps({"parameters": [["completions", 1, False], ["columns", 4, False]]}))
    results = [ended(timed_out=True, exit=137), ended('{"scores": [0.5]}'), ended(oom=True, exit=137)]
    sandbox = Scripted(look, *results)
    reward = python("", sandbox=sandbox, unanswered=-1)
    with caplog.at_level(logging.WARNING):
        assert reward(["a", "b", "c"], x=[1, 2, 3]) == [-1.0, 0.5, -1.0]
    assert caplog.messages == [
        "reward own.py:score: no answer for 2 completions, which are scored -1: 1 ran out of time, 1 ran out of memory"
    ]
    (_, _), (candidates, limits) = sandbox.asked
    assert limits == Limits(seconds=20)
    assert candidates[1].argv == ("python9", "/candidate/grader_worker.py", "/candidate/own.py", "score")
    assert json.loads(candidates[1].stdin) == {"completions": ["b"], "x": [2]}
    assert sorted(candidates[1].files) == ["grader_worker.py", "own.py"]


def test_a_function_that_raises_ends_the_run_with_its_line(python, tmp_path):
    reward = checked(
        "python", 1.0, python("def score(completions, **c):\n    x = 1\n    return [1 / len(completions[0])]\n")
    ).score
    with pytest.raises(RunFailed) as caught:
        reward(["a", ""])
    assert str(caught.value) == f"{tmp_path}/own.py:3: the function raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("returned", "what"),
    [("1.0", "a float"), ("[1, 2]", "2 values"), ("[]", "0 values")],
    ids=["number", "too-many", "none"],
)
def test_anything_but_a_list_of_one_is_refused(python, tmp_path, returned, what):
    reward = python(f"def score(completions, **c):\n    return {returned}\n")
    with pytest.raises(RunFailed) as caught:
        reward(["a"])
    assert str(caught.value) == (
        f"{tmp_path}/own.py: 'score' returned {what}: "
        "expected a list of one score, as a sandbox gives it one completion"
    )


def test_a_score_that_is_no_number_is_refused_as_without_a_sandbox(python):
    reward = checked("python", 1.0, python("def score(completions, **c):\n    return ['good']\n")).score
    with pytest.raises(RunFailed, match=r"^reward 'python' returned \"'good'\" for completion 1: expected a list of 1"):
        reward(["a"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def scores(completions, **c): pass", "{}: no function 'score' in this file\n  fix: did you mean scores?"),
        ("x = 1", "{}: no function 'score' in this file\n  fix: it defines no function"),
        ("import nosuch\n", "{}:1: this reward file does not load in the sandbox: "
                            "ModuleNotFoundError: No module named 'nosuch'"),
        ("async def score(completions, **c): pass", "{}: 'score' is async; a reward is called as a plain function"),
        ("def score(completions): pass", "{}: 'score' takes no **columns, but is called with every column of the data"
                                         "\n  fix: def score(completions, **columns) -> list[float | None]"),
    ],
    ids=["near", "none", "import", "async", "columns"],
)  # fmt: skip
def test_a_file_that_cannot_serve_is_refused_before_the_run(python, tmp_path, code, message):
    with pytest.raises(UsageError) as caught:
        python(code)
    assert str(caught.value) == message.format(tmp_path / "own.py")


def test_a_sandbox_without_python_is_said(python, tmp_path):
    with pytest.raises(MissingError) as caught:
        python("", sandbox=Scripted(ended(exit=127, stderr="python9: not found\n")))
    assert str(caught.value) == (
        f"{tmp_path}/own.py: the sandbox cannot load this reward file: python9: not found"
        "\n  fix: sandbox.readable: folders that Python needs, or higher limits"
    )


def test_a_column_that_is_no_json_is_refused(python, tmp_path):
    reward = python("def score(completions, **c):\n    return [1]\n")
    with pytest.raises(UsageError, match=r"a column cannot travel into the sandbox, as it is no JSON: .*set"):
        reward(["a"], tags=[{1, 2}])


# -- a program ---------------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_score_and_the_completion_comes_on_stdin():
    chat = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}]
    assert command("grep", "-q", "yes")(["yes!", "no", chat]) == [1.0, 0.0, 0.0]


def test_a_number_in_what_it_prints_is_the_score(caplog):
    reward = command("sh", "-c", "cat; echo passed 1 of 4; echo passed $(cat answer) of 4", files={"answer": "n"},
                     pattern=r"passed ([0-9.]+)")  # fmt: skip
    assert reward.columns() == ("n",)
    assert reward(["passed 9", ""], n=["3", 2.5]) == [3.0, 2.5]
    silent = command("cat", pattern="score ([0-9]+)", unanswered=0)
    with caplog.at_level(logging.WARNING):
        assert silent(["score 7", "what?"]) == [7.0, 0.0]
    assert caplog.messages == ["reward cat: no answer for 1 completions, which are scored 0: 1 ended with exit code 0"]


def test_files_hold_the_completion_columns_and_the_users_own_file(tmp_path):
    own = tmp_path / "grade.sh"
    own.write_text("test \"$(cat answer.txt)$(cat data/tests.json)\" = 'out[1, 2]'\n", encoding="utf-8")
    reward = command("sh", "grade.sh", copy_in=str(own), files={"answer.txt": "completion", "data/tests.json": "tests"})
    assert reward.columns() == ("tests",)
    assert reward(["out", "no"], tests=[[1, 2], [1, 2]]) == [1.0, 0.0]


def test_a_limit_is_no_wrong_answer(caplog):
    limited = CommandRewardSettings(
        command=["sh", "-c", "read line; sleep $line"], sandbox={"use": "none", "seconds": 1}
    )
    with caplog.at_level(logging.WARNING):
        assert CommandReward(limited, sandbox=Unconfined(limited.sandbox))(["0\n", "30\n"]) == [1.0, None]
    assert caplog.messages == ["reward sh: no answer for 1 completions, which are left out: 1 ran out of time"]


def test_a_program_that_is_not_there_is_no_wrong_answer_either():
    with pytest.raises(MissingError) as caught:
        command("no-such-grader")
    assert str(caught.value) == (
        "no program 'no-such-grader' in the sandbox none"
        "\n  fix: sandbox.readable: its folder; copy_in: your own file; or an image that has it"
    )


def test_a_pattern_that_takes_no_number_ends_the_run():
    with pytest.raises(RunFailed, match="`pattern` took 'high' for a score, from what 'echo' printed"):
        command("echo", "score high", pattern="score (.*)")(["a"])


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="pattern needs a group"):
        CommandRewardSettings(command=["x"], pattern="[0-9]+")
    with pytest.raises(ValueError, match=r"'\.\./x' must be a name inside the program's folder"):
        CommandRewardSettings(command=["x"], files={"../x": "completion"})
    with pytest.raises(ValueError, match="unanswered goes with a sandbox"):
        PythonRewardSettings(function="./a.py:f", unanswered=0)
    with pytest.raises(ValueError, match="'rel' is no absolute path"):
        SandboxSettings(readable=["rel"])


# -- which sandbox -----------------------------------------------------------------------------------------------------


def rewards_of(registry, *plugged):
    return build_rewards(SimpleNamespace(data=SimpleNamespace(rewards=plugged)), registry)


class Vm(Unconfined):
    """A plugin's sandbox."""

    made = []

    def __init__(self, settings):
        super().__init__(settings)
        self.made.append(settings)


class Acme:
    @hookimpl
    def composer_sandboxes(self):
        yield SandboxPlugin(name="vm", summary="", target=f"{__name__}:Vm")


def test_a_reward_runs_in_the_sandbox_that_its_block_names(monkeypatch):
    registry = Registry.discover(third_party=False)
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Vm=Vm))  # pytest imports tests under no name
    registry.add(Acme(), Owner("acme", "1", "acme"))
    settings = CommandRewardSettings(command=["true"], sandbox={"use": "vm", "memory_mb": 99})
    (reward,) = rewards_of(registry, Plugged(Kind.REWARD, "command", "composer-core", settings, 1.0))
    assert reward.score(["a"]) == [1.0]
    assert Vm.made == [SandboxSettings(use="vm", memory_mb=99)]


def test_a_command_without_a_sandbox_package_says_what_to_install():
    settings = CommandRewardSettings(command=["true"])
    with pytest.raises(MissingError) as caught:
        rewards_of(
            Registry.discover(third_party=False), Plugged(Kind.REWARD, "command", "composer-core", settings, 1.0)
        )
    assert str(caught.value) == (
        "no sandbox is called 'bubblewrap'; installed: none"
        "\n  fix: pip install composer-executors, if that is the package which brings it"
    )
