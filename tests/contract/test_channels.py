"""The core's own channels pass the suite, with a hint put between prompt and answer as `traces/rows.py` does it."""

import pytest

from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo, TaidSdpo, sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.protocols import Need
from composer_core.testing.contracts import ChannelContract

HINT = [3, 4, 5]


def hinted(rollout, settings):
    """A row for a rollout that failed: its answer's own tokens, in two segments where tool output divides them."""
    if rollout.reward is None or rollout.reward >= settings.success:
        return None
    prompt, answer = list(rollout.prompt_ids), list(rollout.completion_ids)
    actions = [i for i, action in enumerate(rollout.action) if action]
    halves = [actions[:2], actions[2:]]
    segments = [
        Segment(
            teacher_ids=[*prompt, *HINT, *answer],
            student=[len(prompt) + i for i in half],
            teacher=[len(prompt) + len(HINT) + i for i in half],
            weight=[0.5 + i for i, _ in enumerate(half)],
        )
        for half in halves
    ]
    return pack(segments, rollout)


class Hinted(Sdpo):
    def prepare(self, rollout):
        return hinted(rollout, self.settings)


class TaidHinted(TaidSdpo):
    def prepare(self, rollout):
        return hinted(rollout, self.settings)


FORMS = {
    "default": {},
    "live": {"teacher": "self-live", "divergence": "kl_teacher_student"},
    "clipped": {"divergence": "kl_student_teacher", "token_clip": 0.05, "temperature": 1.3},
    "topk": {"support": "topk", "k": 5, "side": "union"},
    "soft-gate": {"gate": {"use": "soft"}},
    "paper-gate": {"gate": {"use": "paper", "k": 4}},
    "sampled": {"divergence": "kl_student_teacher", "support": "sampled"},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def settings(request):
    return SdpoSettings(**request.param)


class TestSdpo(ChannelContract):
    @pytest.fixture
    def channel(self, settings):
        return Hinted(settings)

    @pytest.fixture
    def needs(self, settings):
        return sdpo_needs(settings)[0]


class TestTaid(ChannelContract):
    @pytest.fixture
    def channel(self):
        return TaidHinted(SdpoSettings(target={"use": "taid", "start": 0.4}))

    @pytest.fixture
    def needs(self):
        return frozenset({Need.DIVERGENCE_FULL})


VARIANTS = ["dpo", "robust", "ipo", "simpo", "sigmoid-norm", "apo-zero", "apo-down", "orpo", "imitate"]


class TestReplay(ChannelContract):
    @pytest.fixture(params=[*((variant, "stored") for variant in VARIANTS), ("dpo", "model")], ids="-".join)
    def replay_settings(self, request):
        variant, reference = request.param
        return ReplaySettings(variant=variant, reference=reference, pairs_per_step=5)

    @pytest.fixture
    def channel(self, replay_settings):
        channel = Replay(replay_settings)
        channel.take_pairs(
            [
                pair_row([10 + i] * 2, [20 + i] * (i + 1), [30 + i, 31], reference=(-4.0 * (i + 1), -7.5))
                for i in range(3)
            ]
        )
        return channel

    @pytest.fixture
    def needs(self, replay_settings):
        return replay_needs(replay_settings)[0]


def test_a_specs_block_gives_a_channel_with_state_only_for_taid():
    assert type(sdpo(SdpoSettings(target={"use": "taid"}))) is TaidSdpo
    assert type(sdpo(SdpoSettings())) is Sdpo
