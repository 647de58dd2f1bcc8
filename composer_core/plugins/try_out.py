"""Whether a contribution works here: its requirements are met, its code loads, it can be made, its check is content.

This imports what the contribution stands for, torch and the trainer included; `describe.py` does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_core.errors import ComposerError, MissingError
from composer_core.plugins.contributions import Contribution, Kind
from composer_core.plugins.describe import default_settings
from composer_core.plugins.registry import Owner, Registry


@dataclass(frozen=True)
class Tried:
    """How far one contribution came; what `plugins check --json` prints a list of."""

    kind: str
    name: str
    owner: str
    ok: bool
    made: bool
    """False where it loads, but an object of it takes more than default settings."""
    problem: str = ""
    fix: str = ""


def try_out(registry: Registry, owner: Owner, contribution: Contribution[Any]) -> Tried:
    """Load a contribution, make it with its default settings where those suffice, and ask a backend's `check`."""
    who = {"kind": str(contribution.kind), "name": contribution.name, "owner": str(owner)}
    try:
        made = _make(registry, owner, contribution)
    except ComposerError as error:
        return Tried(**who, ok=False, made=False, problem=error.problem, fix=error.fix)
    except (Exception, SystemExit) as error:  # a plugin's mistake, whatever its type, must not hide the others
        problem = f"{contribution.target}: {type(error).__name__}: {error}"
        return Tried(**who, ok=False, made=False, problem=problem, fix=contribution.install_hint)
    return Tried(**who, ok=True, made=made)


def _make(registry: Registry, owner: Owner, contribution: Contribution[Any]) -> bool:
    """Whether an object was made.

    Raises:
        MissingError: a requirement is not met, the code does not load, or a backend's check finds problems.
    """
    registry.get(contribution.kind, f"{owner.name}/{contribution.name}")
    target = contribution.load()
    if not callable(target):
        raise MissingError(f"{contribution.target} is no class and no function, so settings cannot be given to it")
    settings = default_settings(contribution)
    if settings is None:
        return False
    made = target(settings)
    if contribution.kind is Kind.BACKEND and (problems := made.check()):
        raise MissingError("; ".join(problems), fix=contribution.install_hint)
    return True
