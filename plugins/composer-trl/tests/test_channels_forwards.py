"""How often a micro-batch runs the model: channels use TRL's own forward of the policy, whatever their rows hold."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer

from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import grpo
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS

PROMPTS = [[10, 11, 12], [13]]
COMPLETIONS = [[30 + 5 * i + j for j in range(n)] + [1] for i, n in enumerate([4, 1, 6, 3])]
REWARDS = [0.0, 1.0, 1.0, 0.5]
POLICY, WITH, WITHOUT = 1, "with gradient", "without"


class FirstOnly(Sdpo):
    """One rollout of the four has a hint."""

    def prepare(self, rollout):
        if rollout.reward != 0:
            return None
        own, begin = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
        tokens = range(begin, len(own))
        return pack([Segment([90, *own], tokens, [at + 1 for at in tokens])], rollout)


@pytest.mark.parametrize("native", [True, False], ids=["TRL's objective", "an objective of the core"])
@pytest.mark.parametrize(
    ("sdpo", "replay", "expected"),
    [
        (None, None, {WITH: POLICY}),
        # the teacher reads the hints; the log's hint gain and the importance ratios cost no forward
        ({}, None, {WITH: POLICY, WITHOUT: 1}),
        ({"teacher": "self-live", "is_clip": 1.5}, None, {WITH: POLICY, WITHOUT: 1}),
        # chosen and rejected answers are read together, by the policy and by a reference that is not stored
        (None, {}, {WITH: POLICY + 1}),
        (None, {"reference": "model"}, {WITH: POLICY + 1, WITHOUT: 1}),
        ({}, {}, {WITH: POLICY + 1, WITHOUT: 1}),
    ],
    ids=["nothing", "hints", "live teacher", "pairs", "pairs with the model as reference", "both"],
)
def test_each_micro_batch_runs_the_same_forwards_and_the_policys_once(
    sdpo, replay, expected, native, tiny_model_folder, tmp_path
):
    channels = []
    if sdpo is not None:
        settings = SdpoSettings(**sdpo)
        channels.append(ActiveChannel("sdpo", 1.0, FirstOnly(settings), sdpo_needs(settings)[0]))
    if replay is not None:
        settings = ReplaySettings(pairs_per_step=1, **replay)
        channel = Replay(settings)
        channel.take_pairs([pair_row([10], [40, 41], [50], reference=(-4.0, -9.0))])
        channels.append(ActiveChannel("replay", 1.0, channel, replay_needs(settings)[0]))
    trainer = fixed_trainer(
        tiny_model_folder,
        tmp_path,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=REWARDS,
        loss=CompositeLoss(channels, grpo(OBJECTIVE_SETTINGS["grpo"]())),
        native=native,
        # four micro-batches: one has the hint, one the pair
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )
    assert micro_batches(trainer) == [expected] * 4


def micro_batches(trainer):
    """Forwards of the backbone in each micro-batch's loss."""
    seen, stock = [], trainer._compute_loss

    def count(module, args, output):
        seen[-1][WITH if torch.is_grad_enabled() else WITHOUT] += 1

    def compute(*args):
        seen.append(Counter())
        with_hook = trainer.model.base_model.register_forward_hook(count)
        try:
            return stock(*args)
        finally:
            with_hook.remove()

    trainer._compute_loss = compute
    trainer.train()
    return [dict(counted) for counted in seen]
