"""Which contributions are installed, who owns each, and what went wrong with the rest.

The typed facade over pluggy: no other module touches it. A plugin can break in many ways (import, unknown hook,
wrong return type, exception in a hook, versions that do not fit); each costs one line in `plugins list` and nothing
else, unless a spec uses it. Look-ups go by kind and name; "owner/name" picks one owner where two claim a name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.contributions import CONTRIBUTIONS, Contribution, Kind
from composer_core.plugins.hookspecs import PROJECT, ComposerSpecs

DISABLE_VARIABLE = "COMPOSER_DISABLE_PLUGINS"
CORE = "composer-core"


@dataclass(frozen=True)
class Owner:
    """A plugin: the distribution (or local file) that brought contributions."""

    name: str
    """Distribution name, or the file's name for a local plugin."""
    version: str
    entry_point: str = ""
    sha256: str = ""
    """Of a local file."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True)
class PluginProblem:
    """Why a plugin, or one of its contributions, cannot be used."""

    owner: Owner
    stage: str
    """disabled | requires | import | register | <hook name>"""
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.owner} ({self.stage}): {self.reason}"


@dataclass
class Registry:
    """Contributions by kind and name. Build one with `discover()`, or empty with `Registry()` in tests."""

    problems: list[PluginProblem] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    _found: dict[tuple[Kind, str], list[tuple[Owner, Contribution[Any]]]] = field(default_factory=dict)
    _pm: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))

    def __post_init__(self) -> None:
        self._pm.add_hookspecs(ComposerSpecs)

    # -- filling ---------------------------------------------------------------------------------------------------

    @classmethod
    def discover(cls, *, disabled: frozenset[str] = frozenset(), third_party: bool = True) -> Registry:
        """Read the entry points of all installed distributions.

        Args:
            disabled: names of entry points or distributions to skip before anything of them is imported; the
                environment variable COMPOSER_DISABLE_PLUGINS adds to it (comma separated, `*` for all).
            third_party: False registers the core's own contributions only (`--no-plugins`).
        """
        registry = cls()
        variable = os.environ.get(DISABLE_VARIABLE, "")
        blocked = disabled | {name.strip() for name in variable.split(",") if name.strip()}
        for owner, entry_point, distribution in _entry_points():
            if owner.name != CORE:
                if not third_party or blocked & {"*", owner.name, entry_point.name}:
                    registry._problem(owner, "disabled", f"by --no-plugins, --disable-plugin or {DISABLE_VARIABLE}")
                    continue
                gate = _version_gate(distribution)
                if gate is not None:
                    registry._problem(owner, "requires", gate, fix=f"pip install -U {owner.name}")
                    continue
            registry._import(owner, entry_point)
        return registry

    def add(self, plugin: object, owner: Owner) -> None:
        """Register one plugin object (a module or an instance with hook implementations), isolated from the rest."""
        try:
            self._pm.register(plugin, name=f"{owner.name}:{owner.entry_point}")
            self._pm.check_pending()
        except Exception as error:  # a plugin's mistake, whatever its type, must not stop the others
            if self._pm.is_registered(plugin):
                self._pm.unregister(plugin)
            self._problem(owner, "register", str(error).splitlines()[0] if str(error) else type(error).__name__)
            return
        self.owners.append(owner)
        others = [other for other in self._pm.get_plugins() if other is not plugin]
        for contribution_type in CONTRIBUTIONS:
            hook = contribution_type.hook
            try:
                # list() inside: a generator hook raises only when it is consumed
                offered = [item for items in self._pm.subset_hook_caller(hook, others)() for item in items]
            except Exception as error:
                self._problem(owner, hook, f"{type(error).__name__}: {error}")
                continue
            for item in offered:
                self._take(owner, contribution_type, item)

    def add_file(self, path: Path) -> Owner:
        """Load a local file as a plugin (`plugins: [./my_channel.py]`).

        Raises:
            UsageError: the file is not there, cannot be read, or does not load.
        """
        if not path.is_file():
            raise UsageError("no such plugin file", at=str(path), fix="paths in `plugins:` are relative to the spec")
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"this plugin file cannot be read: {error.strerror}", at=str(path)) from error
        owner = Owner(name=path.name, version="(local file)", entry_point=path.stem, sha256=digest)
        before = len(self.problems)
        try:
            module = _import_file(path, digest)
        except Exception as error:
            raise UsageError(
                f"this plugin file does not load: {type(error).__name__}: {error}", at=str(path)
            ) from error
        self.add(module, owner)
        if len(self.problems) > before:  # the spec names this file, so its problems are the spec's
            raise UsageError("; ".join(p.reason for p in self.problems[before:]), at=str(path))
        return owner

    def _import(self, owner: Owner, entry_point: EntryPoint) -> None:
        try:
            module = entry_point.load()
        except Exception as error:  # SystemExit and KeyboardInterrupt stay what they are
            self._problem(owner, "import", f"{type(error).__name__}: {error}", fix=f"pip install -U {owner.name}")
            return
        self.add(module, owner)

    def _take(self, owner: Owner, expected: type[Contribution[Any]], item: object) -> None:
        if not isinstance(item, expected):
            self._problem(owner, expected.hook, f"returned {type(item).__name__}, expected {expected.__name__}")
            return
        self._found.setdefault((item.kind, item.name), []).append((owner, item))

    def _problem(self, owner: Owner, stage: str, reason: str, fix: str = "") -> None:
        self.problems.append(PluginProblem(owner, stage, reason, fix))

    # -- asking ----------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, use: str) -> tuple[Owner, Contribution[Any]]:
        """Find one contribution by `name` or `owner/name`.

        Raises:
            UsageError: no such name (with the nearest one), or two plugins claim it (naming both).
            MissingError: the plugin is there but what it requires is not, or plugins that failed to load may have it.
        """
        owner_name, _, name = use.rpartition("/")
        claims = [c for c in self._found.get((kind, name), []) if owner_name in ("", c[0].name)]
        if len(claims) > 1:
            who = " and ".join(str(owner) for owner, _ in claims)
            fix = " or ".join(f"use: {owner.name}/{name}" for owner, _ in claims)
            raise UsageError(f"{kind} {name!r} is offered by {who}", fix=fix)
        if not claims:
            raise self._unknown(kind, use)
        owner, contribution = claims[0]
        unmet = _unmet_requirements(owner)
        if unmet:
            raise MissingError(
                f"{kind} {name!r} comes from {owner}, which needs {'; '.join(unmet)}",
                fix=contribution.install_hint or f"pip install -U {owner.name}",
            )
        return owner, contribution

    def names(self, kind: Kind) -> list[str]:
        """All names of a kind, sorted."""
        return sorted(name for found_kind, name in self._found if found_kind is kind)

    def __iter__(self) -> Iterator[tuple[Owner, Contribution[Any]]]:
        for _, claims in sorted(self._found.items()):
            yield from claims

    def _unknown(self, kind: Kind, use: str) -> UsageError | MissingError:
        known = self.names(kind)
        near = difflib.get_close_matches(use, known, 1, 0.6)
        if near:
            return UsageError(f"no {kind} is called {use!r}", fix=f"did you mean {near[0]!r}?")
        suspects = [p for p in self.problems if use in p.owner.name or use in p.owner.entry_point]
        if suspects:
            reasons = "; ".join(str(p) for p in suspects)
            fix = next((p.fix for p in suspects if p.fix), "")
            return MissingError(
                f"no {kind} is called {use!r}; the plugin that may bring it is not loaded: {reasons}", fix=fix
            )
        others = ", ".join(known) or "none"
        failed = [p for p in self.problems if p.stage != "disabled"]
        also = f" ({len(failed)} problems with plugins: composer-run plugins list)" if failed else ""
        if kind in (Kind.BACKEND, Kind.EXECUTOR, Kind.SANDBOX):
            package = f"composer-{use}" if kind is Kind.BACKEND else "composer-executors"  # how ours are named
            return MissingError(
                f"no {kind} is called {use!r}; installed: {others}{also}",
                fix=f"pip install {package}, if that is the package which brings it",
            )
        return UsageError(f"no {kind} is called {use!r}; installed: {others}{also}")


def _entry_points() -> Iterator[tuple[Owner, EntryPoint, Distribution]]:
    """Entry points of the group, each once, the core's first: a built-in name is never shadowed silently."""
    seen: set[tuple[str, str]] = set()
    found = []
    for distribution in distributions():
        for entry_point in distribution.entry_points:
            if entry_point.group != PROJECT or (entry_point.name, entry_point.value) in seen:
                continue
            seen.add((entry_point.name, entry_point.value))
            owner = Owner(distribution.metadata["Name"], distribution.version, entry_point.name)
            found.append((owner, entry_point, distribution))
    yield from sorted(found, key=lambda item: (item[0].name != CORE, item[0].name, item[0].entry_point))


