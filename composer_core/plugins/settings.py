"""The base of every settings model: what a block of the run spec may hold besides `use`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Options of one contribution. Fields are the spec's keys; the string under a field is its documentation.

    Settings models stay light: no torch types, so that a spec can be checked without importing torch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NoSettings(Settings):
    """For a contribution that has nothing to set."""
