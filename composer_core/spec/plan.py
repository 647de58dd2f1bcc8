"""A plan: all that will happen in a run, decided before anything starts, and all that a worker needs.

`make_plan` writes it in the control process; `restore` reads it back in the worker, against what the worker's own
interpreter has. A plan names contributions by owner and name; what is imported is what is installed under that name,
never something a file asks for. Whether the backend can run the spec is decided in `capability.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_core.errors import MissingError, SpecError, UsageError
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import CORE, Owner, Registry
from composer_core.spec.capability import Capability, PlannedChannel
from composer_core.spec.environment import fill, fill_spec, required_env
from composer_core.spec.errors import Section, problems_of
from composer_core.spec.honours import Sections
from composer_core.spec.load import LoadedSpec
from composer_core.spec.model import PLUG_POINTS, REPLAY_ONLY, Plugged, RunSpec
from composer_core.spec.resolved import as_json
from composer_core.spec.rollouts import NONE
from composer_core.spec.scorers import scorers_of
from composer_core.spec.yaml import Place

FORMAT = 1


@dataclass(frozen=True)
class PlannedPlugin:
    """A plugin that the run uses, and that the worker must have in the same version."""

    name: str
    version: str
    entry_point: str
    sha256: str = ""
    file: str = ""
    """Of a local plugin file: where it lies; `sha256` says what it held."""


@dataclass(frozen=True)
class Plan:
    """Everything a worker needs, as JSON values; no secrets and no values of the environment."""

    spec: Mapping[str, Any]
    """`resolved.as_json` of the spec."""
    spec_path: str
    plugins: tuple[PlannedPlugin, ...]
    channels: tuple[PlannedChannel, ...]
    objective: str
    """`native` (the trainer's own code) or `core`; empty where the spec has none."""
    processes: int = 1
    """Of one machine, that train together."""
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    upstream: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """What the run will write, relative to its directory."""
    versions: Mapping[str, str] = field(default_factory=dict)
    required_env: tuple[str, ...] = ()
    """Names of the environment variables that the worker needs; the plan holds their placeholders."""

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Read what `to_json` made.

        Raises:
            UsageError: it is of another format, or not a plan.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else None
            raise UsageError(f"this plan has format {found!r}, composer-core {version(CORE)} reads format {FORMAT}")
        try:
            return TypeAdapter(cls).validate_python({name: value for name, value in data.items() if name != "format"})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"this is not a plan: {where}: {first['msg']}") from error


def make_plan(loaded: LoadedSpec, registry: Registry) -> Plan:
    """Decide how the backend runs the spec.

    Args:
        loaded: the spec.
        registry: the one it was loaded with.

    Raises:
        SpecError: all that this backend cannot do for it.
    """
    able = Capability(loaded.spec, registry, loaded.places)
    channels = able.channels()
    objective = able.objective()
    processes = able.processes()
    derived = able.derived()
    sections = Sections(loaded.spec, registry, loaded.places, able.backend, channels)
    sections.check()
    if able.problems or sections.problems:
        raise SpecError([*able.problems, *sections.problems])
    plugins = tuple(_plugins(loaded.spec, registry))
    spec = as_json(loaded.spec)
    read_by_worker = {name: value for name, value in spec.items() if name not in REPLAY_ONLY}
    scorers = {name: spec["teachers"][name] for names in scorers_of(loaded.spec, registry).values() for name in names}
    return Plan(
        spec=spec,
        spec_path=os.path.abspath(os.path.expanduser(loaded.path)),
        plugins=plugins,
        channels=tuple(channels),
        objective=objective,
        processes=processes,
        numbers=derived.numbers,
        upstream=derived.upstream,
        notes=(*derived.notes, *sections.notes()),
        files=_files(loaded.spec),
        versions={CORE: version(CORE), **{plugin.name: plugin.version for plugin in plugins}},
        required_env=required_env([read_by_worker, scorers, derived.upstream]),
    )


def blocks_of(spec: RunSpec) -> Iterator[Plugged]:
    """All `use:` blocks of a spec."""
    yield from (spec.backend, spec.executor, *spec.loss.channels, *spec.data.rewards, *spec.teachers.values())
    if spec.loss.objective is not None:
        yield spec.loss.objective


