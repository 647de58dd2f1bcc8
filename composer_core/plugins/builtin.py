"""What the core itself contributes, through the same hooks as everybody else."""

from __future__ import annotations

from collections.abc import Iterable

from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs, sdpo_teachers
from composer_core.loss.presets import PRESETS
from composer_core.plugins import builtin_settings as settings
from composer_core.plugins.builtin_derive import derive_toy
from composer_core.plugins.contributions import (
    BackendPlugin,
    ExecutorPlugin,
    Feature,
    HintPlugin,
    LossChannelPlugin,
    ObjectivePlugin,
    RewardPlugin,
    SandboxPlugin,
    TeacherPlugin,
    TraceReaderPlugin,
)
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings, ScriptedSettings
from composer_core.protocols import Aggregation, Need


@hookimpl
def composer_loss_channels() -> Iterable[LossChannelPlugin]:
    yield LossChannelPlugin(
        name="sdpo",
        summary="The policy with a hint teaches the policy without it (arXiv 2601.20802)",
        target="composer_core.channels.sdpo:sdpo",
        settings=SdpoSettings,
        needs=sdpo_needs,
        teachers=sdpo_teachers,
    )
    yield LossChannelPlugin(
        name="replay",
        summary="Preference pairs from recorded sessions: what teachers agreed on against what the agent did",
        target="composer_core.channels.replay:Replay",
        settings=ReplaySettings,
        needs=replay_needs,
    )


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
    yield ObjectivePlugin(
        name="lm-ce",
        summary="Next-token cross-entropy on the policy's own tokens, without rewards",
        target="composer_core.loss.lm_ce:LmCe",
        settings=settings.LmCeSettings,
        aggregation=Aggregation.TOKEN_MEAN,
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
        honours=frozenset({"data.eval", "data.pairs", "limits.kl"}),
        derive=derive_toy,
        processes=lambda settings: settings.processes,
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
        target="composer_core.data.rewards:python_reward",
        settings=settings.PythonRewardSettings,
        sandbox=settings.python_sandbox,
    )
    yield RewardPlugin(
        name="command",
        summary="Any program: its exit code, or a number in what it prints",
        target="composer_core.data.graders:CommandReward",
        settings=settings.CommandRewardSettings,
        sandbox=lambda settings: settings.sandbox,
    )


@hookimpl
def composer_sandboxes() -> Iterable[SandboxPlugin]:
    yield SandboxPlugin(
        name="none",
        summary="No sandbox: programs run as this user, limited in time and output alone",
        target="composer_core.data.unconfined:Unconfined",
    )


@hookimpl
def composer_trace_readers() -> Iterable[TraceReaderPlugin]:
    for name, target, summary in _READERS:
        yield TraceReaderPlugin(
            name=name,
            summary=summary,
            target=f"composer_core.traces.readers.{target}",
            install_hint="pip install 'composer-core[data]'",
        )


_READERS = (
    ("claude-code", "claude_code:ClaudeCodeReader", "Claude Code sessions and their sub-agents (JSONL)"),
    ("codex", "codex:CodexReader", "Codex CLI rollouts, old and new layout (JSONL)"),
    ("openhands", "openhands:OpenHandsReader", "OpenHands events, version 0 and 1"),
    ("swe-agent", "swe_agent:SweAgentReader", "SWE-agent trajectories (.traj)"),
    ("mini-swe-agent", "mini_swe_agent:MiniSweAgentReader", "mini-swe-agent trajectories (.traj.json)"),
    ("atif", "atif:AtifReader", "ATIF trajectories, 1.0 to 1.7 (Harbor)"),
    ("inspect", "inspect_ai:InspectReader", "Inspect logs (.json, .eval)"),
    ("verifiers", "verifiers:VerifiersReader", "Rollouts of verifiers: results and version-1 traces"),
    ("openai-chat", "openai_chat:OpenAIChatReader", "Chat messages, also in ShareGPT's spelling (JSON, JSONL)"),
)


@hookimpl
def composer_hints() -> Iterable[HintPlugin]:
    for name, attribute, summary in (
        ("tool-not-found", "ToolNotFound", "Names the tools there are"),
        ("json-decode", "JsonDecode", "Asks for valid JSON arguments, and shows their schema"),
        ("type-error", "TypeErrorHint", "Shows which arguments the tool takes"),
        ("runtime-error", "RuntimeErrorHint", "Says how the call would fail"),
        ("repeated-failure", "RepeatedFailure", "Says that this failed before, and not to repeat it"),
        ("failed-test", "FailedTest", "Shows what the tests would say to the change"),
        ("timeout", "Timeout", "Says that the call does not end in time"),
        ("low-reward", "LowReward", "Gives the expected output, or the feedback on the answer"),
    ):
        yield HintPlugin(name=name, summary=summary, target=f"composer_core.traces.templates:{attribute}")


@hookimpl
def composer_teachers() -> Iterable[TeacherPlugin]:
    yield TeacherPlugin(
        name="openai",
        summary="Any OpenAI-compatible server: OpenRouter, vLLM, OpenAI",
        target="composer_core.teachers.client:OpenAiTeacher",
        settings=OpenAiTeacherSettings,
        scores=lambda settings: settings.scores,
        install_hint="pip install 'composer-core[data]'",
    )
    yield TeacherPlugin(
        name="scripted",
        summary="Answers from a file or by rules, offline",
        target="composer_core.teachers.scripted:ScriptedTeacher",
        settings=ScriptedSettings,
    )
