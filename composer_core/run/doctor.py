"""`composer-run doctor`: what of this machine and environment is in the way of a run, each with what to do.

A finding is one function here that looks at one thing; to add one, write it and put it into `examine`. A backend adds
its own by `diagnose` (see `Diagnoses`). Nothing is changed, and torch is imported only by the `deep` ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from packaging.requirements import Requirement
from packaging.version import Version

from composer_core.plugins.contributions import Contribution, Kind
from composer_core.plugins.describe import default_settings
from composer_core.plugins.registry import Registry
from composer_core.plugins.try_out import try_out
from composer_core.run.directory import RUNS_VARIABLE

GIB = 1 << 30
LITTLE_DISK, NO_DISK = 10 * GIB, GIB
LITTLE_MEMORY, NO_MEMORY = 4 * GIB, GIB
TESTED = {"torch": "2.13", "transformers": "5.10", "trl": "1.16", "verl": "0.9"}
"""Releases that the suite runs against (constraints.txt pins them exactly); others may work."""
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
ON = ("1", "ON", "YES", "TRUE")
"""What Hugging Face's libraries take for a yes."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """A run works, but worse than it could, or in a way that was not tested."""
    FAIL = "fail"
    """Some run cannot work."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at; what `composer-run doctor --json` prints a list of."""

    name: str
    level: Level
    found: str
    fix: str = ""


@runtime_checkable
class Diagnoses(Protocol):
    """A backend that has more to look at than its `check`, which is made before every run: what takes seconds."""

    def diagnose(self) -> Iterable[Finding]:
        """What it finds on this machine. Called only where its `check` found nothing."""
        ...


def examine(registry: Registry, runs: Path, cache: Path, *, deep: bool) -> list[Finding]:
    """Look at everything.

    Args:
        registry: what is installed.
        runs: the folder of runs, which need not be there yet.
        cache: the folder of made models, likewise.
        deep: also import torch and every contribution, and run the backends' own checks.
    """
    findings = [_python(), _system(), _memory(), _threads()]
    findings += [_disk("disk for runs", runs, RUNS_VARIABLE), _disk("disk for made models", cache, "COMPOSER_CACHE")]
    findings += [*_plugins(registry), *_upstreams(), *_requirements(), _offline()]
    if deep:
        findings += [_torch(), *_contributions(registry)]
    return findings


# -- the machine -------------------------------------------------------------------------------------------------------


def _python() -> Finding:
    return Finding("python", Level.OK, f"{platform.python_version()} at {sys.executable}")


def _system() -> Finding:
    return Finding("system", Level.OK, f"{platform.system()} {platform.release()}, {platform.machine()}")


