"""What the agents share that write their action into the message instead of calling a tool.

Their next observation is a user message. `with_actions` finds the action, so that everybody downstream sees a call
and its result, while chat messages still read as the model wrote and saw them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from composer_core.traces.messages import text_of
from composer_core.traces.model import Observation, Step, ToolCall

TOOL = "bash"
"""The one tool of these agents."""


def with_actions(
    steps: Iterable[Step],
    *,
    action: Callable[[Step], str | None],
    answers: Callable[[Step], bool],
    observe: Callable[[Step], Observation] | None = None,
) -> list[Step]:
    """Give each agent's step the call that its message holds, and fold the user message behind it into its result.

    Args:
        steps: as `from_messages` makes them.
        action: the command in an agent's step; None where there is none.
        answers: whether a user's step behind such a turn is its observation.
        observe: the observation of such a step; default: its text, unmarked.
    """
    found: list[Step] = []
    for step in steps:
        if step.source == "agent" and not step.tool_calls:
            command = action(step)
            if command is not None:
                call = ToolCall(id="", name=TOOL, arguments={"command": command}, in_message=True)
                step = replace(step, tool_calls=(call,))
        elif step.source == "user" and _waits(found) and answers(step):
            seen = observe(step) if observe else Observation(call_id="", content=text_of(step.message))
            found[-1] = replace(found[-1], observations=(seen,))
            continue
        found.append(step)
    return found


def _waits(steps: list[Step]) -> bool:
    return bool(steps) and bool(steps[-1].tool_calls) and not steps[-1].observations
