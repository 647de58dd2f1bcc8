"""Where an agent went wrong: the assistant turns of a trace or a rollout that a hint could have helped.

A site names the turn to blame, which is not always the one whose call failed: a failing test blames the last turn
that changed a file before it, and with no such turn it merely shows the bug there was. Sites of the kinds in
`RECORDED` are no fault of the call (the user said no, a sibling call failed) and get no hint. What a single result
says is decided in `failures.py`; the hint's text in `hints.py`. Copied steps (another trace's) and steps that the
harness wrote have no sites.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_core.errors import UsageError
from composer_core.protocols import RolloutText
from composer_core.traces.failures import Failure, Result, classify, readable
from composer_core.traces.messages import text_of
from composer_core.traces.model import Observation, Step, ToolCall, Trace

HINTED = frozenset(
    {
        "tool_not_found",
        "json_decode",
        "type_error",
        "runtime_error",
        "repeated_failure",
        "failed_test",
        "timeout",
        "low_reward",
    }
)
"""Kinds that have a hint; third parties add theirs."""
RECORDED = frozenset({"permission", "rejection", "sibling"})
"""Kinds that are recorded and never hinted."""

WHOLE_ANSWER = -1
RAISED = "raised"
"""Key of a result's message where its text is an exception of the tool itself, not what a program wrote."""
LONGEST_MESSAGE = 600
"""Characters of an error's text that go into its context."""

_SHELL = re.compile(r"bash|shell|terminal|exec|command|run|python|ipython|console", re.IGNORECASE)
_EDITOR = re.compile(r"edit|write|create|insert|replace|patch|append", re.IGNORECASE)
_EDITING_COMMAND = re.compile(
    r"\bsed -i|(?<![<>&\d])>{1,2}(?!&|\s*/dev/)|\bapply_patch\b|\btee \b|\bgit (?:apply|checkout)\b"
)
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+|(?:[\w.~-]*/)+[\w.-]*", re.IGNORECASE)


@dataclass(frozen=True)
class ErrorSite:
    """One assistant turn that went wrong."""

    turn: int
    """Index among the assistant's turns, from 0; -1: the whole answer."""
    kind: str
    evidence: str
    """The text that decided."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """What a hint may use: `traces/hints.py`, `HintContext`."""

    @property
    def hinted(self) -> bool:
        """Whether a hint may be given about it."""
        return self.kind not in RECORDED


# -- recorded traces ---------------------------------------------------------------------------------------------------


def find_sites(trace: Trace) -> list[ErrorSite]:
    """The sites of a trace, in the order of their results; at most one of a kind for each turn."""
    tools = _tool_names(trace)
    found: dict[tuple[int, str], ErrorSite] = {}
    failed_before: dict[tuple[str, str], int] = {}
    last_edit: int | None = None
    for turn, step in _own_turns(trace):
        for call, seen, failure in _failures(step):
            site = _site(turn, call, seen, failure, trace.tools, tools)
            if failure.kind == "failed_test":
                if last_edit is None:
                    continue
                site = replace(site, turn=last_edit)
            elif site.hinted:
                site = _repeated(site, failed_before)
            found.setdefault((site.turn, site.kind), site)
        if any(_edits(call) for call in step.tool_calls):
            last_edit = turn
    return list(found.values())


def _own_turns(trace: Trace) -> Iterator[tuple[int, Step]]:
    turn = -1
    for step in trace.steps:
        if step.source != "agent":
            continue
        turn += 1
        if not (step.copied or step.synthetic):
            yield turn, step


def _failures(step: Step) -> Iterator[tuple[ToolCall | None, Observation, Failure]]:
    for call, seen in step.answers():
        kind, said = _named_error(seen)
        failure = classify(
            Result(
                text=text_of(seen.content) or said,
                is_error=seen.is_error,
                exit_code=seen.exit_code,
                error_type=kind,
                shell=not _raised(seen) and (call is None or _SHELL.search(call.name) is not None),
            )
        )
        if failure is not None:
            yield call, seen, failure


def _raised(seen: Observation) -> bool:
    message = seen.extra.get("message")
    return isinstance(message, Mapping) and message.get(RAISED) is True


def _named_error(seen: Observation) -> tuple[str, str]:
    """The type and the message of an error that the format keeps apart from the result (inspect-ai)."""
    message = seen.extra.get("message")
    error = message.get("error") if isinstance(message, Mapping) else None
    if not isinstance(error, Mapping):
        return "", ""
    return str(error.get("type", "")), str(error.get("message", ""))


def _site(
    turn: int,
    call: ToolCall | None,
    seen: Observation,
    failure: Failure,
    schemas: Sequence[Mapping[str, Any]],
    tools: Sequence[str],
) -> ErrorSite:
    context: dict[str, Any] = {
        "error_kind": failure.kind,
        "error_message": _shortened(readable(text_of(seen.content) or failure.evidence), failure.evidence),
    }
    if call is not None:
        context["tool_name"] = call.name
        context["arguments"] = call.text if call.text is not None else call.arguments
        schema = next((s for s in schemas if _function(s).get("name") == call.name), None)
        if schema is not None:
            context["tool_schema"] = _function(schema).get("parameters") or {}
    if tools:
        context["available_tools"] = list(tools)
    if seen.exit_code is not None:
        context["exit_code"] = seen.exit_code
    return ErrorSite(turn, failure.kind, failure.evidence, context)


def _repeated(site: ErrorSite, failed_before: dict[tuple[str, str], int]) -> ErrorSite:
    """The same site, or one of kind `repeated_failure` when this tool gave the same message at an earlier turn."""
    key = (str(site.context.get("tool_name", "")), _VARIABLE.sub("#", site.evidence))
    first = failed_before.setdefault(key, site.turn)
    if first == site.turn:
        return site
    context = {**site.context, "error_kind": "repeated_failure", "first_kind": site.kind, "first_turn": first}
    return replace(site, kind="repeated_failure", context=context)


def _edits(call: ToolCall) -> bool:
    """Whether a call may have changed a file."""
    if _SHELL.search(call.name):
        text = call.arguments if isinstance(call.arguments, str) else " ".join(map(str, call.arguments.values()))
        return _EDITING_COMMAND.search(text) is not None
    if call.name == "str_replace_editor" and isinstance(call.arguments, Mapping):
        return call.arguments.get("command") != "view"
    return _EDITOR.search(call.name) is not None


def _tool_names(trace: Trace) -> list[str]:
    """Names of the tools that the trace defines; where it defines none, of those that answered without an error."""
    defined = [str(_function(schema).get("name", "")) for schema in trace.tools]
    if defined:
        return [name for name in defined if name]
    calls = (pair for step in trace.steps for pair in step.answers())
    return sorted({call.name for call, seen in calls if call is not None and not seen.is_error})


def _function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    function = schema.get("function")
    return function if isinstance(function, Mapping) else schema


def _shortened(text: str, evidence: str) -> str:
    """The message whole where it is short, else from the line that decided on."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    start = max(text.find(evidence), 0) if evidence else 0
    return text[start : start + LONGEST_MESSAGE].rstrip() + " ..."


