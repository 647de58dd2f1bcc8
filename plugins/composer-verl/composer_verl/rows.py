"""What a rollout carries for our losses through verl: one field of bytes in its batches, and verl's batches read back.

verl moves a batch through a queue, deals it out to ranks, and splits it into mini-batches and micro-batches. A nested
tensor follows all of that, so each rollout's rows ride as JSON in one, `FIELD`, whatever channels there are.
Letters: S sequences, N tokens packed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from torch import Tensor

from composer_core.batch import Rollouts, Seqs
from composer_core.errors import RunFailed
from composer_core.protocols import Row

FIELD = "composer_rows"
"""(S, bytes) uint8, jagged."""


@dataclass(frozen=True)
class Sample:
    """What one rollout carries. The default is that of a sequence verl fills a batch up with."""

    uid: str = ""
    group: int = -1
    reward: float | None = None
    rows: Mapping[str, Row | None] = field(default_factory=dict)
    """Each channel's; a filler has none."""
    drawn: Mapping[str, Mapping[str, Sequence[Row]]] = field(default_factory=dict)
    """Optimiser step -> channel -> rows that have no rollout and go with this one (`CompositeLoss.draw`)."""

    @property
    def filler(self) -> bool:
        """Whether it is no rollout."""
        return not self.uid


def packed(plan: bytes) -> str:
    """plan.json as text that OmegaConf takes for nothing but text: a plan may hold `${env:NAME}`."""
    return base64.b64encode(plan).decode("ascii")


def unpacked(text: str) -> str:
    """What `packed` was given."""
    return base64.b64decode(text).decode("utf-8")


def encode(samples: Sequence[Sample]) -> Tensor:
    """`FIELD` of a batch."""
    # an unset number is null: JSON has no NaN
    texts = [orjson.dumps(vars(sample)) for sample in samples]
    return torch.nested.as_nested_tensor(
        [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts], layout=torch.jagged
    )


def decode(rows: Tensor) -> list[Sample]:
    """What `encode` was given, in the order of the batch."""
    return [Sample(**orjson.loads(part.numpy().tobytes())) for part in rows.cpu().unbind()]


def channel_rows(samples: Sequence[Sample], names: Sequence[str], *, step: int) -> dict[str, list[Row | None]]:
    """For each channel the rows that these samples hold in an optimiser step: the rollouts', or those drawn for it.

    Raises:
        RunFailed: the driver prepared none for this channel.
    """
    drawn = [sample.drawn.get(str(step), {}) for sample in samples]
    rows: dict[str, list[Row | None]] = {}
    for name in names:
        if any(name in own for own in drawn):
            rows[name] = [row for own in drawn for row in own.get(name, ())]
        elif any(not sample.filler and name not in sample.rows for sample in samples):
            raise RunFailed(f"verl's batch holds no rows for channel {name!r} at optimiser step {step}")
        else:
            rows[name] = [sample.rows.get(name) for sample in samples]
    return rows


def rollouts_of(data: Mapping[str, Any], samples: Sequence[Sample]) -> Rollouts:
    """A batch of verl's, which is packed already, as rollouts: prompt and response of each sequence."""
    ids: Tensor = data["input_ids"]
    cu = ids.offsets()
    lengths: Tensor = data["responses"].offsets().diff()
    at = torch.arange(int(cu[-1]), device=cu.device)
    owner = torch.repeat_interleave(torch.arange(len(cu) - 1, device=cu.device), cu.diff())
    response = at >= (cu[1:] - lengths)[owner]
    action = response.masked_scatter(response, data["response_mask"].values().bool())

    def tokens(name: str) -> Tensor | None:
        """(N,) of values per response token."""
        if name not in data.keys():  # noqa: SIM118  # a TensorDict is asked so
            return None
        values: Tensor = data[name].values()
        return values.new_zeros(len(at)).masked_scatter(response, values)

    return Rollouts(
        seqs=Seqs(ids.values(), cu, scored=action),
        action=action,
        advantages=tokens("advantages"),
        old_logps=tokens("old_log_probs"),
        sampler_logps=tokens("rollout_log_probs"),
        ref_logps=tokens("ref_log_prob"),
        rewards=torch.tensor([math.nan if s.reward is None else s.reward for s in samples], device=cu.device),
        group=torch.tensor([sample.group for sample in samples], device=cu.device),
        uid=tuple(sample.uid for sample in samples),
    )
