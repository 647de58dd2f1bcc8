"""The section `rollout:` as TRL's numbers. Light.

TRL samples a turn; where it calls tools, TRL runs them, appends what they returned and samples the next turn:

    assistant turns = 1 + tool-calling iterations           max_tool_calling_iterations = max_turns - 1

so only a call leads to a second turn. What TRL cannot make of a section stands in the core, in
`spec/rollout_problems.py`; the functions are loaded by `data/tools.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.spec.model import RunSpec


def rollout_fields(spec: RunSpec) -> Mapping[str, Any]:
    """GRPOConfig's fields for the section; none without it."""
    return {} if spec.rollout is None else {"max_tool_calling_iterations": spec.rollout.max_turns - 1}


def rollout_numbers(spec: RunSpec) -> Mapping[str, int]:
    """The section in words, for `plan`."""
    return {} if spec.rollout is None else {"longest rollout (assistant turns)": spec.rollout.max_turns}


def rollout_notes(spec: RunSpec) -> Iterator[str]:
    """What surprises about a rollout of several turns."""
    if spec.rollout is None:
        return
    yield (
        "train.max_completion_tokens counts what tools return too: a result that does not fit any more ends the "
        "rollout before it is shown"
    )
    if spec.rollout.environment is not None:
        yield "trl makes an environment once and calls its reset(**row) before each rollout"
