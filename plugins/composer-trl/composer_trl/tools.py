"""A rollout's tools and environment: the user's functions, loaded by path and checked for what TRL needs of them.

TRL gives a chat template the description of each tool, which transformers reads from the function's docstring and type
hints; it calls tools by keyword, and an environment's `reset` with the columns of the data. It finds most mistakes
late, or in silence, so they are looked for here, when the worker starts. Not here: what the section `rollout:` means to
TRL (`rollout.py`), and what a tool's error means to a channel (`sites.py`).
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from composer_core.data.python_file import attribute, load_module
from composer_core.errors import ComposerError, MissingError, RunFailed, UsageError
from composer_core.spec.model import RunSpec

Tool = Callable[..., Any]

_READS_CALLS = Version("5.13.0.dev0")
_NOT_TOOLS = ("reset", "get_reward")
"""Methods of an environment that TRL calls itself."""
_TEMPLATE_FIX = "take a model whose chat template trl knows, such as Qwen/Qwen3-0.6B, or leave rollout out"
_DOCSTRING = '"""What it does.\n\n      Args:\n          {argument}: What it is.\n      """'


def rollout_arguments(spec: RunSpec) -> dict[str, Any]:
    """The arguments of `GRPOTrainer` that the section `rollout:` decides; none without it.

    Raises:
        UsageError: a file, function or environment is not there, does not load, or is not as TRL needs it.
        MissingError: the installed transformers needs a package to read tool calls.
    """
    if spec.rollout is None:
        return {}
    _require_parser()
    files = _Files()
    arguments: dict[str, Any] = {"tools": [files.tool(function) for function in spec.rollout.tools]}
    names = [tool.__name__ for tool in arguments["tools"]]
    if spec.rollout.environment is not None:
        environments = files.environments(spec.rollout.environment.factory)
        names += [tool.__name__ for tool in environments.tools]
        arguments["environment_factory"] = environments
    if not names:
        raise UsageError(
            "this environment has no public method but reset, so there is nothing that the policy could call",
            at="rollout.environment",
            fix="a method for each action, or rollout.tools",
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two tools are called {twice[0]!r}", at="rollout", fix="rename one of the functions")
    return arguments


def tool_schemas(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The tools' definitions in OpenAI form, as the chat template gets them."""
    from transformers.utils.chat_template_utils import get_json_schema

    return [get_json_schema(tool) for tool in tools]


def require_tool_template(tokenizer: Any, *, at: str) -> None:
    """Refuse a chat template that TRL cannot use for tools; one that it knows gets what reads its tool calls.

    Args:
        tokenizer: as the trainer will have it; its `response_schema` is set, as TRL would do.
        at: what messages call the model.

    Raises:
        UsageError: it does not render calls and results, TRL cannot read its calls, or the text of a conversation does
            not begin like that of the same conversation before its last result.
    """
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    if not supports_tool_calling(tokenizer):
        raise UsageError(
            "this model's chat template does not render tool calls and their results", at=at, fix=_TEMPLATE_FIX
        )
    try:
        if (
            getattr(tokenizer, "response_template", None) is None
            and getattr(tokenizer, "response_schema", None) is None
        ):
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"trl cannot use this model's chat template for tools: {reason}", at=at, fix=_TEMPLATE_FIX
        ) from error


def _require_parser() -> None:
    """TRL refuses tools without jmespath where transformers has no reader of calls of its own, before 5.13."""
    installed = version("transformers")
    if Version(installed) < _READS_CALLS and importlib.util.find_spec("jmespath") is None:
        raise MissingError(
            f"transformers {installed} needs the package jmespath to read tool calls", fix="pip install jmespath"
        )


class _Files:
    """The user's files, each run once, so that tools and environment of one file share what it holds."""

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


# -- tools -------------------------------------------------------------------------------------------------------------


