"""Every rule of the registry; real entry points are faked by dist-info folders on sys.path."""

from __future__ import annotations

import hashlib
import sys

import pytest

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.contributions import Contribution, Kind, LossChannelPlugin, RewardPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry

OWNER = Owner("acme", "1.0", "acme")


class Channel:
    """Contributes one channel of the given name."""

    def __init__(self, name="margin", **options):
        self.contribution = LossChannelPlugin(name=name, summary="", target="acme.channel:Margin", **options)

    @hookimpl
    def composer_loss_channels(self):
        yield self.contribution


def problems(registry):
    return [str(problem) for problem in registry.problems]


# -- one plugin object -------------------------------------------------------------------------------------------------


def test_a_contribution_is_found_by_kind_and_name():
    registry = Registry()
    registry.add(plugin := Channel(), OWNER)
    assert registry.get(Kind.CHANNEL, "margin") == (OWNER, plugin.contribution)
    assert registry.get(Kind.CHANNEL, "acme/margin") == (OWNER, plugin.contribution)
    assert registry.names(Kind.CHANNEL) == ["margin"]
    assert registry.names(Kind.REWARD) == []
    assert list(registry) == [(OWNER, plugin.contribution)]


def test_a_misspelt_hook_costs_the_whole_plugin_and_nothing_else():
    class Misspelt(Channel):
        @hookimpl
        def composer_reward(self):  # the hook is composer_rewards
            return []

    registry = Registry()
    registry.add(Misspelt("lost"), OWNER)
    registry.add(Channel(), Owner("good", "2", "good"))
    (problem,) = registry.problems
    assert (problem.owner, problem.stage) == (OWNER, "register")
    assert "composer_reward" in problem.reason
    assert registry.names(Kind.CHANNEL) == ["margin"]
    assert registry.owners == [Owner("good", "2", "good")]


def test_an_unknown_hook_argument_costs_the_whole_plugin():
    class Curious:
        @hookimpl
        def composer_rewards(self, spec):
            return []

    registry = Registry()
    registry.add(Curious(), OWNER)
    (problem,) = registry.problems
    assert problem.stage == "register"
    assert registry.owners == []


class Wrong(Channel):
    """Its channel is right; its rewards are what the test says."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    @hookimpl
    def composer_rewards(self):
        return self.answer()


def _raises_late():
    yield RewardPlugin(name="first", summary="", target="a:B")
    raise RuntimeError("later")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: 1 / 0, "acme 1.0 (composer_rewards): ZeroDivisionError: division by zero"),
        # a generator raises when it is consumed, not when it is called
        (_raises_late, "acme 1.0 (composer_rewards): RuntimeError: later"),
        (lambda: ["polite"], "acme 1.0 (composer_rewards): returned str, expected RewardPlugin"),
        (
            lambda: [Channel().contribution],
            "acme 1.0 (composer_rewards): returned LossChannelPlugin, expected RewardPlugin",
        ),
        (lambda: 7, "acme 1.0 (composer_rewards): TypeError: 'int' object is not iterable"),
    ],
    ids=["raises", "generator-raises", "wrong-type", "wrong-kind", "not-iterable"],
)
def test_a_broken_hook_costs_only_its_own_contributions(answer, message):
    registry = Registry()
    registry.add(Wrong(answer), OWNER)
    assert problems(registry) == [message]
    assert registry.names(Kind.CHANNEL) == ["margin"]
    assert registry.names(Kind.REWARD) == []


@pytest.mark.parametrize("name", ["Margin", "1st", "a_b", "", "a b"])
def test_a_name_that_a_spec_could_not_write_is_refused(name):
    with pytest.raises(ValueError, match="must match"):
        Channel(name)


# -- looking up --------------------------------------------------------------------------------------------------------


def test_two_owners_of_a_name_are_an_error_only_when_it_is_used():
    registry = Registry()
    registry.add(Channel(), OWNER)
    registry.add(second := Channel(), rival := Owner("rival", "3", "rival"))
    assert registry.problems == []
    with pytest.raises(UsageError) as error:
        registry.get(Kind.CHANNEL, "margin")
    assert str(error.value) == (
        "channel 'margin' is offered by acme 1.0 and rival 3\n  fix: use: acme/margin or use: rival/margin"
    )
    assert registry.get(Kind.CHANNEL, "rival/margin") == (rival, second.contribution)


def test_an_unknown_name_gets_the_nearest_or_the_list():
    registry = Registry()
    registry.add(Channel(), OWNER)
    with pytest.raises(UsageError) as error:
        registry.get(Kind.CHANNEL, "margn")
    assert str(error.value) == "no channel is called 'margn'\n  fix: did you mean 'margin'?"
    with pytest.raises(UsageError) as error:
        registry.get(Kind.CHANNEL, "sdpo")
    assert str(error.value) == "no channel is called 'sdpo'; installed: margin"


def test_a_missing_target_is_reported_with_its_install_hint():
    contribution = Channel(install_hint="pip install acme").contribution
    with pytest.raises(MissingError) as error:
        contribution.load()
    assert str(error.value) == (
        "channel 'margin' cannot be loaded from acme.channel:Margin: No module named 'acme'\n  fix: pip install acme"
    )


def test_load_imports_the_target():
    assert Contribution.load(RewardPlugin(name="p", summary="", target="pathlib:Path")) is __import__("pathlib").Path


# -- installed distributions ------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(name, code, *metadata_lines)` puts a plugin distribution with a dist-info folder on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def _install(name, code, *metadata):
        module = name.replace("-", "_") + "_plugin"
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{name.replace('-', '_')}-0.3.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 0.3", *metadata])
        )
        info.joinpath("entry_points.txt").write_text(f"[composer]\n{name.removeprefix('composer-')} = {module}\n")
        modules.append(module)
        return module

    yield _install
    for module in modules:
        sys.modules.pop(module, None)


GOOD = """
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl

