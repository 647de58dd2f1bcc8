"""Runs inside a sandbox: loads the user's reward file, calls its function once, and answers on stdout.

    python grader_worker.py FILE FUNCTION < question.json > answer.json

The question is null (which parameters has it?) or the keyword arguments of the call. Standard library only, and no
import of composer: the interpreter inside may be another one. `graders.py` is the other end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Answer the one question on stdin."""
    file, name = os.path.abspath(sys.argv[1]), sys.argv[2]
    # what the function prints must not be taken for our answer
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    try:
        answer = ask(file, name, question)
    except MemoryError:
        raise  # a limit that was met is no mistake of the function
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}", "line": line_in(file, error)}
    json.dump(answer, answers)
    answers.close()


def ask(file: str, name: str, question: dict[str, Any] | None) -> dict[str, Any]:
    """The function's scores, or what it looks like."""
    spec = importlib.util.spec_from_file_location("composer_reward", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in it look their module up by name
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        return {"missing": [key for key, value in vars(module).items() if inspect.isfunction(value)]}
    if question is not None:
        return {"scores": plain(function(**question))}
    call = function if inspect.isroutine(function) else type(function).__call__
    if asyncio.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        return {"async": True}
    parameters = inspect.signature(function).parameters.values()
    return {"parameters": [[p.name, int(p.kind), p.default is not p.empty] for p in parameters]}


def plain(scores: object) -> list[float | str | None] | str:
    """Numbers as JSON has them; anything else by its looks, for the message that refuses it."""
    if not isinstance(scores, (list, tuple)):
        return f"a {type(scores).__name__}"
    return [None if score is None else _number(score) for score in scores]


def _number(score: Any) -> float | str:
    return float(score) if hasattr(score, "__float__") else repr(score)


def line_in(file: str, error: BaseException) -> int:
    """The deepest line of the file that the error went through; 0 where it went through none."""
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno is not None:
        lines.append(error.lineno)
    return lines[-1] if lines else 0


if __name__ == "__main__":
    main()
