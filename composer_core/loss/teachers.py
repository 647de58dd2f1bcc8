"""Self-teachers: whose weights read the hint. `live` are the policy's own, `frozen` those it started with, `ema` an
average that follows the policy.

A channel says what it wants with a `SelfTeacher`; a trainer makes it once with `make_teacher`, hands `network` to its
view and calls `step` after every optimiser step. Teachers from other models are not here: they do not score yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from composer_core.errors import RunFailed
from composer_core.loss.targets import ema_update


@dataclass(frozen=True)
class SelfTeacher:
    """What a channel means by the model "teacher"."""

    weights: Literal["live", "frozen", "ema"]
    rate: float = 0.05
    """Share of the policy that enters the average at each optimiser step; only for `ema`."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}: at 0 the average never moves, use frozen")


class Teacher:
    """Weights under the name "teacher"; this one is the policy itself, unchanged by `step`."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def reading(self) -> AbstractContextManager[None]:
        """Around each of its forwards."""
        return nullcontext()

    def step(self) -> None:
        """After each optimiser step, on every rank."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beyond the policy: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFailed: it belongs to another teacher.
        """
        _check_names(self.state_dict(), state)


class FrozenCopy(Teacher):
    """The weights at the time it is made, for a policy without adapters.

    Not in a checkpoint: they are the starting model's, which a resumed run loads again.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(_copy(policy))


class FrozenBase(Teacher):
    """The policy with its adapters off (peft): the starting weights, without a second copy."""

    def reading(self) -> AbstractContextManager[None]:
        """Adapters are off inside, and on again after it."""
        network: Any = self.network
        return _adapters_off(network)


class Average(Teacher):
    """average <- (1 - rate) average + rate policy, over the weights that are trained; buffers are copied.

    Held in float32: in bfloat16 a step of rate 0.05 x a small change is rounded away.
    """

    def __init__(self, policy: nn.Module, rate: float) -> None:
        super().__init__(_copy(policy))
        self._policy, self._rate = policy, rate
        self._wide = {name: p.detach().float().clone() for name, p in policy.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def step(self) -> None:
        """One step towards the policy."""
        trained = dict(self._policy.named_parameters())
        ema_update(self._wide.values(), [trained[name].detach() for name in self._wide], rate=self._rate)
        for mine, theirs in zip(self.network.buffers(), self._policy.buffers(), strict=True):
            mine.copy_(theirs)
        self._write()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, float32, by the policy's parameter names."""
        return dict(self._wide)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFailed: it belongs to another teacher.
        """
        _check_names(self._wide, state)
        for name, mine in self._wide.items():
            mine.copy_(state[name])
        self._write()

    def _write(self) -> None:
        for name, parameter in self.network.named_parameters():
            if name in self._wide:
                parameter.copy_(self._wide[name])


def make_teacher(policy: nn.Module, wanted: SelfTeacher) -> Teacher:
    """The teacher a channel wants, from the policy as it is now: make it before the first optimiser step."""
    if wanted.weights == "live":
        return Teacher(policy)
    if wanted.weights == "ema":
        return Average(policy, wanted.rate)
    return FrozenBase(policy) if isinstance(policy, _Adapted) else FrozenCopy(policy)


@runtime_checkable
class _Adapted(Protocol):
    """A peft model."""

    peft_config: Any

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The base model inside."""
        ...


@contextmanager
def _adapters_off(network: Any) -> Iterator[None]:
    with network.disable_adapter():
        yield


def _copy(policy: nn.Module) -> nn.Module:
    copy = deepcopy(policy).requires_grad_(False)
    return copy.train(False)


def _check_names(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if mine.keys() != saved.keys():
        differing = sorted(mine.keys() ^ saved.keys())
        raise RunFailed(
            f"the checkpoint's teacher has other weights than this run's: {differing[0]} and {len(differing) - 1} more",
            fix="resume with the teacher, model and adapters that the checkpoint was made with",
        )
