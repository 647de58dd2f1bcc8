"""Every error a user can meet, each with the exit code it ends the program with.

    ComposerError           the base: a sentence, optionally where and what to do
    ├── UsageError      2   the spec, a command line or a data file is wrong
    │   └── SpecError   2   one or more problems, each with its place in a file
    ├── MissingError    3   something is not installed or not reachable
    ├── RunFailed       4   the run started and broke
    │   └── NonFinite   4   a loss or gradient is NaN or infinite; backends make a stop (5) of it
    └── Stopped         5   the run ended early because it was asked to

A class stands for who must act, not for the module it comes from. To add one, pick the exit code first.
Errors cross process borders as text (`str(error)` is the whole message), so none carries live objects.
"""

from __future__ import annotations

from dataclasses import dataclass


class ComposerError(Exception):
    """A mistake with a plain explanation; the command line prints it without a traceback."""

    exit_code = 4

    def __init__(self, problem: str, *, at: str = "", fix: str = "") -> None:
        self.problem = problem
        self.at = at
        self.fix = fix
        super().__init__(self._text())

    def _text(self) -> str:
        place = f"{self.at}: " if self.at else ""
        way_out = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{place}{self.problem}{way_out}"


class UsageError(ComposerError):
    """The user's input is wrong: a spec, an argument, a data file, a reward file."""

    exit_code = 2


class MissingError(ComposerError):
    """Something the run needs is not installed, not readable or not reachable."""

    exit_code = 3


class RunFailed(ComposerError):
    """The run started and could not go on."""

    exit_code = 4


class NonFinite(RunFailed):
    """A loss or gradient is NaN or infinite, found before the step was applied.

    A backend catches it, saves the state before that step and stops (exit code 5); where none does, the run failed.
    """


class Stopped(ComposerError):
    """The run ended early on request (a signal, a limit); what it had is saved."""

    exit_code = 5


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a spec: where (``spec.yaml:12:5``), which key, what, and the way out."""

    key: str
    problem: str
    fix: str = ""
    source: str = ""
    line: int = 0
    column: int = 0
    missing: bool = False
    """True when nothing is wrong with the spec itself, but a package it needs is not installed."""

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        place = f"{place}: " if place else ""
        key = f"{self.key}: " if self.key else ""
        way_out = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{place}{key}{self.problem}{way_out}"


class SpecError(UsageError):
    """All problems of one spec, in the order of their lines."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.source, p.line, p.column)))
        super().__init__("\n".join(str(p) for p in self.problems))
        if self.problems and all(p.missing for p in self.problems):
            self.exit_code = MissingError.exit_code
