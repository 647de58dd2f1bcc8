"""Every preset passes the suite, also with a KL in the loss."""

import pytest

from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.testing.contracts import ObjectiveContract


class TestPresets(ObjectiveContract):
    @pytest.fixture(params=PRESETS)
    def objective(self, request):
        return PolicyObjective(PRESETS[request.param], OBJECTIVE_SETTINGS[request.param]())


class TestPresetsScaledByTheBatch(ObjectiveContract):
    @pytest.fixture(params=PRESETS)
    def objective(self, request):
        settings = OBJECTIVE_SETTINGS[request.param](scale_rewards="batch", kl_coef=0.0)
        return PolicyObjective(PRESETS[request.param], settings)


class TestGrpoWithAKl(ObjectiveContract):
    @pytest.fixture
    def objective(self):
        return PolicyObjective(PRESETS["grpo"], OBJECTIVE_SETTINGS["grpo"](kl_coef=1e-3))
