"""What composer-trl offers."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.protocols import Aggregation, Need
from composer_trl.config import derive
from composer_trl.objectives import NATIVE
from composer_trl.settings import TrlSettings

PROVIDED = frozenset(Need) - {Need.OUTER_SYNC}


@hookimpl
def composer_backends() -> Iterable[BackendPlugin]:
    yield BackendPlugin(
        name="trl",
        summary="TRL's GRPOTrainer, with all channels",
        target="composer_trl.backend:TrlBackend",
        settings=TrlSettings,
        native_objectives=frozenset(NATIVE),
        provides=lambda spec: PROVIDED,
        aggregations=frozenset(Aggregation),
        honours=frozenset({"rollout", "data.eval", "data.pairs", "data.max_tokens", "limits.kl", "rollouts"}),
        derive=derive,
        processes=lambda settings: settings.processes,
        install_hint="pip install composer-trl",
    )
