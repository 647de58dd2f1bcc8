from typing import Annotated, Literal

import pytest
from pydantic import Field

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.contributions import BackendPlugin, Kind, LossChannelPlugin, RewardPlugin
from composer_core.plugins.describe import default_settings, describe, find
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, PluginProblem, Registry
from composer_core.plugins.settings import Settings
from composer_core.protocols import Need

ACME = Owner("acme", "1.2", "acme-entry")


class Fixed(Settings):
    """A shape of its own."""

    width: int = Field(2, ge=1, le=8)
    """How wide."""


class Free(Settings):
    """Another shape."""

    height: float = 1.5


class Everything(Settings):
    """One key of each shape."""

    flag: bool = False
    number: Annotated[float, Field(gt=0, lt=1)] = 0.5
    choice: Literal["a", "b"] = "a"
    maybe: int | None = None
    words: list[str] = Field(default_factory=list)
    table: dict[str, int] = {}
    inner: Fixed = Fixed()
    """Hidden by its keys."""
    optional: Fixed | None = None
    either: Fixed | Free = Fixed()
    needed: str


def test_each_shape_of_setting_has_words():
    described = describe(ACME, RewardPlugin(name="all", summary="", target="x:Y", settings=Everything))
    assert {option.name: option.type for option in described.options} == {
        "flag": "true | false",
        "number": "number > 0, < 1",
        "choice": "a | b",
        "maybe": "whole number | null",
        "words": "list of text",
        "table": "mapping",
        "inner.width": "whole number >= 1, <= 8",
        "optional": "mapping | null",
        "optional.width": "whole number >= 1, <= 8",
        "either": "mapping",
        "needed": "text",
    }
    options = {option.name: option for option in described.options}
    assert (options["inner.width"].default, options["inner.width"].doc) == (2, "How wide.")
    assert options["optional"].doc == "A shape of its own."
    assert (options["needed"].required, options["needed"].has_default) == (True, False)
    # made on need: neither required nor with a default to show
    assert (options["words"].required, options["words"].has_default) == (False, False)
    assert described.doc == "One key of each shape."


def test_settings_that_ask_for_more_have_no_defaults():
    assert default_settings(RewardPlugin(name="all", summary="", target="x:Y", settings=Everything)) is None
    assert default_settings(RewardPlugin(name="fixed", summary="", target="x:Y", settings=Fixed)) == Fixed()


def test_alternatives_of_a_channel_s_needs_stand_best_first():
    plugin = LossChannelPlugin(
        name="pull",
        summary="",
        target="x:Y",
        needs=lambda settings: (frozenset({Need.LOGPS, Need.EMA}), frozenset({Need.LOGITS}), frozenset()),
    )
    assert describe(ACME, plugin).facts == {"needs": ["ema + logps", "logits", "nothing beyond rollouts"]}


def test_a_backend_provides_what_it_says_of_the_smallest_spec():
    plugin = BackendPlugin(
        name="acme",
        summary="",
        target="x:Y",
        settings=Fixed,
        provides=lambda spec: frozenset({Need.LOGPS} if spec.backend.settings.width == 2 else ()),
    )
    assert describe(ACME, plugin).facts["provides"] == ["logps"]


def test_a_plugin_whose_own_code_breaks_is_named():
    plugin = BackendPlugin(name="bad", summary="", target="x:Y", provides=lambda spec: {}["nothing"])
    with pytest.raises(MissingError) as caught:
        describe(ACME, plugin)
    assert str(caught.value) == (
        "backend 'bad' of acme 1.2 cannot be described: KeyError: 'nothing'\n"
        "  fix: composer-run --disable-plugin acme leaves the plugin out"
    )


@pytest.mark.parametrize("claim", list(Registry.discover()), ids=lambda claim: f"{claim[1].kind}-{claim[1].name}")
def test_everything_installed_can_be_described_and_each_option_has_a_type(claim):
    described = describe(*claim)
    assert described.summary
    assert [option.name for option in described.options if "any value" in option.type] == []


class Two:
    @hookimpl
    def composer_rewards(self):
        yield RewardPlugin(name="same", summary="", target="x:Y")

    @hookimpl
    def composer_loss_channels(self):
        yield LossChannelPlugin(name="same", summary="", target="x:Y")


def test_a_name_finds_every_kind_and_an_owner_chooses_among_claims():
    registry = Registry()
    registry.add(Two(), ACME)
    registry.add(Two(), Owner("other", "1", "other"))
    found = [(owner.name, contribution.kind) for owner, contribution in find(registry, "same")]
    assert found == [("acme", Kind.CHANNEL), ("other", Kind.CHANNEL), ("acme", Kind.REWARD), ("other", Kind.REWARD)]
    assert [owner.name for owner, _ in find(registry, "other/same")] == ["other", "other"]
    assert [owner.name for owner, _ in find(registry, "acme")] == ["acme", "acme"]
    with pytest.raises(UsageError):
        find(registry, "third/same")


def test_a_plugin_that_is_not_loaded_is_found_by_its_problem():
    registry = Registry(problems=[PluginProblem(ACME, "import", "ImportError: no", "pip install acme")])
    for name in ("acme", "acme-entry"):
        with pytest.raises(MissingError) as caught:
            find(registry, name)
        assert str(caught.value) == "acme 1.2 (import): ImportError: no\n  fix: pip install acme"
