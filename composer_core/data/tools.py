"""The tools and the environment that the section `rollout:` names: loaded by path, each file once, and checked.

What a tool must be stands in `tool_checks.py`, what an environment must be in `environments.py`. Whether the files and
names are there is said at plan time already (`spec/rollout_problems.py`). How rollouts use them is a backend's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_core.data.environments import Environments
from composer_core.data.python_file import attribute, load_module
from composer_core.data.tool_checks import Tool, check_tool
from composer_core.errors import UsageError
from composer_core.spec.sections import RolloutSpec


@dataclass(frozen=True)
class RolloutTools:
    """What the policy can call."""

    functions: tuple[Tool, ...]
    """Tools without an environment."""
    environments: Environments | None

    @property
    def all(self) -> tuple[Tool, ...]:
        """Every tool, for their definitions; an environment's methods are those of the checked one."""
        return (*self.functions, *(self.environments.tools if self.environments else ()))


def load_tools(rollout: RolloutSpec) -> RolloutTools:
    """Run the user's files, each once, so that tools and environment of one file share what it holds.

    Raises:
        UsageError: a file, function or environment is not there, does not load, or is not as rollouts need it; there is
            nothing that the policy could call.
    """
    files = _Files()
    functions = tuple(files.tool(function) for function in rollout.tools)
    environments = None if rollout.environment is None else files.environments(rollout.environment.factory)
    tools = RolloutTools(functions, environments)
    names = [tool.__name__ for tool in tools.all]
    if not names:
        raise UsageError(
            "this environment has no public method but reset, so there is nothing that the policy could call",
            at="rollout.environment",
            fix="a method for each action, or rollout.tools",
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two tools are called {twice[0]!r}", at="rollout", fix="rename one of the functions")
    return tools


class _Files:
    """The user's files, each run once."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def tool(self, function: str) -> Tool:
        """The tool that `file.py:name` names."""
        path, name = _split(function)
        tool = self._get(path, name)
        check_tool(tool, name, at=str(path))
        return tool  # type: ignore[no-any-return]

    def environments(self, factory: str) -> Environments:
        """What makes the environments that `file.py:name` names."""
        path, name = _split(factory)
        make = self._get(path, name)
        if not callable(make):
            fix = f"a class, or `def {name}():` that returns an environment"
            raise UsageError(f"{name!r} is {type(make).__name__}, not a function or class", at=str(path), fix=fix)
        return Environments(make, name, at=str(path))

    def _get(self, path: Path, name: str) -> Any:
        if path not in self._modules:
            self._modules[path] = load_module(path, what="rollout")
        return attribute(self._modules[path], name, at=str(path))


def _split(function: str) -> tuple[Path, str]:
    file, _, name = function.rpartition(":")
    return Path(file).expanduser(), name
