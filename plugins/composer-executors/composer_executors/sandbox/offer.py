"""Which sandboxes this package offers."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.plugins.contributions import SandboxPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.sandbox_settings import SandboxSettings


class DockerSettings(SandboxSettings):
    """What docker asks for beside."""

    use: str = "docker"
    image: str
    """The image to start from. It must be there; nothing is pulled."""


@hookimpl
def composer_sandboxes() -> Iterable[SandboxPlugin]:
    """Those of this package."""
    yield SandboxPlugin(
        name="bubblewrap",
        summary="Linux namespaces by bwrap: starts in some hundredths of a second, needs no service",
        target="composer_executors.sandbox.bubblewrap:BubblewrapSandbox",
        install_hint="apt-get install bubblewrap",
    )
    yield SandboxPlugin(
        name="docker",
        summary="A container of your image for each program, started in about a second",
        target="composer_executors.sandbox.docker:DockerSandbox",
        settings=DockerSettings,
        install_hint="apt-get install docker.io",
    )
