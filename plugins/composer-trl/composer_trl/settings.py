"""What the `backend` block of a spec may hold for `use: trl`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from composer_core.plugins.settings import Settings


class TrlSettings(Settings):
    """TRL takes its numbers from `train:`; what is left goes through untouched."""

    processes: int = Field(1, ge=1)
    """Processes of this machine that train together, each with the whole model and its share of every step: one for
    each GPU; on the CPU they talk through gloo."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of `trl.GRPOConfig`, checked against the installed version. A field that another part of the spec
    decides is refused with the key to use instead."""
