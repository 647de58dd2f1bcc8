"""Contract suites: what every reward, objective, channel and backend must pass, ours and third parties' alike.

Inherit one in a test file, name what is under test in a fixture, and pytest runs the suite:

    from composer_core.testing.contracts import RewardContract

    class TestPolite(RewardContract):
        @pytest.fixture()
        def reward(self):
            return Polite(PoliteSettings())

Each class says which fixtures it takes; those without a default must be given.
"""

from composer_core.testing.contracts.backend import BackendContract
from composer_core.testing.contracts.channel import ChannelContract
from composer_core.testing.contracts.objective import ObjectiveContract
from composer_core.testing.contracts.reward import RewardContract

__all__ = ["BackendContract", "ChannelContract", "ObjectiveContract", "RewardContract"]
