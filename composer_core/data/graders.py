"""Rewards that run something for each completion, in a sandbox: the user's Python function, or any program.

A grader that meets a limit, or that a completion's code ended, gives no answer. That is the completion's doing and no
mistake of the grader's, so it does not end the run: it is counted, logged and scored as `unanswered` says. A function
that raises, or returns something else than a score, ends the run as it does without a sandbox.
"""

from __future__ import annotations

import collections
import difflib
import inspect
import json
import logging
import re
from collections.abc import Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

from composer_core.data.answers import completion_text
from composer_core.data.python_file import needed_columns
from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.plugins.builtin_settings import CommandRewardSettings, PythonRewardSettings
from composer_core.sandbox import WORK, Candidate, Limits, Result, Sandbox

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("grader_worker.py")
_IN_PROCESS = ("trainer_state", "log_extra", "log_metric", "environments")
"""What trainers give to a reward that lives in their own process only."""
COMPLETION = "completion"
"""In `files` of a command: the completion itself."""


class SandboxedPython:
    """A function of the user's file, called for one completion at a time in a process of its own."""

    def __init__(self, settings: PythonRewardSettings, *, sandbox: Sandbox) -> None:
        file, _, self._name = settings.function.rpartition(":")
        self._path = Path(file).expanduser()
        self._sandbox = sandbox
        self._limits = settings.sandbox.limits
        self._unanswered = settings.unanswered
        if not self._path.is_file():
            raise UsageError("no such reward file", at=str(self._path), fix="paths are relative to the spec")
        self._files = {"grader_worker.py": _WORKER.read_bytes(), self._path.name: self._path.read_bytes()}
        self._columns = self._look()

    def columns(self) -> tuple[str, ...]:
        """The parameters without a default: the function cannot be called without them."""
        return self._columns

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion.

        Raises:
            RunFailed: the function raised, or returned something else than a list of one score.
        """
        rows = {name: values for name, values in columns.items() if name not in _IN_PROCESS}
        questions = [
            {"completions": [completion], **{name: [values[index]] for name, values in rows.items()}}
            for index, completion in enumerate(completions)
        ]
        results = self._sandbox.run_batch([self._candidate(question) for question in questions], self._limits)
        log_unanswered(f"{self._path.name}:{self._name}", [r for r in results if not r.stdout], self._unanswered)
        return [self._score(result) if result.stdout else self._unanswered for result in results]

    def _candidate(self, question: object) -> Candidate:
        argv = (self._sandbox.python, f"{WORK}/grader_worker.py", f"{WORK}/{self._path.name}", self._name)
        try:
            return Candidate(argv, json.dumps(question).encode(), self._files)
        except TypeError as error:
            problem = f"a column cannot travel into the sandbox, as it is no JSON: {error}"
            raise UsageError(
                problem, at=str(self._path), fix="sandbox: none, or columns of text and numbers"
            ) from error

    def _score(self, result: Result) -> float | None:
        answer = self._parsed(result)
        if "error" in answer:
            raise RunFailed(f"the function raised {answer['error']}", at=self._place(answer["line"]))
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(scores) != 1:
            what = scores if isinstance(scores, str) else f"{len(scores or [])} values"
            problem = (
                f"{self._name!r} returned {what}: expected a list of one score, as a sandbox gives it one completion"
            )
            raise RunFailed(problem, at=str(self._path))
        return scores[0]  # type: ignore[no-any-return]

    def _parsed(self, result: Result) -> dict[str, Any]:
        try:
            answer = json.loads(result.stdout)
        except json.JSONDecodeError:
            answer = None
        if isinstance(answer, dict):
            return answer
        # only something that went for our descriptor can have written there
        raise RunFailed(f"the answer of {self._name!r} was overwritten: {result.stdout[:80]!r}", at=str(self._path))

    def _place(self, line: int) -> str:
        return f"{self._path}:{line}" if line else str(self._path)

    def _look(self) -> tuple[str, ...]:
        """Load the file inside, once, for the columns that the function needs."""
        (result,) = self._sandbox.run_batch([self._candidate(None)], self._limits)
        if not result.stdout:
            said = result.stderr.strip().rpartition("\n")[2] or result.why
            fix = "sandbox.readable: folders that Python needs, or higher limits"
            raise MissingError(f"the sandbox cannot load this reward file: {said}", at=str(self._path), fix=fix)
        answer = self._parsed(result)
        if "error" in answer:
            problem = f"this reward file does not load in the sandbox: {answer['error']}"
            raise UsageError(problem, at=self._place(answer["line"]))
        if "missing" in answer:
            near = difflib.get_close_matches(self._name, answer["missing"], 1)
            fix = f"did you mean {near[0]}?" if near else f"it defines {', '.join(answer['missing']) or 'no function'}"
            raise UsageError(f"no function {self._name!r} in this file", at=str(self._path), fix=fix)
        if "async" in answer:
            raise UsageError(f"{self._name!r} is async; a reward is called as a plain function", at=str(self._path))
        signature = inspect.Signature([_parameter(*given) for given in answer["parameters"]])
        needed = needed_columns(signature, self._name, at=str(self._path))
        return tuple(name for name in needed if name not in _IN_PROCESS)


def _parameter(name: str, kind: int, optional: bool) -> Parameter:
    return Parameter(name, inspect._ParameterKind(kind), default=None if optional else Parameter.empty)


class CommandReward:
    """A program, run once for each completion."""

    def __init__(self, settings: CommandRewardSettings, *, sandbox: Sandbox) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._limits: Limits = settings.sandbox.limits
        self._given = {}
        if settings.copy_in is not None:
            own = Path(settings.copy_in)
            if not own.is_file():
                raise UsageError("no such file, which copy_in names", at=str(own), fix="paths are relative to the spec")
            self._given = {own.name: own.read_bytes()}
        self._find()

    def columns(self) -> tuple[str, ...]:
        """Those that `files` names."""
        return tuple(dict.fromkeys(name for name in self._settings.files.values() if name != COMPLETION))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion; None where the program did not answer and `unanswered` says so."""
        texts = [completion_text(completion) for completion in completions]
        rows = [{**{name: columns[name][i] for name in self.columns()}, COMPLETION: t} for i, t in enumerate(texts)]
        results = self._sandbox.run_batch([self._candidate(row) for row in rows], self._limits)
        answers = [self._answer(result) for result in results]
        silent = [result for result, answer in zip(results, answers, strict=True) if answer is None]
        log_unanswered(self._settings.command[0], silent, self._settings.unanswered)
        return [self._settings.unanswered if answer is None else answer for answer in answers]

    def _candidate(self, row: Mapping[str, Any]) -> Candidate:
        files = {name: _as_bytes(row[source]) for name, source in self._settings.files.items()}
        return Candidate(tuple(self._settings.command), row[COMPLETION].encode(), {**self._given, **files})

    def _answer(self, result: Result) -> float | None:
        if result.timed_out or result.oom or result.truncated:
            return None
        if self._settings.pattern is None:
            return float(result.exit == 0)
        found = re.findall(self._settings.pattern, result.stdout)
        if not found:
            return None
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        try:
            return float(last)
        except ValueError as error:
            problem = f"`pattern` took {last!r} for a score, from what {self._settings.command[0]!r} printed"
            raise RunFailed(problem, fix="a group that holds a number alone, such as ([0-9.]+)") from error

    def _find(self) -> None:
        """The program must be there: its absence would look like a completion that is wrong."""
        program = self._settings.command[0]
        look = ("/bin/sh", "-c", 'command -v -- "$1" || test -e "$1"', "sh", program)
        (result,) = self._sandbox.run_batch([Candidate(look, files=self._given)], self._limits)
        if result.exit:
            said = f" ({result.stderr.strip()})" if result.stderr.strip() else ""
            fix = "sandbox.readable: its folder; copy_in: your own file; or an image that has it"
            raise MissingError(f"no program {program!r} in the sandbox {self._settings.sandbox.use}{said}", fix=fix)


def _as_bytes(value: Any) -> bytes:
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def log_unanswered(what: str, results: Sequence[Result], score: float | None) -> None:
    """One line for the graders of a batch that gave no answer."""
    if results:
        ends = collections.Counter(result.why for result in results)
        listed = ", ".join(f"{count} {why}" for why, count in ends.items())
        given = "left out" if score is None else f"scored {score:g}"
        logger.warning("reward %s: no answer for %d completions, which are %s: %s", what, len(results), given, listed)
