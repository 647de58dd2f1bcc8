"""Which teachers of a spec score texts for its channels while it trains; `composer-run replay` asks the others."""

from __future__ import annotations

from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.registry import Registry
from composer_core.spec.model import Plugged, RunSpec


def scorers_of(spec: RunSpec, registry: Registry) -> dict[str, tuple[str, ...]]:
    """Channel -> the teachers that it names, of those that are computed and name one."""
    found = {block.name: teachers_of(block, registry) for block in spec.loss.channels if block.weight}
    return {channel: names for channel, names in found.items() if names}


def teachers_of(block: Plugged, registry: Registry) -> tuple[str, ...]:
    """The teachers that one channel names; raises what its plugin raises."""
    _, contribution = registry.get(block.kind, block.use)
    assert isinstance(contribution, LossChannelPlugin)
    return tuple(contribution.teachers(block.settings))
