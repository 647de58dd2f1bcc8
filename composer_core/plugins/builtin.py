"""What the core itself contributes, through the same hooks as everybody else."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.loss.presets import PRESETS
from composer_core.plugins import builtin_settings as settings
from composer_core.plugins.builtin_derive import derive_toy
from composer_core.plugins.contributions import (
    BackendPlugin,
    ExecutorPlugin,
    Feature,
    ObjectivePlugin,
    RewardPlugin,
)
from composer_core.plugins.hookspecs import hookimpl
from composer_core.protocols import Aggregation, Need


@hookimpl
def composer_objectives() -> Iterable[ObjectivePlugin]:
    for preset in PRESETS.values():
        yield ObjectivePlugin(
            name=preset.name,
            summary=f"{preset.summary} (arXiv {preset.paper})",
            target=f"composer_core.loss.policy:{preset.name.replace('-', '_')}",
            settings=settings.OBJECTIVE_SETTINGS[preset.name],
            aggregation=preset.aggregation,
        )


@hookimpl
def composer_backends() -> Iterable[BackendPlugin]:
    yield BackendPlugin(
        name="toy",
        summary="A GRPO loop in plain torch, to prove channels and objectives on",
        target="composer_core.testing.toy:ToyBackend",
        settings=settings.ToySettings,
        provides=lambda spec: frozenset(
            {Need.LOGPS, Need.DIVERGENCE_FULL, Need.LOGITS, Need.PAIRS, Need.REFERENCE, Need.STATE}
        ),
        aggregations=frozenset(Aggregation),
        derive=derive_toy,
        install_hint="pip install 'composer-core[hf]'",
    )


@hookimpl
def composer_executors() -> Iterable[ExecutorPlugin]:
    yield ExecutorPlugin(
        name="inline",
        summary="A child process on this machine, in the foreground",
        target="composer_core.run.inline:InlineExecutor",
        settings=settings.InlineSettings,
        features=frozenset({Feature.LOGS, Feature.CANCEL, Feature.SHARED_DISK}),
    )


@hookimpl
def composer_rewards() -> Iterable[RewardPlugin]:
    yield RewardPlugin(
        name="exact-match",
        summary="1 when the extracted answer equals the row's",
        target="composer_core.data.rewards:ExactMatch",
        settings=settings.ExactMatchSettings,
    )
    yield RewardPlugin(
        name="contains",
        summary="1 when the completion contains a text",
        target="composer_core.data.rewards:Contains",
        settings=settings.ContainsSettings,
    )
    yield RewardPlugin(
        name="regex",
        summary="How much of the completion matches a pattern",
        target="composer_core.data.rewards:Regex",
        settings=settings.RegexSettings,
    )
    yield RewardPlugin(
        name="length",
        summary="Nearness to a target length",
        target="composer_core.data.rewards:Length",
        settings=settings.LengthSettings,
    )
    yield RewardPlugin(
        name="python",
        summary="Your own function: ./file.py:function",
        target="composer_core.data.rewards:PythonReward",
        settings=settings.PythonRewardSettings,
    )
