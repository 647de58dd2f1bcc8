"""The fakes pass the suite, and so does one with state and one that is `loss` alone."""

import pytest

from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum
from composer_core.protocols import Need, Term
from composer_core.testing.contracts import ChannelContract
from composer_core.testing.fakes import Brevity, HintFake, HintFakeSettings


class TestBrevity(ChannelContract):
    @pytest.fixture
    def channel(self):
        return Brevity()


class TestHintFake(ChannelContract):
    @pytest.fixture(params=[0.5, 2.0], ids=["some-rows", "all-rows"])
    def channel(self, request):
        return HintFake(HintFakeSettings(below=request.param))

    @pytest.fixture
    def needs(self):
        return frozenset({Need.DIVERGENCE_FULL})


class Anchor(ChannelDefaults):
    """Squared log-probs, not linear in them, with a scale that grows: a channel with state."""

    def __init__(self):
        self.scale = 1.0

    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term(self.scale * masked_sum(logps**2, batch.rollouts.action), "tokens")

    def on_step_end(self, step, metrics):
        self.scale *= 1.1

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


class TestAnchor(ChannelContract):
    @pytest.fixture
    def channel(self):
        return Anchor()