def _plugins(spec: RunSpec, registry: Registry) -> Iterator[PlannedPlugin]:
    files = {Path(file).name: file for file in spec.plugins}
    used = {registry.get(block.kind, block.use)[0] for block in blocks_of(spec)}
    used |= {owner for owner in registry.owners if owner.sha256}
    for owner in sorted(used, key=lambda owner: (owner.name, owner.entry_point)):
        file = files.get(owner.name, "") if owner.sha256 else ""
        yield PlannedPlugin(owner.name, owner.version, owner.entry_point, owner.sha256, file)


def _files(spec: RunSpec) -> tuple[str, ...]:
    names = ["spec.yaml", "resolved.json", "plan.json", "provenance.json", "metrics.jsonl", "events.jsonl"]
    if spec.rollouts == NONE:
        names += ["recorded.jsonl"] if spec.data.traces is not None else []
    elif spec.train.sample_rollouts:
        names.append("rollouts.jsonl")
    folders = [f"{sink}/" for sink in spec.sinks if sink in ("tensorboard", "wandb")]  # trackio has a place of its own
    # a run without checkpoint.every still saves one when it is stopped
    return (*names, "lock.json", "logs/", *folders, "checkpoints/step_N/", "model/", "report.html")


# -- the worker's end -------------------------------------------------------------------------------------------------


def restore(plan_json: Any, registry: Registry) -> tuple[RunSpec, Plan]:
    """Rebuild the spec of a plan, its `${env:NAME}` filled in from this process's environment.

    What it returns may hold secrets: never write it anywhere. The plan's local plugin files are added to the registry.

    Args:
        plan_json: what plan.json holds.
        registry: what the worker has installed.

    Raises:
        UsageError: not a plan of this format; a local plugin file is gone or has changed; values that do not fit.
        MissingError: a plugin is not installed here, or in another version than the plan was made with; an
            environment variable is not set.
    """
    plan = Plan.from_json(plan_json)
    owners = {str(owner): owner for owner in (_same_plugin(planned, registry) for planned in plan.plugins)}
    try:
        data = _with_blocks(plan.spec, registry, owners)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the plan's spec is damaged: {type(error).__name__} {error}") from error
    _check(RunSpec, data)
    spec = fill_spec(RunSpec.model_validate(data), os.environ)
    return spec, replace(plan, upstream=fill(plan.upstream, os.environ, key="upstream"))


def _same_plugin(planned: PlannedPlugin, registry: Registry) -> Owner:
    if planned.file:
        return _same_file(planned, registry)
    fix = f"pip install {planned.name}=={planned.version}, for {sys.executable}"
    for owner in registry.owners:
        if (owner.name, owner.entry_point) != (planned.name, planned.entry_point):
            continue
        if owner.version != planned.version:
            raise MissingError(
                f"the plan was made with {planned.name} {planned.version}, the worker has {owner.version}", fix=fix
            )
        return owner
    reasons = [f": {problem}" for problem in registry.problems if problem.owner.name == planned.name]
    raise MissingError(
        f"the plan was made with {planned.name} {planned.version}, which the worker does not have{''.join(reasons)}",
        fix=fix,
    )


def _same_file(planned: PlannedPlugin, registry: Registry) -> Owner:
    path = Path(planned.file)
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"plugin file of the plan: {error.strerror}", at=planned.file) from error
    if found != planned.sha256:  # before it is imported
        raise UsageError(
            "this plugin file has changed since the plan was made", at=planned.file, fix="run the spec again"
        )
    return registry.add_file(path)


def _with_blocks(spec: Mapping[str, Any], registry: Registry, owners: Mapping[str, Owner]) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(dict(spec))
    for path, point in PLUG_POINTS.items():
        container: Any = data
        for part in path[:-1]:
            container = container[part]
        build = partial(_plugged, kind=point.kind, registry=registry, owners=owners)
        container[path[-1]] = point.map(build, container[path[-1]])
    return data


def _plugged(block: Mapping[str, Any], *, kind: Kind, registry: Registry, owners: Mapping[str, Owner]) -> Plugged:
    owner, use = owners[block["owner"]], block["use"]
    claims = [claimant for claimant, other in registry if (other.kind, other.name) == (kind, use)]
    if "/" not in use and claims != [owner]:  # the worker may have one more plugin that claims this name
        use = f"{owner.name}/{use}"
    _, contribution = registry.get(kind, use)
    _check(contribution.settings, block["settings"])
    settings = contribution.settings.model_validate(block["settings"])
    return Plugged(kind, use, str(owner), settings, float(block["weight"]))


def _check(model: type[Any], data: Any) -> None:
    problems = problems_of(Section(model), data, places={"": Place("plan.json")}, known={})
    if problems:
        raise SpecError(problems)
