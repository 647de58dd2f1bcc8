"""One class line per thing offered: the suites come with Composer."""

import pytest
from acme_composer import plugin
from acme_composer.channel import Brevity
from acme_composer.objective import Reinforce
from acme_composer.reward import Polite

from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Owner
from composer_core.plugins.settings import NoSettings
from composer_core.testing.contracts import ChannelContract, ObjectiveContract, RewardContract


class TestReinforce(ObjectiveContract):
    @pytest.fixture
    def objective(self):
        return Reinforce(NoSettings())


class TestPolite(RewardContract):
    @pytest.fixture
    def reward(self):
        return Polite(NoSettings())


class TestBrevity(ChannelContract):
    @pytest.fixture(params=[0, 4])
    def channel(self, request):
        return Brevity(plugin.BrevitySettings(free=request.param))


@pytest.mark.parametrize(
    ("kind", "name", "target"),
    [
        (Kind.OBJECTIVE, "reinforce", Reinforce),
        (Kind.REWARD, "polite", Polite),
        (Kind.CHANNEL, "brevity", Brevity),
    ],
)
def test_what_the_plugin_names_is_there(plugin_registry, kind, name, target):
    plugin_registry.add(plugin, Owner("acme-composer", "1.2.0", "acme"))
    assert plugin_registry.problems == []
    _, contribution = plugin_registry.get(kind, name)
    assert contribution.load() is target
