"""What a plugin's hooks return: one frozen dataclass per kind of contribution.

A contribution names its code by a string (`target="pkg.mod:Attr"`), which is imported by `load()` only, in the
process that runs it. So listing plugins and checking a spec import nothing heavy. `protocols.py` says what the
loaded object must look like.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from composer_core.errors import MissingError
from composer_core.jobs import Executor
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.plugins.settings import NoSettings, Settings
from composer_core.protocols import (
    Aggregation,
    Backend,
    HintTemplate,
    LossChannel,
    Need,
    Objective,
    Reward,
    TeacherSource,
    TraceReader,
)
from composer_core.sandbox import Sandbox

if TYPE_CHECKING:
    from composer_core.spec.model import RunSpec

NAME = re.compile(r"[a-z][a-z0-9-]*")
T = TypeVar("T")


class Kind(StrEnum):
    """The kinds of contribution; the value is what messages and `plugins list` call it."""

    CHANNEL = "channel"
    OBJECTIVE = "objective"
    BACKEND = "backend"
    EXECUTOR = "executor"
    REWARD = "reward"
    TEACHER = "teacher"
    READER = "trace reader"
    HINT = "hint"
    SANDBOX = "sandbox"


class Feature(StrEnum):
    """What an executor can do beyond starting a job."""

    LOGS = "logs"
    CANCEL = "cancel"
    MULTI_REPLICA = "multi-replica"
    REPLICAS_REACH_EACH_OTHER = "replicas-reach-each-other"
    SHARED_DISK = "shared-disk"


@dataclass(frozen=True, kw_only=True)
class Contribution(Generic[T]):
    """One named thing a plugin offers."""

    kind: ClassVar[Kind]
    hook: ClassVar[str]

    name: str
    """How a spec refers to it: `use: <name>`. Lower case, digits, hyphens."""
    summary: str
    """One line for `composer-run plugins list`."""
    target: str
    """`package.module:Attribute`, imported on need. Called with the settings, it gives the object that runs."""
    settings: type[Settings] = NoSettings
    install_hint: str = ""
    """The command that brings what `target` needs, shown when its import fails."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} must match {NAME.pattern}")
        if ":" not in self.target:
            raise ValueError(f"{self.name}: target {self.target!r} must read 'package.module:Attribute'")

    def load(self) -> Callable[..., T]:
        """Import the target.

        Raises:
            MissingError: a package is missing or the attribute is not there, with the install hint.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise MissingError(
                f"{self.kind} {self.name!r} cannot be loaded from {self.target}: {error}", fix=self.install_hint
            ) from error


def _no_needs(settings: Any) -> tuple[frozenset[Need], ...]:
    return (frozenset(),)


def _provides_nothing(spec: RunSpec) -> frozenset[Need]:
    return frozenset()


def _derives_nothing(spec: RunSpec) -> Derived:
    return Derived()


def _one_process(settings: Any) -> int:
    return 1


def _always(objective: str, settings: Any) -> bool:
    return True


def _no_sandbox(settings: Any) -> SandboxSettings | None:
    return None


def _no_price(settings: Any) -> float | None:
    return None


def _no_teachers(settings: Any) -> tuple[str, ...]:
    return ()


def _does_not_score(settings: Any) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class LossChannelPlugin(Contribution[LossChannel]):
    """A loss channel beside the policy loss; loads to a `protocols.LossChannel`."""

    kind: ClassVar[Kind] = Kind.CHANNEL
    hook: ClassVar[str] = "composer_loss_channels"
    needs: Callable[[Any], tuple[frozenset[Need], ...]] = _no_needs
    """From the settings to alternatives of what the trainer must provide, best first; the plan takes the first
    alternative that the backend can serve, and refuses the spec where none fits."""
    teachers: Callable[[Any], tuple[str, ...]] = _no_teachers
    """From the settings to the names under `teachers:` that must score texts for it; it is then a
    `loss.channel.TakesScorers`."""


@dataclass(frozen=True, kw_only=True)
class ObjectivePlugin(Contribution[Objective]):
    """A policy objective; loads to a `protocols.Objective`."""

    kind: ClassVar[Kind] = Kind.OBJECTIVE
    hook: ClassVar[str] = "composer_objectives"
    aggregation: Aggregation
    """How it averages token losses: a backend that computes it with the core's code must be able to serve this."""