# -- rollouts ----------------------------------------------------------------------------------------------------------

_KIND = re.compile(r"[a-z][a-z0-9_]*")
SITES_COLUMN = "error_sites"
"""Column in which a rollout names sites itself: a list of `{"turn", "kind", "evidence", "context"}`."""
_EXPECTED = ("expected_output", "answer", "target")


def rollout_sites(rollout: RolloutText, *, below: float = 1.0) -> list[ErrorSite]:
    """The sites that a rollout's columns name, or, where they name none and its reward is below `below`, the whole.

    Raises:
        UsageError: the column `error_sites` does not hold sites.
    """
    named = rollout.columns.get(SITES_COLUMN)
    if named:
        return [_named_site(item, rollout) for item in named] if isinstance(named, list) else [_bad(named, rollout)]
    if rollout.reward is None or rollout.reward >= below:
        return []
    context = dict(rollout.columns)
    expected = next((context[name] for name in _EXPECTED if context.get(name) is not None), None)
    if expected is not None:
        context["expected_output"] = str(expected)
    evidence = f"reward {rollout.reward:g} < {below:g}"
    context |= {"error_kind": "low_reward", "reward": rollout.reward}
    return [ErrorSite(WHOLE_ANSWER, "low_reward", evidence, context)]


def _named_site(item: Any, rollout: RolloutText) -> ErrorSite:
    if not isinstance(item, Mapping) or not _KIND.fullmatch(str(item.get("kind"))):
        return _bad(item, rollout)
    turn, context, evidence = item.get("turn", WHOLE_ANSWER), item.get("context") or {}, str(item.get("evidence", ""))
    if not isinstance(turn, int) or not isinstance(context, Mapping):
        return _bad(item, rollout)
    kind = item["kind"]
    return ErrorSite(turn, kind, evidence, {"error_message": evidence, **context, "error_kind": kind})


def _bad(item: Any, rollout: RolloutText) -> ErrorSite:
    raise UsageError(
        f"rollout {rollout.uid}: no error site: {item!r:.200}",
        at=SITES_COLUMN,
        fix='a list of {"turn": 0, "kind": "runtime_error", "evidence": "what was said", "context": {}}',
    )