def _version_gate(distribution: Distribution) -> str | None:
    """Why this plugin must not even be imported: it was made for another core or another Python."""
    python = "".join(distribution.metadata.get_all("Requires-Python") or [])
    current = ".".join(str(part) for part in sys.version_info[:3])
    if python and not SpecifierSet(python).contains(current, prereleases=True):
        return f"needs Python {python}, this is {current}"
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.name.lower().replace("_", "-") == CORE:
            installed = version(CORE)
            if not requirement.specifier.contains(installed, prereleases=True):
                return f"needs {CORE} {requirement.specifier}, found {installed}"
    return None


def _unmet_requirements(owner: Owner) -> list[str]:
    """Requirements of the owner's distribution that the environment does not meet, from metadata alone."""
    if owner.sha256 or owner.name == CORE:
        return []
    try:
        distribution = Distribution.from_name(owner.name)
    except PackageNotFoundError:
        return []
    unmet = []
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            unmet.append(f"{requirement.name}{requirement.specifier}, which is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier}, found {installed}")
    return unmet


def _import_file(path: Path, digest: str) -> ModuleType:
    """Import a file under a name of its own; `target=f"{__name__}:Attr"` in it then resolves."""
    name = f"composer_local_{path.stem.replace('-', '_')}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and target strings look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
