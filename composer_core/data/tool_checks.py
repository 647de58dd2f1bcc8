"""What a function must be to serve as a tool: a policy reads its description, and calls it by keyword.

A chat template gets the description of each tool, which transformers reads from the function's docstring and type
hints. It finds most mistakes late, or in silence, so they are looked for here. Which functions a run has: `tools.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter
from typing import Any

from composer_core.errors import UsageError

Tool = Callable[..., Any]

_DOCSTRING = '"""What it does.\n\n      Args:\n          {argument}: What it is.\n      """'


def tool_schemas(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The tools' definitions in OpenAI form, as the chat template gets them."""
    from transformers.utils.chat_template_utils import get_json_schema

    return [get_json_schema(tool) for tool in tools]


def check_tool(tool: Any, name: str, *, at: str) -> None:
    """Refuse what a policy could not call, or what no description can be made of.

    Raises:
        UsageError: with the function's line.
    """
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        fix = f"`def {name}(...)` with type hints and a docstring"
        raise UsageError(f"{name!r} is {type(tool).__name__}, not a function", at=at, fix=fix)
    at = line_of(tool, at)
    for problem, fix in _tool_problems(tool):
        raise UsageError(f"tool {name!r}: {problem}", at=at, fix=fix)
    try:
        (schema,) = tool_schemas([tool])
    except Exception as error:  # transformers lets through what typing and json raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "type hints such as str, int, float, bool, list[str], Literal; a docstring in Google style"
        raise UsageError(f"tool {name!r}: no description can be made of it: {reason}", at=at, fix=fix) from error
    if schema["function"].get("return", {}).get("type") == "array":  # templates for text leave it out in silence
        problem = f"tool {name!r}: it returns a list, which chats take for the parts of a message with images"
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


def line_of(function: Any, at: str) -> str:
    """`file.py:12`: where a function begins; `at` where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return at if code is None else f"{code.co_filename}:{code.co_firstlineno}"
