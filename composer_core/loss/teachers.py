"""Self-teachers: whose weights read the hint. `live` are the policy's own, `frozen` those it started with, `ema` an
average that follows the policy.

A channel says what it wants with a `SelfTeacher`; a trainer makes it once with `make_teacher`, hands it to its view
and calls `step` after every optimiser step. Teachers of other models are not here: their servers score
where rollouts end (`teachers/scoring.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from composer_core.errors import RunFailed
from composer_core.loss.shards import exchanged, is_sharded, own_parts, reshard, whole
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


class Stored(Teacher):
    """The policy's own modules with other values in its trained weights: `reading` puts them in, and back.

    A second model would need a second copy of the weights that are not trained, and a trainer may have replaced the
    policy's `forward` by one that a copy of it would share. Of weights that are sharded over ranks each stores its own
    parts.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self._put_in = exchanged if is_sharded(policy) else _swapped
        self._values = {name: own.clone() for name, own in own_parts(policy).items()}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The stored values are in the weights inside, on every rank; run no backward there."""
        torch.clear_autocast_cache()  # else a forward under autocast would read low-precision copies of the policy's
        try:
            with self._put_in(self.network, self._values):
                yield
        finally:
            torch.clear_autocast_cache()


class FrozenBase(Teacher):
    """The policy with its adapters off (peft): the starting weights, as long as the adapters began at nothing."""

    def reading(self) -> AbstractContextManager[None]:
        """Adapters are off inside, and on again after it."""
        network: Any = self.network
        return _adapters_off(network)


class Average(Stored):
    """average <- (1 - rate) average + rate policy, over the weights that are trained.

    Held in float32: in bfloat16 a step of rate 0.05 x a small change is rounded away.
    """

    def __init__(self, policy: nn.Module, rate: float) -> None:
        super().__init__(policy)
        self._rate = rate
        self._wide = {name: value.float() for name, value in self._values.items()}

    @torch.no_grad()
    def step(self) -> None:
        """One step towards the policy."""
        trained = own_parts(self.network)
        ema_update(self._wide.values(), [trained[name] for name in self._wide], rate=self._rate)
        self._narrow()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, float32, by the policy's parameter names; of sharded weights this rank's parts alone."""
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
        self._narrow()

    def _narrow(self) -> None:
        for name, value in self._values.items():
            if value is not self._wide[name]:  # float32 weights need no second copy
                value.copy_(self._wide[name])


def make_teacher(policy: nn.Module, wanted: SelfTeacher) -> Teacher:
    """The teacher a channel wants, from the policy as it is now: make it before the first optimiser step."""
    if wanted.weights == "live":
        return Teacher(policy)
    if wanted.weights == "ema":
        return Average(policy, wanted.rate)
    return FrozenBase(policy) if _is_fresh(policy) else Stored(policy)


def _is_fresh(policy: nn.Module) -> bool:
    """Whether a policy has LoRA adapters that add nothing yet, so that without them it is what it started as."""
    if not isinstance(policy, _Adapted):
        return False
    adapted = {name for name, p in policy.named_parameters() if p.requires_grad}
    second = {name: p for name, p in policy.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name}
    # whole: a rank whose own part is zeros would else take another branch than the others
    return all(".lora_" in name for name in adapted) and not any(bool(whole(p).any()) for p in second.values())


@runtime_checkable
class _Adapted(Protocol):
    """A peft model."""

    peft_config: Any

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The base model inside."""
        ...


@contextmanager
def _swapped(network: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Weights point at `values` inside: nothing is copied."""
    known = {name: p for name, p in network.named_parameters() if name in values}
    own = {name: p.data for name, p in known.items()}
    try:
        for name, parameter in known.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in known.items():
            parameter.data = own[name]


@contextmanager
def _adapters_off(network: Any) -> Iterator[None]:
    with network.disable_adapter():
        try:
            yield
        finally:
            # peft marks adapters as trained again on leaving: that must be the sharded ones, whom gathered ones follow
            reshard(network)


def _check_names(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if mine.keys() != saved.keys():
        differing = sorted(mine.keys() ^ saved.keys())
        raise RunFailed(
            f"the checkpoint's teacher has other weights than this run's: {differing[0]} and {len(differing) - 1} more",
            fix="resume with the teacher, model and adapters that the checkpoint was made with",
        )
