"""What the processes of one worker tell each other in numbers. Without torch.distributed each is on its own.

Every rank must call these at the same place with the same names or shapes. A wish to stop is agreed upon in
`control.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process_index() -> int:
    """Which of them this one is."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over the ranks, which must all call this with the same names."""
    names = sorted(values)
    numbers = torch.tensor([values[name] for name in names], dtype=torch.float64)
    if dist.is_initialized():
        numbers = numbers.to(device_of_collectives())
        dist.all_reduce(numbers)
    return dict(zip(names, numbers.tolist(), strict=True))


def gather(values: Tensor) -> Tensor:
    """The ranks' tensors one behind the other, in the order of ranks; they must have one shape."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def device_of_collectives() -> torch.device:
    """Where a tensor must be for a collective."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
