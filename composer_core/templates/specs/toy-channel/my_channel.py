"""A loss channel in one file: raises the log-probability of whatever was sampled."""

from collections.abc import Iterable

from pydantic import Field

from composer_core.batch import Batch
from composer_core.errors import RunFailed
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import Settings
from composer_core.protocols import Need, PolicyView, Term


class CertaintySettings(Settings):
    """Keys beside `use` and `weight` in the spec; the text under each is its documentation."""

    floor: float = Field(-5.0, lt=0)
    """Log-probability below which a token is left alone: what is that unlikely was an accident."""


class Certainty(ChannelDefaults):
    """Made once per worker, with its settings."""

    def __init__(self, settings: CertaintySettings) -> None:
        self.floor = settings.floor

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """A local SUM over this micro-batch, and the name of what divides it; never divide here."""
        rollouts = batch.rollouts
        if rollouts is None:
            raise RunFailed("channel 'certainty' needs rollouts")
        logps = view.logps(rollouts.seqs, grad=True, temperature=batch.temperature)  # (N,), one per token
        counted = rollouts.action & (logps.detach() > self.floor)
        return Term(-masked_sum(logps, counted), "tokens")


@hookimpl
def composer_loss_channels() -> Iterable[LossChannelPlugin]:
    """What this file offers."""
    yield LossChannelPlugin(
        name="certainty",
        summary="Raise what was sampled",
        target=f"{__name__}:Certainty",
        settings=CertaintySettings,
        needs=lambda settings: (frozenset({Need.LOGPS}),),
    )
