"""What a backend can do for a spec, from the registry's facts and the backend's own word.

A spec can be right and still not run here: a channel needs what its backend cannot give, or an objective averages in a
way that the backend cannot serve. Nothing of a trainer is imported to find out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from composer_core.errors import ComposerError, MissingError, Problem, SpecError
from composer_core.plugins.contributions import BackendPlugin, Derived, LossChannelPlugin, ObjectivePlugin
from composer_core.plugins.registry import CORE, Owner, Registry
from composer_core.plugins.settings import Settings
from composer_core.protocols import Need
from composer_core.spec.errors import place_of, problem_at
from composer_core.spec.model import Plugged, RunSpec
from composer_core.spec.rollouts import NONE
from composer_core.spec.yaml import Place, dotted


@dataclass(frozen=True)
class PlannedChannel:
    """What the backend will do for a channel."""

    name: str
    weight: float
    needs: tuple[str, ...]
    """The alternative that was chosen, sorted."""
    reason: str


@dataclass
class Capability:
    """Questions about one spec; each answer adds what cannot be done to `problems`."""

    spec: RunSpec
    registry: Registry
    places: Mapping[str, Place]
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend_owner, backend = self.registry.get(self.spec.backend.kind, self.spec.backend.use)
        assert isinstance(backend, BackendPlugin)
        self.backend = backend

    def _refuse(self, key: str, problem: str, fix: str = "", *, missing: bool = False) -> None:
        self.problems.append(problem_at(self.places, key, problem, fix=fix, missing=missing))

    def _blame(self, key: str, owner: Owner, what: str, error: Exception) -> None:
        self._refuse(key, f"{what} ({owner}) failed: {type(error).__name__}: {error}")

    def channels(self) -> list[PlannedChannel]:
        """For each channel the first way of computing it that the backend can serve."""
        if not self.spec.loss.channels:
            return []
        try:
            provided = frozenset(self.backend.provides(self.spec))
        except Exception as error:  # a plugin's mistake, whatever its type
            self._blame("backend", self.backend_owner, f"backend {self.backend.name!r}: provides", error)
            return []
        planned = [self._channel(index, block, provided) for index, block in enumerate(self.spec.loss.channels)]
        return [channel for channel in planned if channel is not None]

    def _channel(self, index: int, block: Plugged, provided: frozenset[Need]) -> PlannedChannel | None:
        key = dotted("loss.channels", index)
        owner, contribution = self.registry.get(block.kind, block.use)
        assert isinstance(contribution, LossChannelPlugin)
        try:
            alternatives = [frozenset(Need(need) for need in one) for one in contribution.needs(block.settings)]
        except Exception as error:  # a plugin's mistake, whatever its type
            self._blame(key, owner, f"channel {block.name!r}: needs", error)
            return None
        for number, chosen in enumerate(alternatives):
            if chosen <= provided:
                missed = sorted(frozenset().union(*alternatives[:number]) - provided)
                reason = f"backend {self.backend.name!r} provides it"
                if missed:
                    reason += f"; a better way needs {', '.join(missed)}, which it does not provide"
                return PlannedChannel(block.name, block.weight, tuple(sorted(chosen)), reason)
        ways = " or ".join(_braces(one) for one in alternatives) or "{}"
        self._refuse(
            key,
            f"backend {self.backend.name!r} cannot run channel {block.name!r}: "
            f"it needs {ways}, {self.backend.name} provides {_braces(provided)}",
        )
        return None

    def objective(self) -> str:
        """`native` or `core`: whose code computes the objective; empty when neither can, or there is none."""
        block = self.spec.loss.objective
        if block is None:
            return ""
        if self.spec.rollouts == NONE:
            return "core"  # no trainer's own loss is on recorded data, and lm-ce averages as every trainer can
        owner, contribution = self.registry.get(block.kind, block.use)
        assert isinstance(contribution, ObjectivePlugin)
        try:
            if _is_native(self.backend, self.backend_owner, contribution, owner, block.settings):
                return "native"
        except Exception as error:  # a plugin's mistake, whatever its type
            self._blame("backend", self.backend_owner, f"backend {self.backend.name!r}: native", error)
            return ""
        if contribution.aggregation in self.backend.aggregations:
            return "core"
        able = [
            backend.name
            for backend_owner, backend in self.registry
            if isinstance(backend, BackendPlugin)
            and backend is not self.backend
            and (
                contribution.aggregation in backend.aggregations
                or _names_native(backend, backend_owner, contribution, owner)
            )
        ]
        own = f"it is none of its own ({', '.join(sorted(self.backend.native_objectives)) or 'none'})"
        if _names_native(self.backend, self.backend_owner, contribution, owner):
            own = "its own code has not all that these settings ask for"
        served = ", ".join(sorted(self.backend.aggregations)) or "none"
        self._refuse(
            "loss.objective.use",
            f"backend {self.backend.name!r} cannot run objective {block.name!r}: {own}, and "
            f"its aggregation {contribution.aggregation} is none that it serves ({served})",
            f"backends that can: {', '.join(able)}" if able else "no installed backend can",
        )
        return ""

    def processes(self) -> int:
        """How many processes train together."""
        try:
            count = int(self.backend.processes(self.spec.backend.settings))
        except Exception as error:  # a plugin's mistake, whatever its type
            self._blame("backend", self.backend_owner, f"backend {self.backend.name!r}: processes", error)
            return 1
        train = self.spec.train
        shared, what, members = (
            train.sequences_per_step,
            "sequences of a step (prompts_per_step x group_size)",
            train.group_size,
        )
        if self.spec.rollouts == NONE:
            shared, what, members = train.prompts_per_step, "recorded rows of a step", 1
        if shared % count:
            self._refuse(
                "train.prompts_per_step",
                f"the {shared} {what} cannot be shared equally by {count} processes",
                f"a multiple of {count // math.gcd(count, members)}",
            )
        return count

    def derived(self) -> Derived:
        """The backend's own numbers."""
        what = f"backend {self.backend.name!r}: derive"
        try:
            derived = self.backend.derive(self.spec)
            json.dumps([dict(derived.numbers), dict(derived.upstream), list(derived.notes)], allow_nan=False)
        except SpecError as error:
            self.problems += [self._placed(problem) for problem in error.problems]
        except ComposerError as error:
            self._refuse("backend", error.problem, error.fix, missing=isinstance(error, MissingError))
        except Exception as error:  # a plugin's mistake, whatever its type
            self._blame("backend", self.backend_owner, what, error)
        else:
            return derived
        return Derived()

    def _placed(self, problem: Problem) -> Problem:
        if problem.line or problem.source:
            return problem
        place = place_of(self.places, problem.key)
        return replace(problem, source=place.source, line=place.line, column=place.column)


def _is_native(
    backend: BackendPlugin, backend_owner: Owner, objective: ObjectivePlugin, owner: Owner, settings: Settings
) -> bool:
    return _names_native(backend, backend_owner, objective, owner) and backend.native(objective.name, settings)


def _names_native(backend: BackendPlugin, backend_owner: Owner, objective: ObjectivePlugin, owner: Owner) -> bool:
    # A third party's objective of the same name is another formula: the trainer's own code must not stand in for it.
    return objective.name in backend.native_objectives and owner.name in (CORE, backend_owner.name)


def _braces(needs: frozenset[Need]) -> str:
    return f"{{{', '.join(sorted(needs))}}}"
