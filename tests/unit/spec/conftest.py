"""A registry without discovery (the core plus one fake plugin) and a loader for spec texts."""

from __future__ import annotations

import pytest
from pydantic import Field, model_validator

from composer_core.plugins import builtin
from composer_core.plugins.contributions import (
    BackendPlugin,
    Derived,
    ExecutorPlugin,
    LossChannelPlugin,
    ObjectivePlugin,
    TeacherPlugin,
    TraceReaderPlugin,
)
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import Settings
from composer_core.protocols import Aggregation, Need
from composer_core.spec.load import load_spec

# Line numbers in expected messages count from here.
SPEC = """\
version: 1
name: test
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards:
    - {use: regex, pattern: "[0-9]"}
loss:
  objective: {use: grpo}
  channels:
    - {use: lean, weight: 0.5, strength: 2}
train:
  steps: 5
backend: {use: toy}
"""


class LeanSettings(Settings):
    strength: float = Field(1.0, gt=0)
    """How hard it pulls."""
    span: list[str] | int = 3


class GrumpySettings(Settings):
    mood: int = 0

    @model_validator(mode="after")
    def _grumble(self):
        raise RuntimeError("not today")


class WiseSettings(Settings):
    key: str = ""


class RentedSettings(Settings):
    gpus: int = 1
    token: str = ""


class FakePlugin:
    @hookimpl
    def composer_loss_channels(self):
        # needs: cheapest exact way first
        yield LossChannelPlugin(
            name="lean",
            summary="",
            target="fake:Lean",
            settings=LeanSettings,
            needs=lambda settings: (frozenset({Need.DIVERGENCE_FULL}), frozenset({Need.LOGPS})),
        )
        yield LossChannelPlugin(name="grumpy", summary="", target="fake:Grumpy", settings=GrumpySettings)

    @hookimpl
    def composer_objectives(self):
        yield ObjectivePlugin(name="mine", summary="", target="fake:Mine", aggregation=Aggregation.CONSTANT)

    @hookimpl
    def composer_backends(self):
        # native objectives only, one need: refuses most
        yield BackendPlugin(
            name="small",
            summary="",
            target="fake:Small",
            provides=lambda spec: frozenset({Need.LOGPS}),
            native_objectives=frozenset({"grpo", "mine"}),
            derive=lambda spec: Derived({"sequences per step": 64}, {"lr": 0.1}, ("a note",)),
        )

    @hookimpl
    def composer_executors(self):
        yield ExecutorPlugin(name="grid", summary="", target="fake:Grid")
        yield ExecutorPlugin(
            name="rented",
            summary="",
            target="fake:Rented",
            settings=RentedSettings,
            usd_per_hour=lambda settings: 2.5 * settings.gpus,
        )

    @hookimpl
    def composer_teachers(self):
        yield TeacherPlugin(name="wise", summary="", target="fake:Wise", settings=WiseSettings)

    @hookimpl
    def composer_trace_readers(self):
        yield TraceReaderPlugin(name="cards", summary="", target="fake:Cards")


@pytest.fixture(scope="session")
def fake_plugin():
    return FakePlugin()


@pytest.fixture
def spec_text():
    return SPEC


@pytest.fixture
def make_registry():
    """`make_registry(...)`: the core and the fake plugin, in the versions asked for, and more (plugin, owner) pairs."""

    def _make(*more, core="0.1.0", fake="1.2"):
        registry = Registry()
        registry.add(builtin, Owner("composer-core", core, "core"))
        registry.add(FakePlugin(), Owner("fake", fake, "fake"))
        for plugin, owner in more:
            registry.add(plugin, owner)
        assert registry.problems == []
        return registry

    return _make


@pytest.fixture
def registry(make_registry):
    return make_registry()


@pytest.fixture
def load(tmp_path, monkeypatch, registry):
    """`load(text, *overrides)`: the text as spec.yaml, the current folder being its own."""
    monkeypatch.chdir(tmp_path)

    def _load(text, *overrides):
        (tmp_path / "spec.yaml").write_text(text)
        return load_spec("spec.yaml", registry, overrides=overrides)

    return _load
