"""The base of every settings model: what a block of the run spec may hold besides `use`."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Options of one contribution. Fields are the spec's keys; the string under a field is its documentation.

    Settings models stay light: no torch types, so that a spec can be checked without importing torch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PathKind(StrEnum):
    """Marks a text that holds a path: relative to the spec's file, made absolute at load.

    On a field of settings: `path: Annotated[str | None, PathKind.ALWAYS] = None`.
    """

    ALWAYS = "always"
    IF_THERE = "if there"
    """Where that file or folder exists: else it may be an id on a hub, or a program on the PATH."""
    FUNCTION = "function"
    """`./file.py:name`: its file."""
    STORE = "store"
    """Unless it is a URL."""


class NoSettings(Settings):
    """For a contribution that has nothing to set."""
