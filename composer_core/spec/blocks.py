"""`use:` blocks: which contribution each names, and whether its keys fit that contribution's settings.

First all blocks are looked up, then all are checked: a key in the wrong block can only be told where it belongs when
the settings of the others are known. A block with a mistake leaves an empty stand-in, so that the check of the whole
spec does not report it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from composer_core.errors import MissingError, Problem, UsageError
from composer_core.plugins.contributions import Contribution, Kind
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import NoSettings, PathKind, Settings
from composer_core.spec.environment import has_placeholder
from composer_core.spec.errors import Section, known_keys, problem_at, problems_of, show
from composer_core.spec.model import PLUG_POINTS, WEIGHTED, Plugged, RunSpec, Shape
from composer_core.spec.paths import Folders, resolved
from composer_core.spec.yaml import Place, dotted


class _Weight(Settings):
    weight: float = Field(1.0, ge=0)


@dataclass
class _Block:
    key: str
    kind: Kind
    container: Any
    """The mapping or list that holds the block."""
    slot: str | int
    owner: Owner | None = None
    contribution: Contribution[Any] | None = None

    @property
    def raw(self) -> Any:
        return self.container[self.slot]


@dataclass
class Blocks:
    """The blocks of one spec; `resolve` replaces each in the data by a `Plugged`."""

    data: dict[str, Any]
    places: Mapping[str, Place]
    registry: Registry
    folders: Folders
    problems: list[Problem] = field(default_factory=list)

    def resolve(self) -> dict[str, tuple[str, ...]]:
        """Check and replace all blocks; what is wrong is in `problems`.

        Returns:
            Every key of the spec, those of the blocks included -> the dotted keys that end in it.
        """
        blocks = self._find()
        for block in blocks:
            self._look_up(block)
        sections = [_section(block, block.contribution) for block in blocks if block.contribution]
        known = known_keys([Section(RunSpec), *sections])
        for block in blocks:
            block.container[block.slot] = self._check(block, known)
        self._refuse_twins([block for block in blocks if block.kind is Kind.CHANNEL])
        return known

    def _find(self) -> list[_Block]:
        found = []
        for path, point in PLUG_POINTS.items():
            container: Any = self.data
            for part in path[:-1]:
                container = container.get(part) if isinstance(container, dict) else None
            if not isinstance(container, dict):
                continue
            name, key = path[-1], ".".join(path)
            if point.default is not None:
                container.setdefault(name, {"use": point.default})
            value = container.get(name)
            if point.shape is Shape.ONE and name in container:
                found.append(_Block(key, point.kind, container, name))
            elif point.shape is Shape.LIST and isinstance(value, list):
                found += [_Block(dotted(key, index), point.kind, value, index) for index in range(len(value))]
            elif point.shape is Shape.MAP and isinstance(value, dict):
                found += [_Block(dotted(key, given), point.kind, value, given) for given in value]
        return found

    def _look_up(self, block: _Block) -> None:
        raw, names = block.raw, ", ".join(self.registry.names(block.kind)) or "none installed"
        use_key = dotted(block.key, "use")
        if isinstance(raw, str):
            fix = f"- {{use: {raw}}}" if isinstance(block.slot, int) else f"{block.slot}: {{use: {raw}}}"
            self._problem(block.key, f"must be a block that names its {block.kind} with use, got {raw!r}", fix)
        elif not isinstance(raw, dict):
            self._problem(block.key, f"must be a block that names its {block.kind} with use, got {show(raw)}")
        elif "use" not in raw:
            self._problem(block.key, f"this block does not say which {block.kind} to use", f"add use: one of {names}")
        elif not isinstance(raw["use"], str):
            self._problem(use_key, f"must be the name of a {block.kind}, got {show(raw['use'])}", f"one of {names}")
        elif has_placeholder(raw["use"]):
            self._problem(use_key, "what code runs cannot come from the environment", f"one of {names}")
        else:
            try:
                block.owner, block.contribution = self.registry.get(block.kind, raw["use"])
            except (UsageError, MissingError) as error:
                self._problem(use_key, error.problem, error.fix, missing=isinstance(error, MissingError))

    def _check(self, block: _Block, known: Mapping[str, tuple[str, ...]]) -> Plugged:
        raw, contribution = block.raw, block.contribution
        if contribution is None:
            return Plugged(block.kind, "", "", NoSettings())
        options = {name: value for name, value in raw.items() if name != "use"}
        weight = {}
        if block.kind in WEIGHTED and "weight" in options:
            weight = {"weight": options.pop("weight")}
        for name, kind in _paths(contribution.settings, options):
            options[name] = resolved(options[name], kind, self.folders.of(dotted(block.key, name)))
        problems = problems_of(Section(_Weight, block.key), weight, places=self.places, known=known)
        settings: Settings = NoSettings()
        try:
            problems += problems_of(_section(block, contribution), options, places=self.places, known=known)
            if not problems:
                settings = contribution.settings.model_validate(options)
        except Exception as error:  # a validator of somebody's plugin; pydantic passes on what is not a ValueError
            who = f"the settings of {block.kind} {contribution.name!r} ({block.owner}) cannot check this block"
            problems.append(problem_at(self.places, block.key, f"{who}: {type(error).__name__}: {error}"))
        self.problems += problems
        share = 1.0 if problems else _Weight.model_validate(weight).weight
        return Plugged(block.kind, raw["use"], str(block.owner), settings, share)

    def _refuse_twins(self, channels: list[_Block]) -> None:
        first: dict[str, str] = {}
        for block in channels:
            name = block.raw.name
            if name and name in first:
                self._problem(
                    dotted(block.key, "use"), f"channel {name!r} stands twice (first at {first[name]})", "remove one"
                )
            first.setdefault(name, block.key)

    def _problem(self, key: str, problem: str, fix: str = "", *, missing: bool = False) -> None:
        self.problems.append(problem_at(self.places, key, problem, fix=fix, missing=missing))


def _section(block: _Block, contribution: Contribution[Any]) -> Section:
    beside = ("use", "weight") if block.kind in WEIGHTED else ("use",)
    return Section(contribution.settings, block.key, beside)


def _paths(settings: type[Settings], options: Mapping[str, Any]) -> list[tuple[str, PathKind]]:
    """The given options that their settings mark as paths."""
    return [
        (name, mark)
        for name, given in settings.model_fields.items()
        for mark in given.metadata
        if isinstance(mark, PathKind) and isinstance(options.get(name), str)
    ]
