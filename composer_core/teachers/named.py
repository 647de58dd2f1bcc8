"""The teachers of a spec as objects: who they are, with their secrets from the environment."""

from __future__ import annotations

import os
from typing import Any

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.registry import Registry
from composer_core.spec.environment import fill
from composer_core.spec.model import RunSpec


def named_teacher(spec: RunSpec, registry: Registry, name: str) -> Any:
    """The teacher under this name of `teachers:`; nothing is sent.

    Raises:
        UsageError: its settings do not fit, with their place in the spec.
        MissingError: an environment variable or a package is missing.
    """
    block = fill(spec.teachers[name], os.environ, key=f"teachers.{name}")
    _, contribution = registry.get(block.kind, block.use)
    try:
        return contribution.load()(block.settings)
    except (UsageError, MissingError) as error:
        own = error.at in type(block.settings).model_fields
        at = f"teachers.{name}.{error.at}" if own else error.at or f"teachers.{name}"
        raise type(error)(error.problem, at=at, fix=error.fix) from error
