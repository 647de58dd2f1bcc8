"""What a block `sandbox:` holds: which one, what it shows to the code inside, and the limits.

One model for all sandboxes; what one of them has no use for, it refuses when it is made.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from composer_core.plugins.settings import Settings
from composer_core.sandbox import Limits

NONE = "none"
"""The name that stands for no sandbox."""
DEFAULT = Limits()


class SandboxSettings(Settings):
    """Where code runs that nobody vouches for, and what it may use; also just the name: `sandbox: bubblewrap`."""

    use: str = "bubblewrap"
    """`bubblewrap` or `docker` (from composer-executors), `none`, or a plugin's."""
    image: str | None = None
    """For `docker`: the image to start from. It must be there; nothing is pulled."""
    readable: list[str] = []
    """Absolute paths of this machine that the code may read, beside the system's programs and this Python."""
    seconds: float = Field(DEFAULT.seconds, gt=0)
    """Time limit of one program, on the clock and in processor time."""
    memory_mb: int = Field(DEFAULT.memory_mb, ge=16)
    """Memory limit, /tmp included."""
    processes: int = Field(DEFAULT.processes, ge=1)
    """Processes and threads at a time."""
    output_kb: int = Field(DEFAULT.output_kb, ge=1)
    """What may be written to stdout and stderr together; a program that writes more is ended."""
    disk_mb: int = Field(DEFAULT.disk_mb, ge=1)
    """Size of /tmp, the only folder that can be written to."""

    @field_validator("readable")
    @classmethod
    def _absolute(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} is no absolute path")
        return paths

    @property
    def limits(self) -> Limits:
        """The numbers among these settings."""
        return Limits(self.seconds, self.memory_mb, self.processes, self.output_kb, self.disk_mb)


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


SandboxBlock = Annotated[SandboxSettings, BeforeValidator(_named, json_schema_input_type=str | SandboxSettings)]
"""A field of a reward's settings."""
