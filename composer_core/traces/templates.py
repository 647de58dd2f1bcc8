"""The core's own hints: one class for each kind of error, contributed as `HintPlugin`s under its name with hyphens.

A hint says what the agent should have known at the faulty turn, in words that help with that turn: what the tools
are, what the message was. It answers None when the context gives nothing to say, since a hint that carries no
information teaches the policy to ignore hints. It must not speak of a call as made already: for the reader, the turn
is yet to come. `UserTemplate` is a hint written in a spec. To add a kind, write a class here or in a plugin, and
contribute it; `hints.HintContext` lists what a context may hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Template
from typing import Any

from composer_core.plugins.settings import NoSettings, Settings

LONGEST_SCHEMA = 1500
"""Characters of a tool's schema in a hint."""
LONGEST_ARGUMENTS = 300


class _Hint:
    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or NoSettings()


class ToolNotFound(_Hint):
    """Names the tools there are."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None when the tools are not known."""
        tools = ", ".join(str(name) for name in context.get("available_tools") or ())
        if not tools:
            return None
        wrong = f"There is no tool {context['tool_name']}. " if context.get("tool_name") else ""
        return f"Hint: {wrong}The tools are: {tools}."


class JsonDecode(_Hint):
    """Asks for valid JSON, and shows the schema where it is known."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """Never None: that arguments are JSON is worth saying."""
        message = _message(context)
        said = f" Otherwise it fails with: {message}" if message else ""
        return f"Hint: the arguments of {_tool(context)} must be one valid JSON object.{_schema(context)}{said}"


class TypeErrorHint(_Hint):
    """Shows which arguments the tool takes."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None when neither schema nor message is known."""
        schema, message = _schema(context), _message(context)
        if not schema and not message:
            return None
        said = f" With wrong ones it fails with: {message}" if message else ""
        return f"Hint: mind the arguments of {_tool(context)}.{schema}{said}"


class RuntimeErrorHint(_Hint):
    """Says how the call would fail."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None without a message."""
        message, arguments = _message(context), _arguments(context)
        if not message:
            return None
        call = f"{_tool(context)} with {arguments}" if arguments else _tool(context)
        return f"Hint: calling {call} fails with: {message}\nDo what avoids this."


class RepeatedFailure(_Hint):
    """Says that this has failed before, and to do something else."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None without a message."""
        message = _message(context)
        if not message:
            return None
        return (
            f"Hint: {_tool(context)} has failed here before, and fails the same way again: {message}\n"
            "Do not repeat it: find out the cause first, or go another way."
        )


class FailedTest(_Hint):
    """Shows what the tests say to the change."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None without the report of the tests."""
        message, expected = _message(context), context.get("expected_output")
        if not message:
            return None
        wanted = f"\nExpected: {expected}" if expected else ""
        return f"Hint: a careless change here breaks the tests, which then say: {message}{wanted}"


class Timeout(_Hint):
    """Says that it takes too long."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None when it is not known what was called."""
        arguments = _arguments(context)
        if not context.get("tool_name"):
            return None
        call = f"{_tool(context)} with {arguments}" if arguments else _tool(context)
        return (
            f"Hint: calling {call} does not end in time. Make it smaller, give it a limit of its own, or run it in "
            "the background and look at its output."
        )


class LowReward(_Hint):
    """Gives away the expected output, or what the environment said to the answer."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None when neither is known: that an answer was bad tells nothing about a better one."""
        expected, feedback = context.get("expected_output"), context.get("feedback")
        parts = [f"A correct answer comes to: {expected}"] if expected else []
        parts += [f"An earlier answer got this feedback: {feedback}"] if feedback else []
        return f"Hint: {' '.join(parts)}" if parts else None


class UserTemplate:
    """A hint written in a spec: text with `$name` or `${name}`, `$$` for a dollar sign.

    Only names of the context are looked up: a template can reach nothing else.

    Raises:
        ValueError: a placeholder is not written as one.
    """

    def __init__(self, text: str) -> None:
        self._template = Template(text)
        if not self._template.is_valid():
            raise ValueError("a $ stands alone in this template: write $name, ${name}, or $$ for a dollar sign")
        if not text.strip():
            raise ValueError("this template is empty")
        self.names = tuple(self._template.get_identifiers())

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """None when the context lacks something the template names: half a hint would mislead."""
        values = {name: _shown(context.get(name)) for name in self.names}
        return None if any(not value for value in values.values()) else self._template.substitute(values)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _tool(context: Mapping[str, Any]) -> str:
    return str(context.get("tool_name") or "the tool")


def _message(context: Mapping[str, Any]) -> str:
    return str(context.get("error_message") or "").strip()


def _schema(context: Mapping[str, Any]) -> str:
    schema = context.get("tool_schema")
    return f" They follow this schema: {_shown(schema)[:LONGEST_SCHEMA]}" if schema else ""


def _arguments(context: Mapping[str, Any]) -> str:
    text = _shown(context.get("arguments"))
    return text if len(text) <= LONGEST_ARGUMENTS else text[:LONGEST_ARGUMENTS] + " ..."
