"""The section `rollout:` as TRL's numbers, and what TRL cannot make of one. Light: files are read here, none is run.

TRL samples a turn; where it calls tools, TRL runs them, appends what they returned and samples the next turn:

    assistant turns = 1 + tool-calling iterations           max_tool_calling_iterations = max_turns - 1

so only a call leads to a second turn. The functions themselves are loaded and checked in `tools.py`.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import Problem
from composer_core.spec.environment import has_placeholder
from composer_core.spec.model import RunSpec
from composer_core.spec.yaml import dotted


def rollout_fields(spec: RunSpec) -> Mapping[str, Any]:
    """GRPOConfig's fields for the section; none without it."""
    return {} if spec.rollout is None else {"max_tool_calling_iterations": spec.rollout.max_turns - 1}


def rollout_numbers(spec: RunSpec) -> Mapping[str, int]:
    """The section in words, for `plan`."""
    return {} if spec.rollout is None else {"longest rollout (assistant turns)": spec.rollout.max_turns}


def rollout_notes(spec: RunSpec) -> Iterator[str]:
    """What surprises about a rollout of several turns."""
    if spec.rollout is None:
        return
    yield (
        "train.max_completion_tokens counts what tools return too: a result that does not fit any more ends the "
        "rollout before it is shown"
    )
    if spec.rollout.environment is not None:
        yield "trl makes an environment once and calls its reset(**row) before each rollout"


def rollout_problems(spec: RunSpec) -> Iterator[Problem]:
    """What TRL cannot do for the section, and functions that are not there."""
    rollout = spec.rollout
    if rollout is None:
        return
    if not rollout.tools and rollout.environment is None:
        yield Problem(
            key="rollout",
            problem="trl goes on after the first turn only where that called a tool, and there are none",
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
            problem="trl cannot read tool calls in the built-in model's chat format",
            fix="model.path: a model that was trained to call tools, such as Qwen/Qwen3-0.6B",
        )
    yield from _function_problems(spec)


def _function_problems(spec: RunSpec) -> Iterator[Problem]:
    assert spec.rollout is not None
    functions = {dotted("rollout.tools", index): tool for index, tool in enumerate(spec.rollout.tools)}
    names = Counter(tool.rpartition(":")[2] for tool in functions.values())
    for key, tool in functions.items():
        name = tool.rpartition(":")[2]
        if names[name] > 1:
            problem = f"{names[name]} tools are called {name!r}, and the policy calls a tool by its name"
            yield Problem(key=key, problem=problem, fix="rename one of the functions")
    if spec.rollout.environment is not None:
        functions["rollout.environment.factory"] = spec.rollout.environment.factory
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
