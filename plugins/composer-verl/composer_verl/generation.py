"""One generation in the driver: rollouts as they come out of verl's queue, scored and compared.

Letters: S rollouts, one of each group's members behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from composer_core.data.scoring import weigh
from composer_core.errors import RunFailed
from composer_core.protocols import Objective
from composer_core.run.context import NamedReward, RolloutSample
from composer_core.run.metrics import reward_metrics
from composer_verl.records import EXTRA, ROW, Copies, Record, reward_arguments

READ = ("prompts", "responses", "response_mask", ROW, "extra_fields")
"""Fields of the queue that `records_of` wants."""


@dataclass(frozen=True)
class Generation:
    """Rollouts of one step of verl's with their rewards."""

    records: Sequence[Record]
    scores: Mapping[str, Sequence[float | None]]
    """Reward -> one score per rollout; None where it did not apply."""
    rewards: Tensor
    """(S,) weighted sums; NaN where no reward applied."""
    groups: Sequence[int]
    """Which prompt of the step each rollout answers."""
    dropped: Sequence[bool]
    """Those that were cut off and that the objective leaves out: no loss sees them."""

    @property
    def all_dropped(self) -> bool:
        """Whether nothing is left."""
        return all(self.dropped)

    @property
    def metrics(self) -> dict[str, float]:
        """Under `reward/`."""
        return reward_metrics(self.rewards.tolist(), self.groups)

    @property
    def known(self) -> list[float | None]:
        """Each rollout's reward, None where there is none."""
        return [None if math.isnan(reward) else reward for reward in self.rewards.tolist()]

    def samples(self, advantages: Tensor, *, count: int) -> list[RolloutSample]:
        """Some rollouts for reading, spread over the prompts; `advantages` are (S,)."""
        wanted = min(count, len(self.records))
        return [self._sample(index * len(self.records) // wanted, advantages) for index in range(wanted)]

    def _sample(self, index: int, advantages: Tensor) -> RolloutSample:
        record = self.records[index]
        return RolloutSample(
            prompt=record.columns["prompt"],
            completion=_text(record.said["completion"]),
            rewards={name: values[index] for name, values in self.scores.items()},
            advantage=float(advantages[index]),
        )


def place_of(key: str) -> tuple[int, int]:
    """Prompt and member of a rollout, from its key in the queue: `<step>-<prompt>_<member>_0`."""
    uid, member, _ = key.split("_")
    return int(uid.rpartition("-")[2]), int(member)


def records_of(keys: Sequence[str], data: Mapping[str, Any], *, expected: int) -> list[Record]:
    """The rollouts of these keys, whose fields `READ` are `data`.

    Raises:
        RunFailed: there are fewer than `expected`.
    """
    if len(keys) != expected:
        raise RunFailed(f"verl returned {len(keys)} rollouts of {expected}", fix="its processes' logs say what failed")
    parts = zip(*(data[name].unbind() for name in READ[:3]), strict=True)
    texts = zip(_plain(data[ROW]), _plain(data["extra_fields"]), strict=True)
    return [
        Record(
            uid=key.replace("_", "-").removesuffix("-0"),
            prompt_ids=prompt.tolist(),
            response_ids=response.tolist(),
            response_mask=mask.tolist(),
            row=row,
            extra=extra[EXTRA],
        )
        for key, (prompt, response, mask), (row, extra) in zip(keys, parts, texts, strict=True)
    ]


def score(
    keys: Sequence[str],
    records: Sequence[Record],
    rewards: Sequence[NamedReward],
    copies: Copies | None,
    *,
    drop_truncated: bool,
) -> Generation:
    """Rollouts with what the run's rewards say of them.

    Raises:
        ComposerError: a rollout failed, or a reward did.
    """
    completions, columns = reward_arguments(records, copies)
    scores = {reward.name: reward.score(completions, **columns) for reward in rewards}
    totals = [weigh(rewards, scores, index=i) for i in range(len(records))]
    dropped = [drop_truncated and bool(record.said["truncated"]) for record in records]
    return Generation(records, scores, torch.tensor(totals), [place_of(key)[0] for key in keys], dropped)


def advantages_of(
    objective: Objective, generation: Generation, mask: Tensor, *, old: Tensor | None, reference: Tensor | None
) -> Tensor:
    """What the objective makes of the rewards, (S,).

    Args:
        objective: compares them.
        generation: the rollouts.
        mask: (S, tokens) jagged, 1 where the policy sampled and the loss looks.
        old: (S, tokens) jagged log-probs of the policy that sampled.
        reference: the same of the reference; None where there is none.
    """
    owner = torch.repeat_interleave(torch.arange(mask.shape[0]), mask.offsets().diff())
    flags = mask.values().bool()
    lengths = torch.zeros(mask.shape[0]).index_add(0, owner, flags.float())
    drift = None
    if old is not None and reference is not None:
        gap = torch.where(flags, old.values() - reference.values(), 0)
        drift = torch.zeros(mask.shape[0]).index_add(0, owner, gap.float())
    return objective.advantages(generation.rewards, torch.tensor(generation.groups), lengths, drift)


def prompt_columns(rows: Sequence[str], uids: Sequence[str], *, first: int = 0) -> dict[str, Any]:
    """Fields with which prompts enter the queue: data rows as JSON under these names, numbered from `first`."""
    count = len(rows)
    # verl wants messages to be there; the agent loop reads the row
    raw = numpy.empty(count, dtype=object)
    raw[:] = [[{"role": "user", "content": ""}] for _ in range(count)]
    return {
        ROW: numpy.array(rows, dtype=object),
        "raw_prompt": raw,
        "uid": numpy.array(uids, dtype=object),
        "index": numpy.arange(first, first + count),
    }


def _plain(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    lines: list[str] = []
    for message in completion:
        lines += [str(message["content"])] if message.get("content") else []
        lines += [str(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join(lines)
