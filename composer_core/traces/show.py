"""A trace as text to read: who said what, which calls were made, what came back, and where it went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_core.traces.decode import dumps
from composer_core.traces.error_sites import ErrorSite, find_sites
from composer_core.traces.messages import text_of
from composer_core.traces.model import Content, Observation, Step, ToolCall, Trace

_LINES, _WIDTH = 6, 160


def trace_lines(trace: Trace, *, full: bool = False) -> Iterator[str]:
    """The trace's lines; `full` shortens nothing."""
    yield _heading(trace)
    sites: dict[int, list[ErrorSite]] = {}
    for site in find_sites(trace):
        sites.setdefault(site.turn, []).append(site)
    turn = -1
    for step in trace.steps:
        if step.source == "agent":
            turn += 1
            yield f"[turn {turn}] agent{_marks(step)}"
        elif step.message is not None:
            yield f"{step.source}{_marks(step)}"
        yield from _body(step, full)
        if step.source == "agent":
            yield from (f"  !! {_site(site)}" for site in sites.pop(turn, ()))
    for left in sites.values():  # a site of the whole answer
        yield from (f"!! {_site(site)}" for site in left)
    yield ""


def _heading(trace: Trace) -> str:
    heading = f"== {trace.id} ({trace.format}, {len(trace.steps)} steps)"
    if trace.origin is not None:
        at = "" if trace.origin.step is None else f" at step {trace.origin.step}"
        heading += f", {trace.origin.kind} of {trace.origin.trace}{at}"
    return heading


def _marks(step: Step) -> str:
    marks = [name for name in ("copied", "synthetic") if getattr(step, name)]
    return f" ({', '.join(marks)})" if marks else ""


def _body(step: Step, full: bool) -> Iterator[str]:
    if step.reasoning:
        yield from _block("(thinks) " + step.reasoning, "  ", full)
    yield from _block(text_of(step.message) + _images(step.message), "  ", full)
    for call in step.tool_calls:
        yield from _block(f"-> {call.name or '(no name)'} {_arguments(call)}", "  ", full)
    for seen in step.observations:
        yield from _block(f"<- {_outcome(seen)}{text_of(seen.content)}{_images(seen.content)}", "  ", full)


def _arguments(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else dumps(call.arguments)


def _outcome(seen: Observation) -> str:
    code = f"(exit code {seen.exit_code}) " if seen.exit_code else ""
    return ("ERROR " if seen.is_error else "") + code


def _images(content: Content) -> str:
    parts: list[dict[str, Any]] = content if isinstance(content, list) else []
    count = sum(part.get("type") == "image_url" for part in parts)
    return f" [{count} image{'s' if count > 1 else ''}]" if count else ""


def _site(site: ErrorSite) -> str:
    kind = site.kind if site.hinted else f"{site.kind} (recorded, no hint)"
    return f"{kind}: {' '.join(site.evidence.split())[:_WIDTH]}"


def _block(text: str, indent: str, full: bool) -> Iterator[str]:
    """The lines of a text; a long one is cut, and says by how much."""
    lines = text.splitlines()
    shown = lines if full else [line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..." for line in lines[:_LINES]]
    yield from (indent + line for line in shown)
    if len(shown) < len(lines):
        yield f"{indent}... {len(lines) - len(shown)} more lines"
