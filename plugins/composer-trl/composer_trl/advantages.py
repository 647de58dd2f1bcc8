"""Advantages of an objective that TRL does not have, from what TRL's generation left behind.

TRL has its own by then; these take their place. Letters: B rows of this process, S of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_core.loss.reduce import select
from composer_core.protocols import Objective
from composer_core.run.collectives import gather, process_index
from composer_trl.micro_batch import sampled


def objective_advantages(
    objective: Objective,
    batch: Mapping[str, Any],
    *,
    rewards: Tensor,
    group_size: int,
    policy_logps: Callable[[], Tensor],
) -> tuple[Tensor, Tensor]:
    """The objective's advantages of this process' rows, (B,), and of all, (S,).

    Args:
        objective: compares the rewards.
        batch: TRL's, before it is shuffled.
        rewards: (S,) of all processes, NaN where a rollout was not rewarded.
        group_size: rows of one prompt, which lie together.
        policy_logps: (B, C) of the policy that sampled; asked for only where there is a reference to compare with.
    """
    action = sampled(batch)
    reference = batch.get("ref_per_token_logps")
    drift = None
    if reference is not None:
        old = batch.get("old_per_token_logps")
        drift = gather(select((policy_logps() if old is None else old) - reference, action).sum(-1))
    group = torch.arange(len(rewards), device=rewards.device) // group_size
    everyone = objective.advantages(rewards, group, gather(action.sum(-1).float()), drift)
    first = process_index() * len(action)
    return everyone[first : first + len(action)], everyone
