"""What composer-verl offers."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.protocols import Aggregation, Need
from composer_verl.config import derive
from composer_verl.objectives import NATIVE, serves
from composer_verl.settings import VerlSettings

PROVIDED = frozenset(Need) - {Need.OUTER_SYNC}


@hookimpl
def composer_backends() -> Iterable[BackendPlugin]:
    yield BackendPlugin(
        name="verl",
        summary="verl's PPO trainer on FSDP2 and Ray, with all channels",
        target="composer_verl.backend:VerlBackend",
        settings=VerlSettings,
        native_objectives=frozenset(NATIVE),
        native=serves,
        provides=lambda spec: PROVIDED,
        aggregations=frozenset(Aggregation),
        honours=frozenset({"rollout", "data.eval", "data.pairs", "data.max_tokens", "limits.kl"}),
        derive=derive,
        install_hint="pip install composer-verl",
    )
