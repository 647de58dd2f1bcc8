"""Weights that ranks hold parts of (FSDP2's `fully_shard`): a self-teacher reads and replaces its rank's own part.

FSDP gathers whole weights from those parts before a module's forward and before its backward. Who changes what a part
holds therefore changes what the next forward reads, on the ranks that all do it. What a teacher is stands in
`teachers.py`. Without a process group nothing is sharded, and nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def reshard(network: nn.Module) -> None:
    """Let go of whole weights that a forward left gathered, so that the next use gathers them again.

    A backward that is still to come does so by itself. Parameters are the sharded ones after it.
    """
    if not _may_be_sharded():
        return
    from torch.distributed.fsdp import FSDPModule  # takes a second to import, for runs that shard nothing as well

    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(network: nn.Module) -> bool:
    """Whether ranks hold parts of any of its trained weights."""
    reshard(network)  # gathered weights look like any others
    return any(_own(p) is not p for p in network.parameters() if p.requires_grad)


def own_parts(network: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of each trained weight, by name, without gradient: the memory of the weights themselves."""
    reshard(network)
    return {name: _own(p).detach() for name, p in network.named_parameters() if p.requires_grad}


def whole(parameter: Tensor) -> Tensor:
    """A weight in full, without gradient, the same on every rank, which must all ask."""
    if not _may_be_sharded():
        return parameter.detach()
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


@contextmanager
def exchanged(network: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Each rank's parts hold `values` inside, which hold the parts; after it each has its own again, to the bit.

    Pointing a parameter at another tensor would change nothing: FSDP gathers from memory that it keeps itself.
    """
    reshard(network)
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for name, parameter in network.named_parameters():
            if name in values:
                _exchange(_own(parameter), values[name])
                done.append((_own(parameter), values[name]))
        yield
    finally:
        reshard(network)
        for own, value in done:
            _exchange(own, value)


def _own(parameter: Tensor) -> Tensor:
    """The part of a weight that is here; the weight itself where it is not sharded."""
    if not _may_be_sharded():
        return parameter
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _exchange(own: Tensor, value: Tensor) -> None:
    # .data: autograd may have saved a weight for a backward, which will find it as it was
    kept = own.data.clone()
    own.data.copy_(value)
    value.copy_(kept)


def _may_be_sharded() -> bool:
    return dist.is_available() and dist.is_initialized()