def check_tool(tool: Any, name: str, *, at: str) -> None:
    """Refuse what a policy could not call, or what no description can be made of.

    Raises:
        UsageError: with the function's line.
    """
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        fix = f"`def {name}(...)` with type hints and a docstring"
        raise UsageError(f"{name!r} is {type(tool).__name__}, not a function", at=at, fix=fix)
    at = _line(tool, at)
    for problem, fix in _tool_problems(tool):
        raise UsageError(f"tool {name!r}: {problem}", at=at, fix=fix)
    try:
        (schema,) = tool_schemas([tool])
    except Exception as error:  # transformers lets through what typing and json raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "type hints such as str, int, float, bool, list[str], Literal; a docstring in Google style"
        raise UsageError(f"tool {name!r}: no description can be made of it: {reason}", at=at, fix=fix) from error
    if schema["function"].get("return", {}).get("type") == "array":  # templates for text leave it out in silence
        problem = f"tool {name!r}: it returns a list, which trl takes for the parts of a message with images"
        raise UsageError(problem, at=at, fix="return a text, or str of the list")


def _tool_problems(tool: Tool) -> Iterator[tuple[str, str]]:
    """What is missing, the first thing first, with the way out."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    parameters = inspect.signature(tool).parameters.values()
    for p in parameters:
        if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            yield f"it takes *{p.name}, and the policy must know each argument", "name its parameters"
        if p.kind is Parameter.POSITIONAL_ONLY:
            yield f"parameter {p.name!r} is taken by position only, and tools are called by keyword", "leave out the /"
        if p.annotation is Parameter.empty:
            yield f"parameter {p.name!r} has no type hint", f"{p.name}: str"
    doc = inspect.getdoc(tool)
    first = next((p.name for p in parameters), "")
    if not doc:
        text = _DOCSTRING.format(argument=first) if first else '"""What it does."""'
        yield "it has no docstring, which is what the policy reads of it", text
        return
    described = parse_google_format_docstring(doc.strip())[1] or {}
    for p in parameters:
        if p.name not in described:
            yield (
                f"its docstring does not describe parameter {p.name!r}",
                f"below `Args:` a line `{p.name}: what it is`",
            )


def _line(function: Any, at: str) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return at if code is None else f"{code.co_filename}:{code.co_firstlineno}"


# -- environments ------------------------------------------------------------------------------------------------------


class Environments:
    """TRL's `environment_factory`: makes the user's environments, and watches what their `reset` does.

    One is made and checked at once; the first call hands it out.

    Raises:
        UsageError: it cannot be made, or is not as TRL needs it.
    """

    def __init__(self, make: Callable[[], Any], name: str, *, at: str) -> None:
        self._make, self._name, self._at = make, name, at
        try:
            first = make()
        except ComposerError:
            raise
        except Exception as error:
            raise UsageError(f"environment {name!r} cannot be made: {_said(error)}", at=_place(error, at)) from error
        self.tools = _environment_tools(first, name, at=at)
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
            raise RunFailed(problem, at=_line(self._make, self._at), fix="make a new one in each call")
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
            raise RunFailed(problem, at=_line(reset, self._at))

        # TRL looks for `reset` on the class and calls the instance's; object's own, since a dataclass may be frozen
        try:
            object.__setattr__(environment, "reset", watched)
        except AttributeError as error:
            problem = f"environment {self._name!r}: its class has __slots__, so its `reset` cannot be watched"
            raise UsageError(problem, at=self._at, fix="leave __slots__ out") from error
        return environment


def _environment_tools(environment: Any, name: str, *, at: str) -> Sequence[Tool]:
    """The methods that are tools, by TRL's rule: public functions of the class."""
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
            at=_line(methods["get_reward"], at),
            fix="data.rewards: [{use: python, function: ./reward.py:score}] with "
            "`def score(completions, environments, **columns)`, which gets the environments of the rollouts",
        )
    tools = [getattr(environment, key) for key in methods if not key.startswith("_") and key not in _NOT_TOOLS]
    for tool in tools:
        check_tool(tool, tool.__name__, at=at)
    return tools


def _check_reset(reset: Tool, what: str, *, at: str) -> None:
    fix = "def reset(self, **row) -> str | None"
    if inspect.iscoroutinefunction(reset):
        raise UsageError(f"{what}: `reset` is async, and is called as a plain method", at=_line(reset, at), fix=fix)
    if all(p.kind is not Parameter.VAR_KEYWORD for p in inspect.signature(reset).parameters.values()):
        problem = f"{what}: `reset` takes no **row, but is called with every column of the data"
        raise UsageError(problem, at=_line(reset, at), fix=fix)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _place(error: BaseException, file: str) -> str:
    """`file.py:12`: the deepest line of the user's file that an error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file