@dataclass(frozen=True)
class Derived:
    """What a backend makes of a spec before anything starts; shown by `plan`, written to plan.json."""

    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    """Batch arithmetic in the user's words, e.g. ``{"sequences per step": 64}``."""
    upstream: Mapping[str, Any] = field(default_factory=dict)
    """The upstream configuration that will be used, complete."""
    notes: tuple[str, ...] = ()
    """What a user should know: a default that surprises, a knob that will not engage."""


@dataclass(frozen=True, kw_only=True)
class BackendPlugin(Contribution[Backend]):
    """A trainer; loads to a `protocols.Backend`."""

    kind: ClassVar[Kind] = Kind.BACKEND
    hook: ClassVar[str] = "composer_backends"
    provides: Callable[[RunSpec], frozenset[Need]] = _provides_nothing
    native_objectives: frozenset[str] = frozenset()
    """Objectives that the trainer computes itself, by name."""
    native: Callable[[str, Any], bool] = _always
    """From one of these names and its settings to whether the trainer's own code has all that they ask for; where it
    has not, the core computes the objective, if the trainer serves its aggregation."""
    aggregations: frozenset[Aggregation] = frozenset()
    """Aggregations it can serve when it runs the core's own objective code; empty: native objectives only."""
    honours: frozenset[str] = frozenset()
    """Sections of the spec that not every trainer has and this one does, as dotted keys of `spec.model.OPTIONAL`:
    `rollout`, `data.eval`, `limits.kl`, ... A spec that uses another of them is refused when it is planned."""
    derive: Callable[[RunSpec], Derived] = _derives_nothing
    """From the spec to the trainer's own numbers, without importing it. Raises SpecError for what it cannot honour."""
    processes: Callable[[Any], int] = _one_process
    """From the settings to how many processes of one machine train together. The worker starts them and brings them
    together under torch.distributed; each runs the same `Backend`, and only the main one writes."""


@dataclass(frozen=True, kw_only=True)
class ExecutorPlugin(Contribution[Executor]):
    """A place to run the plan; loads to a `protocols.Executor`."""

    kind: ClassVar[Kind] = Kind.EXECUTOR
    hook: ClassVar[str] = "composer_executors"
    features: frozenset[Feature] = frozenset()
    usd_per_hour: Callable[[Any], float | None] = _no_price
    """From the settings to the price of one replica, where it is known; `limits.usd` needs one."""


@dataclass(frozen=True, kw_only=True)
class RewardPlugin(Contribution[Reward]):
    """A reward function; loads to a `protocols.Reward`."""

    kind: ClassVar[Kind] = Kind.REWARD
    hook: ClassVar[str] = "composer_rewards"
    sandbox: Callable[[Any], SandboxSettings | None] = _no_sandbox
    """From the settings to the sandbox that it runs code in; it is then made with that as `sandbox=` beside its
    settings."""


@dataclass(frozen=True, kw_only=True)
class TeacherPlugin(Contribution[TeacherSource]):
    """A model that answers in the agent's place; loads to a `protocols.TeacherSource`."""

    kind: ClassVar[Kind] = Kind.TEACHER
    hook: ClassVar[str] = "composer_teachers"
    scores: Callable[[Any], bool] = _does_not_score
    """From the settings to whether it gives log-probs of a text it is handed; it is then a `protocols.Scores`."""


@dataclass(frozen=True, kw_only=True)
class TraceReaderPlugin(Contribution[TraceReader]):
    """A file format of agent sessions; loads to a `protocols.TraceReader`."""

    kind: ClassVar[Kind] = Kind.READER
    hook: ClassVar[str] = "composer_trace_readers"


@dataclass(frozen=True, kw_only=True)
class HintPlugin(Contribution[HintTemplate]):
    """The hint for one kind of error, which is its name; loads to a `protocols.HintTemplate`."""

    kind: ClassVar[Kind] = Kind.HINT
    hook: ClassVar[str] = "composer_hints"


@dataclass(frozen=True, kw_only=True)
class SandboxPlugin(Contribution[Sandbox]):
    """A place for code that nobody vouches for; loads to a `sandbox.Sandbox`."""

    kind: ClassVar[Kind] = Kind.SANDBOX
    hook: ClassVar[str] = "composer_sandboxes"
    settings: type[Settings] = SandboxSettings
    """These, or what requires more of them: the block is part of another contribution's settings, and has these."""


CONTRIBUTIONS: tuple[type[Contribution[Any]], ...] = (
    LossChannelPlugin,
    ObjectivePlugin,
    BackendPlugin,
    ExecutorPlugin,
    RewardPlugin,
    TeacherPlugin,
    TraceReaderPlugin,
    HintPlugin,
    SandboxPlugin,
)

Contributions = Iterable[Contribution[Any]]
