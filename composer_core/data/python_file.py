"""A function from the user's own file, checked when it is loaded rather than at the first step.

`load_module` and `attribute` serve any kind of function that a spec names as `./file.py:name`; the rest is about
rewards.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_core.data.prompts import RESERVED
from composer_core.errors import ComposerError, UsageError

_SIGNATURE = "def {name}(completions, **columns) -> list[float | None]"


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run the file as a module of its own and take a reward function from it.

    Raises:
        UsageError: the file or the function is not there, does not load, or is async.
    """
    at = str(path)
    function = attribute(load_module(path), name, at=at)
    if not callable(function):
        raise UsageError(
            f"{name!r} is {type(function).__name__}, not a function", at=at, fix=_SIGNATURE.format(name=name)
        )
    call = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        fix = "make it a plain `def`; for parallel requests use threads inside it"
        raise UsageError(f"{name!r} is async; a reward is called as a plain function", at=at, fix=fix)
    return function  # type: ignore[no-any-return]


def needed_columns(signature: inspect.Signature, name: str, *, at: str) -> tuple[str, ...]:
    """Parameters of a reward function without a default, that a data row must bring.

    Raises:
        UsageError: the function could not be called with `completions` and any column by keyword.
    """
    parameters = signature.parameters
    by_keyword = {
        p.name: p for p in parameters.values() if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    positional = [p.name for p in parameters.values() if p.kind is Parameter.POSITIONAL_ONLY]
    fix = _SIGNATURE.format(name=name)
    if positional:
        raise UsageError(f"{name!r} takes {positional[0]!r} by position only", at=at, fix=fix)
    if "completions" not in by_keyword:
        raise UsageError(f"{name!r} takes no `completions`", at=at, fix=fix)
    if not takes_all:
        problem = f"{name!r} takes no **columns, but is called with every column of the data"
        raise UsageError(problem, at=at, fix=fix)
    needed = [p.name for p in by_keyword.values() if p.default is Parameter.empty and p.name not in RESERVED]
    if "prompt" in needed:
        raise UsageError(f"{name!r} takes `prompt`; a reward gets a list called `prompts`", at=at, fix="rename it")
    return tuple(needed)


def attribute(module: ModuleType, name: str, *, at: str) -> Any:
    """What a module that `load_module` made calls `name`.

    Raises:
        UsageError: there is nothing of that name; the message has the likeliest other one.
    """
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        key
        for key, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, own, 1)
    fix = f"did you mean {near[0]}?" if near else f"it defines {', '.join(own) or 'no function'}"
    raise UsageError(f"no function {name!r} in this file", at=at, fix=fix)


def load_module(path: Path, *, what: str = "reward") -> ModuleType:
    """Run a file as a module of its own; a second call runs it again.

    Args:
        path: the file.
        what: what messages call it: "reward", "tool".

    Raises:
        UsageError: it is not there, or does not load.
    """
    if not path.is_file():
        raise UsageError(f"no such {what} file", at=str(path), fix="paths are relative to the spec")
    # A name of its own, from its path, so that two files called rewards.py, or a user's json.py, shadow nothing.
    name = f"composer_{what}_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", at=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look their module up by name
    try:
        spec.loader.exec_module(module)
    except ComposerError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        problem = f"this {what} file does not load: {type(error).__name__}: {error}"
        raise UsageError(problem, at=str(path)) from error
    return module