def usable_cores() -> int:
    """Cores that this process may use: the machine's, less by affinity, less by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _first_line(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else cores


def _threads() -> Finding:
    """Torch starts as many threads as the machine has cores, whatever a container allows."""
    usable, machine = usable_cores(), os.cpu_count() or 1
    cores = f"{usable} usable cores" + (f" of {machine}" if machine != usable else "")
    setting = os.environ.get("OMP_NUM_THREADS", "")
    best = f"export OMP_NUM_THREADS={usable}, or executor: {{use: inline, threads: {usable}}} in the spec"
    if not setting:
        level = Level.WARN if machine > usable else Level.OK
        return Finding("threads", level, f"{cores}, OMP_NUM_THREADS not set", best if level is Level.WARN else "")
    if not setting.isdigit() or not 1 <= int(setting) <= usable:
        return Finding("threads", Level.WARN, f"{cores}, OMP_NUM_THREADS={setting}", best)
    return Finding("threads", Level.OK, f"{cores}, OMP_NUM_THREADS={setting}")


def available_memory() -> int | None:
    """Bytes that can still be had: the system's, less by a container's limit; None where neither is told."""
    found = []
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = (_first_line(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        found.append(int(limit) - int(used))
    return min(found, default=None)


def _memory() -> Finding:
    free = available_memory()
    if free is None:
        return Finding("memory", Level.OK, "this system does not tell how much is free")
    level = Level.OK if free >= LITTLE_MEMORY else Level.WARN if free >= NO_MEMORY else Level.FAIL
    fix = "" if level is Level.OK else "end other programs, or take a smaller model; a run that runs out is killed"
    return Finding("memory", level, f"{_gib(free)} available", fix)


def _disk(name: str, folder: Path, variable: str) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    fix = f"set {variable} to another folder"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, Level.FAIL, f"{folder}: {there} cannot be written", fix)
    free = shutil.disk_usage(there).free
    level = Level.OK if free >= LITTLE_DISK else Level.WARN if free >= NO_DISK else Level.FAIL
    return Finding(name, level, f"{folder}: {_gib(free)} free", "" if level is Level.OK else f"make room, or {fix}")


# -- packages ----------------------------------------------------------------------------------------------------------


def _plugins(registry: Registry) -> Iterator[Finding]:
    for owner in registry.owners:
        count = sum(claimant == owner for claimant, _ in registry)
        yield Finding(f"plugin {owner.name}", Level.OK, f"{owner.version}, {count} contributions")
    for problem in registry.problems:
        level = Level.WARN if problem.stage == "disabled" else Level.FAIL
        yield Finding(f"plugin {problem.owner.name}", level, f"{problem.stage}: {problem.reason}", problem.fix)


def _upstreams() -> Iterator[Finding]:
    for name, tested in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # who needs it says so: see _requirements
        if Version(installed).release[:2] == Version(tested).release[:2]:
            yield Finding(name, Level.OK, f"{installed}, tested with {tested}")
        else:
            yield Finding(name, Level.WARN, f"{installed}, tested with {tested}", f"pip install '{name}=={tested}.*'")


def _requirements() -> Iterator[Finding]:
    """What Composer's packages ask for and the environment lacks; of their extras, what is there and does not fit."""
    for distribution in distributions():
        owner = distribution.metadata["Name"]
        if not owner.lower().startswith("composer-"):
            continue
        extras = distribution.metadata.get_all("Provides-Extra") or []
        for line in distribution.requires or []:
            requirement = Requirement(line)
            optional = not _applies(requirement, "")
            if optional and not any(_applies(requirement, extra) for extra in extras):
                continue  # for another system or another Python
            problem = _unmet(requirement, optional=optional)
            if problem:
                level = Level.WARN if optional else Level.FAIL
                fix = f"pip install '{requirement.name}{requirement.specifier}'"
                yield Finding(f"{owner} needs {requirement.name}", level, problem, fix)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _unmet(requirement: Requirement, *, optional: bool) -> str:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return "" if optional else "not installed"
    fits = requirement.specifier.contains(installed, prereleases=True)
    return "" if fits else f"{installed} is installed, {requirement.specifier} is needed"


def _offline() -> Finding:
    """One of these set and another not is how half of a model comes from the network and half from the cache."""
    values = {name: os.environ.get(name, "") for name in OFFLINE_VARIABLES}
    given = [f"{name}={value}" for name, value in values.items() if value]
    hub = values["HF_HUB_OFFLINE"].upper() in ON
    others = any(value.upper() in ON for name, value in values.items() if name != "HF_HUB_OFFLINE")
    if others and not hub:
        return Finding("hugging face", Level.WARN, ", ".join(given), "export HF_HUB_OFFLINE=1, which holds for all")
    meaning = "offline: models and datasets must be in its cache" if hub else "models and datasets may be downloaded"
    return Finding("hugging face", Level.OK, ", ".join([meaning, *given]))


# -- deep --------------------------------------------------------------------------------------------------------------


def _torch() -> Finding:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Finding("devices", Level.OK, f"CPU, {torch.get_num_threads()} threads; torch is {built}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("devices", Level.OK, ", ".join(names))


def _contributions(registry: Registry) -> Iterator[Finding]:
    """Those that do not work, what backends find, and one line for the rest."""
    tried = [(contribution, try_out(registry, owner, contribution)) for owner, contribution in registry]
    for contribution, one in tried:
        if not one.ok:
            yield Finding(f"{one.kind} {one.name}", Level.FAIL, one.problem, one.fix)
        elif one.made and contribution.kind is Kind.BACKEND:
            yield from _diagnosis(contribution)
    working = sum(one.ok for _, one in tried)
    yield Finding("contributions", Level.OK, f"{working} of {len(tried)} load and can be made")


def _diagnosis(contribution: Contribution[Any]) -> Iterator[Finding]:
    try:
        backend = contribution.load()(default_settings(contribution))
        if isinstance(backend, Diagnoses):
            yield from backend.diagnose()
    except Exception as error:  # a plugin's mistake, whatever its type, must not hide the others
        problem = f"its diagnosis ended with {type(error).__name__}: {error}"
        yield Finding(f"{contribution.kind} {contribution.name}", Level.FAIL, problem)


# -- helpers -----------------------------------------------------------------------------------------------------------


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _first_line(path: Path) -> str:
    return _text(path).partition("\n")[0]
