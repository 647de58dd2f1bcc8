"""A rollout's environments: objects of the user's whose public methods are tools that share state.

One environment serves one rollout at a time: `reset` begins it, with the columns of its data row. What is wrong with a
factory or a class is said when the worker starts; what `reset` does wrong, when it does it. Where rewards are scored in
another process, `state_of` and `take_state` carry what an environment knows there. Tools alone: `tools.py`.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from composer_core.data.tool_checks import Tool, check_tool, line_of
from composer_core.errors import ComposerError, RunFailed, UsageError

_NOT_TOOLS = ("reset", "get_reward")
"""Methods of an environment that are not for the policy."""


class Environments:
    """Makes the user's environments, and watches what their `reset` does.

    One is made and checked at once; the first call hands it out.

    Args:
        make: the user's class, or function that gives an environment.
        name: what the user calls it.
        at: its file.

    Raises:
        UsageError: it cannot be made, or is not as rollouts need it.
    """

    def __init__(self, make: Callable[[], Any], name: str, *, at: str) -> None:
        self._make, self._name, self._at = make, name, at
        try:
            first = make()
        except ComposerError:
            raise
        except Exception as error:
            raise UsageError(f"environment {name!r} cannot be made: {_said(error)}", at=_place(error, at)) from error
        _check_environment(first, name, at=at)
        self.tools = environment_tools(first)
        for tool in self.tools:
            check_tool(tool, tool.__name__, at=at)
        self._made: list[Any] = []
        self._spare = [self._watched(first)]

    def __call__(self) -> Any:
        """An environment for one rollout at a time.

        Raises:
            RunFailed: it cannot be made any more, or one of before came again.
        """
        if self._spare:
            return self._spare.pop()
        try:
            environment = self._make()
        except Exception as error:
            problem = f"environment {self._name!r} cannot be made: {_said(error)}"
            raise RunFailed(problem, at=_place(error, self._at)) from error
        if any(environment is other for other in self._made):
            problem = f"environment {self._name!r}: the same object came twice, and rollouts would share its state"
            raise RunFailed(problem, at=line_of(self._make, self._at), fix="make a new one in each call")
        return self._watched(environment)

    def _watched(self, environment: Any) -> Any:
        self._made.append(environment)
        reset = environment.reset

        def watched(**row: Any) -> str | None:
            try:
                said = reset(**row)
            except Exception as error:
                problem = f"environment {self._name!r}: reset raised {_said(error)}"
                raise RunFailed(problem, at=_place(error, self._at)) from error
            if said is None or isinstance(said, str):
                return said
            problem = f"environment {self._name!r}: reset returned {type(said).__name__}, not a text or None"
            raise RunFailed(problem, at=line_of(reset, self._at))

        # trainers look for `reset` on the class and call the instance's; object's own, since a dataclass may be frozen
        try:
            object.__setattr__(environment, "reset", watched)
        except AttributeError as error:
            problem = f"environment {self._name!r}: its class has __slots__, so its `reset` cannot be watched"
            raise UsageError(problem, at=self._at, fix="leave __slots__ out") from error
        return environment


def environment_tools(environment: Any) -> Sequence[Tool]:
    """The methods that are tools, bound to this environment: the public functions of its class but `reset`."""
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [getattr(environment, name) for name, _ in methods if not name.startswith("_") and name not in _NOT_TOOLS]


def _check_environment(environment: Any, name: str, *, at: str) -> None:
    methods = dict(inspect.getmembers(type(environment), predicate=inspect.isfunction))
    what = f"environment {name!r} ({type(environment).__name__})"
    if "reset" not in methods:
        raise UsageError(
            f"{what} has no method `reset`, which begins a rollout", at=at, fix="def reset(self, **row) -> str | None"
        )
    _check_reset(methods["reset"], what, at=at)
    if "get_reward" in methods:
        raise UsageError(
            f"{what} has a method `get_reward`, which would be a reward beside those of the spec",
            at=line_of(methods["get_reward"], at),
            fix="data.rewards: [{use: python, function: ./reward.py:score}] with "
            "`def score(completions, environments, **columns)`, which gets the environments of the rollouts",
        )


def _check_reset(reset: Tool, what: str, *, at: str) -> None:
    fix = "def reset(self, **row) -> str | None"
    if inspect.iscoroutinefunction(reset):
        raise UsageError(f"{what}: `reset` is async, and is called as a plain method", at=line_of(reset, at), fix=fix)
    if all(p.kind is not Parameter.VAR_KEYWORD for p in inspect.signature(reset).parameters.values()):
        problem = f"{what}: `reset` takes no **row, but is called with every column of the data"
        raise UsageError(problem, at=line_of(reset, at), fix=fix)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _place(error: BaseException, file: str) -> str:
    """`file.py:12`: the deepest line of the user's file that an error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


# -- to another process ------------------------------------------------------------------------------------------------


def state_of(environment: Any) -> dict[str, Any]:
    """The attributes that tell a reward what came of a rollout, as JSON can hold them.

    Attributes whose names begin with an underscore (a connection, a lock) stay where they are.

    Raises:
        RunFailed: another attribute is something that JSON cannot give back as it was.
    """
    state = {name: value for name, value in vars(environment).items() if _travels(name)}
    for name, value in state.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise RunFailed(
                f"environment {type(environment).__name__}: its attribute {name!r}, {type(value).__name__}, is not "
                "made of lists, texts and numbers alone, so it cannot travel to the rewards",
                fix=f"call it _{name} if no reward needs it, or keep it as JSON has it: lists, not tuples or sets",
            )
    return state


def take_state(environment: Any, state: Mapping[str, Any]) -> None:
    """Make `environment` as the one was whose `state_of` this is, but for attributes that begin with an underscore."""
    for name in [name for name in vars(environment) if _travels(name)]:
        object.__delattr__(environment, name)
    for name, value in state.items():
        object.__setattr__(environment, name, value)


def _travels(name: str) -> bool:
    return not name.startswith("_") and name != "reset"
