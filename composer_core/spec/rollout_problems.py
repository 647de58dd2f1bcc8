"""What is wrong with the section `rollout:` on any backend that runs tools itself. Light: files are read, none is run.

A backend says its own limits beside these. The functions themselves are loaded and checked by `data/tools.py`, when the
worker starts.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from composer_core.errors import Problem
from composer_core.spec.environment import has_placeholder
from composer_core.spec.model import RunSpec
from composer_core.spec.sections import RolloutSpec
from composer_core.spec.yaml import dotted


def rollout_problems(spec: RunSpec, *, backend: str) -> Iterator[Problem]:
    """Turns that no tool or chat could fill, and functions that are not there; nothing without the section.

    Args:
        spec: the whole spec.
        backend: whose rollouts these are, for messages.
    """
    rollout = spec.rollout
    if rollout is None:
        return
    if not rollout.tools and rollout.environment is None:
        yield Problem(
            key="rollout",
            problem=f"{backend} goes on after the first turn only where that called a tool, and there are none",
            fix="give tools or an environment, or leave rollout out",
        )
    if rollout.max_turns == 1:
        yield Problem(
            key="rollout.max_turns",
            problem="with one turn no tool is ever run: its result is what a second turn would read",
            fix="at least 2",
        )
    for key, prompts in (("data.prompts.chat", spec.data.prompts), ("data.eval.chat", spec.data.eval)):
        if prompts is not None and not prompts.chat:
            yield Problem(
                key=key,
                problem="tools need chat prompts: a raw text has no place for their results",
                fix="true, or leave rollout out",
            )
    if spec.model.builtin is not None:
        yield Problem(
            key="model.builtin",
            problem=f"{backend} cannot read tool calls in the built-in model's chat format",
            fix="model.path: a model that was trained to call tools, such as Qwen/Qwen3-0.6B",
        )
    yield from _function_problems(rollout)


def _function_problems(rollout: RolloutSpec) -> Iterator[Problem]:
    functions = {dotted("rollout.tools", index): tool for index, tool in enumerate(rollout.tools)}
    names = Counter(tool.rpartition(":")[2] for tool in functions.values())
    for key, tool in functions.items():
        name = tool.rpartition(":")[2]
        if names[name] > 1:
            problem = f"{names[name]} tools are called {name!r}, and the policy calls a tool by its name"
            yield Problem(key=key, problem=problem, fix="rename one of the functions")
    if rollout.environment is not None:
        functions["rollout.environment.factory"] = rollout.environment.factory
    for key, function in functions.items():
        file, _, name = function.rpartition(":")
        if has_placeholder(function):
            continue
        if not Path(file).is_file():
            yield Problem(key=key, problem=f"no such file: {file}", fix="paths are relative to the spec")
        else:
            yield from _name_problems(key, Path(file), name)


def _name_problems(key: str, file: Path, name: str) -> Iterator[Problem]:
    """A file that is no Python, or that nowhere binds the name; it is read, not run."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError) as error:
        yield Problem(key=key, problem=f"{file} cannot be read as Python: {error}")
        return
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    if {name, "*"}.isdisjoint({*defined, *bound, *imported}):
        near = difflib.get_close_matches(name, defined, 1)
        fix = f"did you mean {near[0]}?" if near else f"it defines {', '.join(defined) or 'no function'}"
        yield Problem(key=key, problem=f"no function {name!r} in {file}", fix=fix)
