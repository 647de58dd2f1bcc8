"""A teacher that answers from a file or by rules: offline runs, demonstrations, tests. Costs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.plugins.teacher_settings import ScriptedSettings
from composer_core.protocols import Cost, TeacherReply, TeacherRequest
from composer_core.teachers.errors import StateRefused


class ScriptedTeacher:
    """Implements `protocols.TeacherSource`."""

    identity = ""
    concurrency = 64
    requests_per_minute = None
    attempts = 1

    def __init__(self, settings: ScriptedSettings) -> None:
        """Read the file.

        Raises:
            UsageError: it cannot be read, or a line is not an answer, with its place.
        """
        self._answers = {} if settings.path is None else _read(Path(settings.path).expanduser())
        try:
            self._rules = [(re.compile(pattern), answer) for pattern, answer in settings.rules.items()]
        except re.error as error:
            raise UsageError(f"not a regular expression: {error}", at="rules") from error

    def body(self, request: TeacherRequest) -> Mapping[str, Any]:
        """The messages."""
        return {"messages": list(request.messages), "tools": list(request.tools)}

    def worst(self, request: TeacherRequest) -> Cost:
        """Nothing."""
        return Cost(0.0, 0)

    def estimate(self, request: TeacherRequest) -> Cost:
        """Nothing."""
        return Cost(0.0, 0)

    async def complete(self, request: TeacherRequest) -> TeacherReply:
        """The file's answer to this state, or the first rule's.

        Raises:
            StateRefused: neither has one.
        """
        message = self._answers.get(request.state_id) or self._by_rule(request)
        if message is None:
            raise StateRefused("the script has no answer")
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return TeacherReply(message, finish, prompt_tokens=0, completion_tokens=0, usd=0.0, model="scripted")

    async def aclose(self) -> None:
        """Nothing is open."""

    def _by_rule(self, request: TeacherRequest) -> Mapping[str, Any] | None:
        asked: Mapping[str, Any] = next(
            (m for m in reversed(request.messages) if m.get("role") in ("user", "tool")), {}
        )
        text = json.dumps(asked.get("content"), ensure_ascii=False)
        for pattern, answer in self._rules:
            if pattern.search(text):
                return {"role": "assistant", "content": answer}
        return None


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON texts may hold what splitlines() splits at
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the script cannot be read: {error}", at=str(path)) from error
    answers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            state, message = entry["state_id"], entry["message"]
            if not isinstance(state, str) or message["role"] != "assistant":
                raise ValueError("needs a state_id and an assistant message")
        except (ValueError, KeyError, TypeError) as error:
            form = '{"state_id": ..., "message": {"role": "assistant", ...}}'
            raise UsageError(f"not an answer: {error}", at=f"{path}:{number}", fix=f"write {form}") from error
        answers[state] = message
    return answers
