"""What this package offers. Light: the code behind a target is imported by the worker that runs it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from composer_core.plugins.contributions import LossChannelPlugin, ObjectivePlugin, RewardPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import Settings
from composer_core.protocols import Aggregation, Need


class BrevitySettings(Settings):
    """How long an answer may be before it costs something."""

    free: int = Field(4, ge=0)
    """Completion tokens that cost nothing; each one beyond makes the whole answer less likely."""


@hookimpl
def composer_objectives() -> Iterable[ObjectivePlugin]:
    yield ObjectivePlugin(
        name="reinforce",
        summary="Plain REINFORCE with the group's mean as baseline",
        target="acme_composer.objective:Reinforce",
        aggregation=Aggregation.TOKEN_MEAN,
    )


@hookimpl
def composer_rewards() -> Iterable[RewardPlugin]:
    yield RewardPlugin(name="polite", summary="1 when the answer says please", target="acme_composer.reward:Polite")


@hookimpl
def composer_loss_channels() -> Iterable[LossChannelPlugin]:
    yield LossChannelPlugin(
        name="brevity",
        summary="Pull long answers towards short ones",
        target="acme_composer.channel:Brevity",
        settings=BrevitySettings,
        needs=lambda settings: (frozenset({Need.LOGPS}),),
    )
