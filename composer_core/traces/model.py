"""A recorded agent session as Composer sees it: traces of steps, in the shape of ATIF, without torch.

What lives here is what every reader produces and everybody else consumes. A trace is always LINEAR: a sub-agent, an
edited branch and a continuation file are traces of their own that say where they hang (`Trace.origin`). Steps that a
trace shares with its origin are marked `copied`, so nothing is learnt from twice. Not here: chat messages
(`messages.py`), file formats (`readers/`), what went wrong in a step (`error_sites.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Content = str | list[dict[str, Any]] | None
"""Text, or OpenAI content parts (``{"type": "text", "text": ...}``, ``{"type": "image_url", ...}``), or nothing."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the agent made."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """Parsed; a string is what the agent wrote where that is no JSON object."""
    text: str | None = None
    """The arguments' JSON text as it was sent; None where the format keeps an object."""
    in_message: bool = False
    """The call is written in the message itself (a fenced command): chat messages must not repeat it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What came back from one call, or from the environment when `call_id` is empty."""

    call_id: str
    content: Content
    is_error: bool | None = None
    """The format's own flag; None where the format has none or left it out."""
    exit_code: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: a system or user message, or an agent's turn with its calls and what they returned.

    A non-agent step without a message carries results whose call is not in the trace.

    Raises:
        ValueError: `token_ids` and `logprobs` are both there and differ in length.
    """

    source: Literal["system", "user", "agent"]
    message: Content = None
    reasoning: str | None = None
    """The agent's thinking, apart from the message."""
    tool_calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    copied: bool = False
    """Another trace holds this step as its own: context here, nothing to count or to learn from."""
    synthetic: bool = False
    """An agent step that the harness wrote in the model's place (an API error, an interruption notice)."""
    token_ids: tuple[int, ...] | None = None
    """Ids the model generated for this turn."""
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    """Of `token_ids`, same length."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the format knows beyond this shape; `extra["message"]` holds further keys of a chat message."""

    def answers(self) -> list[tuple[ToolCall | None, Observation]]:
        """Each observation with the call it answers: by id, by position where neither has one, else None."""
        by_id = {call.id: call for call in self.tool_calls if call.id}
        nameless = iter([call for call in self.tool_calls if not call.id])
        return [(by_id.get(seen.call_id) if seen.call_id else next(nameless, None), seen) for seen in self.observations]

    def __post_init__(self) -> None:
        ids, logprobs = self.token_ids, self.logprobs
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} token ids but {len(logprobs)} log-probs")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trace hangs in another one."""

    kind: Literal["subagent", "branch", "continuation"]
    trace: str
    """Id of that trace."""
    step: int | None = None
    """Index of the last step they share (branch), or of the step that called the sub-agent, where known."""
    call_id: str = ""
    """The call that started the sub-agent, where known."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One linear session. `steps` may read its bodies from the file on access: keep the file in place."""

    id: str
    """Unique within what was read; begins with the file's stem."""
    steps: Sequence[Step]
    format: str = ""
    """Name of the reader."""
    source: str = ""
    """The file it was read from."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions in OpenAI form (``{"type": "function", "function": {...}}``), where the format has them."""
    origin: Origin | None = None
    reward: float | None = None
    """Where the format has a score for the whole session."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[int]:
        """Indices of the agent's steps; reads every body once where they are lazy."""
        return [index for index, step in enumerate(self.steps) if step.source == "agent"]


@dataclass(frozen=True, slots=True)
class TraceState:
    """One decision of the agent: what it had seen, and what it did."""

    state_id: str
    """``<trace id>::<index of the agent's turn, four digits>``."""
    messages: list[dict[str, Any]]
    """OpenAI chat up to this turn."""
    action: dict[str, Any]
    """The assistant message that the agent answered with, thinking included (``reasoning_content``)."""
    step: int
    """Index of that turn in `Trace.steps`."""
