"""Finished rollouts as the driver reads them: what channels prepare their rows from, and what rewards are called with.

verl's queue gives back tokens and two texts for each rollout: its data row, and what `conversation.py` noted when it
was over. All here is plain lists; nothing of verl, no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from composer_core import errors
from composer_core.data.environments import Environments, take_state
from composer_core.protocols import RolloutText

ROW = "composer_row"
"""Field of a sample: its data row, JSON."""
EXTRA = "composer"
"""Key of `AgentLoopOutput.extra_fields`: `Record.extra`."""

_ERRORS = {kind.__name__: kind for kind in (errors.UsageError, errors.MissingError, errors.RunFailed)}
_OWN = ("prompt", "completion", "completion_ids")
"""Columns that rewards get under another name, or not."""


@dataclass(frozen=True)
class Record:
    """One rollout as it comes out of verl's queue."""

    uid: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    """1 for each token that the policy sampled."""
    row: str
    """Its data row, JSON."""
    extra: str
    """What the agent loop noted, JSON."""

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The data row, and what the rollout added to it."""
        return {**json.loads(self.row), **self.said["columns"]}

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """`columns`, `completion`, `truncated`, `turns`, `calls`, `failed_calls`, and maybe `environment`.

        Raises:
            ComposerError: the rollout failed; it is the error that ended it.
        """
        said: dict[str, Any] = json.loads(self.extra)
        if "failed" in said:
            raise _ERRORS[said["failed"].pop("kind")](**said["failed"])
        return said


def failed(error: errors.ComposerError) -> str:
    """`Record.extra` of a rollout that this error ended."""
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), errors.RunFailed.__name__)
    return json.dumps({"failed": {"kind": kind, "problem": error.problem, "at": error.at, "fix": error.fix}})


def rollout_texts(
    records: Sequence[Record], rewards: Sequence[float | None], *, tokenizer: Any
) -> Iterator[RolloutText]:
    """Rollouts as channels prepare their rows from them, in the order of `records`.

    Args:
        records: of one step.
        rewards: one for each; None where no reward applied.
        tokenizer: what made the ids.

    Raises:
        ComposerError: a rollout failed.
    """
    for record, reward in zip(records, rewards, strict=True):
        yield RolloutText(
            uid=record.uid,
            prompt_ids=list(record.prompt_ids),
            completion_ids=list(record.response_ids),
            action=[bool(flag) for flag in record.response_mask],
            reward=reward,
            columns=record.columns,
            tokenizer=tokenizer,
        )


def reward_arguments(records: Sequence[Record], copies: Copies | None = None) -> tuple[list[Any], dict[str, list[Any]]]:
    """What rewards are called with, `reward(completions, **columns)`, one entry for each record.

    Columns are those of the data, and `prompts`, `completion_ids` and, with `copies`, `environments`. A completion is a
    text where its prompt is one, else a list of chat messages.

    Raises:
        ComposerError: a rollout failed.
    """
    rows = [json.loads(record.row) for record in records]
    names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    columns["prompts"] = [record.columns["prompt"] for record in records]
    columns["completion_ids"] = [list(record.response_ids) for record in records]
    if copies is not None:
        columns["environments"] = copies.of([record.said["environment"] for record in records])
    return [record.said["completion"] for record in records], columns


class Copies:
    """Environments for rewards: each with the state that a rollout's own had in the process where it ran."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._made: list[Any] = []

    def of(self, states: Sequence[Mapping[str, Any]]) -> list[Any]:
        """One environment for each state; they are used again by the next call.

        Raises:
            RunFailed: an environment cannot be made.
        """
        while len(self._made) < len(states):
            self._made.append(self._environments())
        for environment, state in zip(self._made, states, strict=False):
            take_state(environment, state)
        return self._made[: len(states)]
