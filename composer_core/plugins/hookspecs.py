"""The hooks a plugin implements. All of them only collect; none is called inside a training loop.

A plugin is a light module named by an entry point of group `composer`:

    [project.entry-points.composer]
    acme-contrast = "acme_contrast.plugin"

or a local file named in the spec (`plugins: [./my_channel.py]`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from composer_core.plugins.contributions import (
        BackendPlugin,
        ExecutorPlugin,
        HintPlugin,
        LossChannelPlugin,
        ObjectivePlugin,
        RewardPlugin,
        SandboxPlugin,
        TeacherPlugin,
        TraceReaderPlugin,
    )

PROJECT = "composer"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ComposerSpecs:
    """Hook specifications; each example is a whole plugin function that can be pasted."""

    @hookspec
    def composer_loss_channels(self) -> Iterable[LossChannelPlugin]:  # type: ignore[empty-body]
        """Offer loss channels.

        Example::

            @hookimpl
            def composer_loss_channels():
                yield LossChannelPlugin(
                    name="brevity", summary="Pull long answers towards short ones",
                    target="acme.channel:Brevity", settings=BrevitySettings,
                    needs=lambda settings: (frozenset({Need.LOGPS}),))
        """

    @hookspec
    def composer_objectives(self) -> Iterable[ObjectivePlugin]:  # type: ignore[empty-body]
        """Offer policy objectives.

        Example::

            @hookimpl
            def composer_objectives():
                yield ObjectivePlugin(
                    name="reinforce", summary="Plain REINFORCE with a group baseline",
                    target="acme.objective:Reinforce", aggregation=Aggregation.TOKEN_MEAN)
        """

    @hookspec
    def composer_backends(self) -> Iterable[BackendPlugin]:  # type: ignore[empty-body]
        """Offer trainers.

        Example::

            @hookimpl
            def composer_backends():
                yield BackendPlugin(
                    name="acme", summary="Acme's trainer", target="acme.backend:AcmeBackend",
                    settings=AcmeSettings, provides=lambda spec: frozenset({Need.LOGPS}),
                    native_objectives=frozenset({"grpo"}), install_hint="pip install acme-trainer")
        """

    @hookspec
    def composer_executors(self) -> Iterable[ExecutorPlugin]:  # type: ignore[empty-body]
        """Offer places to run.

        Example::

            @hookimpl
            def composer_executors():
                yield ExecutorPlugin(
                    name="acme-cloud", summary="Jobs on Acme's cloud", target="acme.cloud:AcmeExecutor",
                    settings=AcmeCloudSettings, features=frozenset({Feature.LOGS, Feature.CANCEL}))
        """

    @hookspec
    def composer_rewards(self) -> Iterable[RewardPlugin]:  # type: ignore[empty-body]
        """Offer reward functions.

        Example::

            @hookimpl
            def composer_rewards():
                yield RewardPlugin(name="polite", summary="1 when the answer says please", target="acme.reward:Polite")
        """

    @hookspec
    def composer_teachers(self) -> Iterable[TeacherPlugin]:  # type: ignore[empty-body]
        """Offer models that answer in the agent's place.

        Example::

            @hookimpl
            def composer_teachers():
                yield TeacherPlugin(
                    name="acme-api", summary="Acme's hosted models", target="acme.teacher:AcmeTeacher",
                    settings=AcmeTeacherSettings)
        """

    @hookspec
    def composer_trace_readers(self) -> Iterable[TraceReaderPlugin]:  # type: ignore[empty-body]
        """Offer file formats of agent sessions.

        Example::

            @hookimpl
            def composer_trace_readers():
                yield TraceReaderPlugin(name="acme-log", summary="Acme's session log", target="acme.traces:AcmeReader")
        """

    @hookspec
    def composer_hints(self) -> Iterable[HintPlugin]:  # type: ignore[empty-body]
        """Offer the hint for a kind of error.

        Example::

            @hookimpl
            def composer_hints():
                yield HintPlugin(name="wrong-unit", summary="Says which unit was meant", target="acme.hints:WrongUnit")
        """

    @hookspec
    def composer_sandboxes(self) -> Iterable[SandboxPlugin]:  # type: ignore[empty-body]
        """Offer places for code that nobody vouches for.

        Example::

            @hookimpl
            def composer_sandboxes():
                yield SandboxPlugin(name="acme-vm", summary="A small virtual machine", target="acme.vm:AcmeSandbox")
        """