@hookimpl
def composer_loss_channels():
    yield LossChannelPlugin(name="margin", summary="", target=f"{__name__}:Margin")
"""


def of(registry, name):
    return [str(problem) for problem in registry.problems if problem.owner.name == name]


def test_an_installed_plugin_is_discovered(install):
    install("composer-acme", GOOD)
    owner, _ = Registry.discover().get(Kind.CHANNEL, "margin")
    assert owner == Owner("composer-acme", "0.3", "acme")


def test_a_plugin_that_breaks_at_import_costs_one_line(install):
    install("composer-acme", "import there_is_no_such_module")
    registry = Registry.discover()
    assert of(registry, "composer-acme") == [
        "composer-acme 0.3 (import): ModuleNotFoundError: No module named 'there_is_no_such_module'"
    ]
    assert "grpo" in registry.names(Kind.OBJECTIVE)


def test_a_broken_plugin_that_a_spec_uses_is_named_with_its_reason(install):
    install("composer-acme", "1 / 0")
    with pytest.raises(MissingError) as error:
        Registry.discover().get(Kind.BACKEND, "acme")
    assert str(error.value) == (
        "no backend is called 'acme'; the plugin that may bring it is not loaded: "
        "composer-acme 0.3 (import): ZeroDivisionError: division by zero\n  fix: pip install -U composer-acme"
    )


@pytest.mark.parametrize("name", ["acme", "composer-acme", "*"])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_disabled_plugin_is_never_imported(install, monkeypatch, name, by):
    module = install("composer-acme", "raise SystemExit('imported')")
    if by == "variable":
        monkeypatch.setenv("COMPOSER_DISABLE_PLUGINS", f"other, {name}")
    registry = Registry.discover(disabled=frozenset({name}) if by == "option" else frozenset())
    assert module not in sys.modules
    assert of(registry, "composer-acme") == [
        "composer-acme 0.3 (disabled): by --no-plugins, --disable-plugin or COMPOSER_DISABLE_PLUGINS"
    ]
    assert "grpo" in registry.names(Kind.OBJECTIVE)  # the core's own always stay


def test_without_third_parties_only_the_core_is_there(install):
    module = install("composer-acme", "raise SystemExit('imported')")
    registry = Registry.discover(third_party=False)
    assert module not in sys.modules
    assert {owner.name for owner in registry.owners} == {"composer-core"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("Requires-Dist: composer-core<0.1,>=0.0.1", "needs composer-core <0.1,>=0.0.1, found 0.1.0"),
        ("Requires-Python: >=4", "needs Python >=4, this is {}.{}.{}".format(*sys.version_info[:3])),
    ],
    ids=["other-core", "other-python"],
)
def test_a_plugin_for_other_versions_is_never_imported(install, metadata, message):
    module = install("composer-acme", "raise SystemExit('imported')", metadata)
    registry = Registry.discover()
    assert module not in sys.modules
    assert of(registry, "composer-acme") == [f"composer-acme 0.3 (requires): {message}"]


def test_a_plugin_for_these_versions_is_imported(install):
    install("composer-acme", GOOD, "Requires-Dist: composer-core<0.2,>=0.1", "Requires-Python: >=3.11")
    assert Registry.discover().names(Kind.CHANNEL)


def test_a_plugin_whose_requirements_are_not_met_is_refused_when_used(install):
    install(
        "composer-acme", GOOD, "Requires-Dist: hopper-engine>=2", "Requires-Dist: pydantic<2", "Requires-Dist: pluggy"
    )
    registry = Registry.discover()
    pydantic = __import__("pydantic").VERSION
    assert of(registry, "composer-acme") == []
    with pytest.raises(MissingError) as error:
        registry.get(Kind.CHANNEL, "margin")
    assert str(error.value) == (
        "channel 'margin' comes from composer-acme 0.3, which needs hopper-engine>=2, which is not installed; "
        f"pydantic<2, found {pydantic}\n  fix: pip install -U composer-acme"
    )


# -- local files -------------------------------------------------------------------------------------------------------


def test_a_local_file_is_a_plugin_known_by_its_hash(tmp_path):
    file = tmp_path / "my_channel.py"
    file.write_text(GOOD + "\nclass Margin:\n    pass\n")
    registry = Registry()
    owner = registry.add_file(file)
    assert owner == Owner("my_channel.py", "(local file)", "my_channel", hashlib.sha256(file.read_bytes()).hexdigest())
    assert registry.get(Kind.CHANNEL, "margin")[1].load().__name__ == "Margin"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0", "this plugin file does not load: ZeroDivisionError: division by zero"),
        (
            "from composer_core.plugins.hookspecs import hookimpl\n@hookimpl\n"
            "def composer_rewards():\n    return [3]\n",
            "returned int, expected RewardPlugin",
        ),
    ],
    ids=["import", "hook"],
)
def test_a_local_file_that_does_not_work_is_an_error_at_once(tmp_path, code, problem):
    file = tmp_path / "my_channel.py"
    file.write_text(code)
    with pytest.raises(UsageError) as error:
        Registry().add_file(file)
    assert str(error.value) == f"{file}: {problem}"


def test_a_local_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError) as error:
        Registry().add_file(tmp_path / "my_channel.py")
    assert str(error.value) == (
        f"{tmp_path / 'my_channel.py'}: no such plugin file\n  fix: paths in `plugins:` are relative to the spec"
    )
