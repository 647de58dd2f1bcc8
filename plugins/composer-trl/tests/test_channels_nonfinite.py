"""A channel that gives no number stops the run before the step is applied, and says which channel, row and token."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer

from composer_core.channels.rows import Segment, pack
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import SdpoSettings, sdpo_needs
from composer_core.errors import NonFinite
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import grpo
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Term

PROMPTS = [[10, 11, 12], [13]]
COMPLETIONS = [[30 + 5 * i + j for j in range(n)] + [1] for i, n in enumerate([4, 1, 6, 3])]
REWARDS = [0.0, 1.0, 0.0, 1.0]
BAD, GOOD = 92, 91
"""Of the two tokens that hints are made of, one has an embedding that is not a number."""


class Hinted(Sdpo):
    """The third rollout's hint stands behind its second token and holds the bad one; the first's is good."""

    def prepare(self, rollout):
        if rollout.reward == 1:
            return None
        third = list(rollout.completion_ids) == COMPLETIONS[2]
        own, at = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids) + 2
        tokens = range(at, len(own))
        hinted = [*own[:at], BAD if third else GOOD, *own[at:]]
        return pack([Segment(hinted, tokens, [token + 1 for token in tokens])], rollout)


class Overflow(ChannelDefaults):
    """Its own arithmetic fails: nothing it was handed is at fault."""

    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term((logps * 1e30 * 1e30).sum(), "tokens")


@pytest.fixture
def poisoned(tiny_model_folder):
    """A model that is sound as long as nobody reads the bad token."""
    config = AutoConfig.from_pretrained(tiny_model_folder, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().weight.data[BAD] = torch.nan
    return model


def make(folder, tmp_path, *, model, channel, native=True, **fields):
    needs = sdpo_needs(channel.settings)[0] if isinstance(channel, Sdpo) else frozenset()
    loss = CompositeLoss([ActiveChannel("mine", 1.0, channel, needs)], grpo(OBJECTIVE_SETTINGS["grpo"]()))
    return fixed_trainer(
        folder,
        tmp_path,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=REWARDS,
        model=model,
        loss=loss,
        native=native,
        learning_rate=0.1,
        **fields,
    )


@pytest.mark.parametrize("native", [True, False], ids=["TRL's objective", "an objective of the core"])
def test_the_message_names_channel_rollout_and_token_and_no_weight_has_moved(
    native, poisoned, tiny_model_folder, tmp_path
):
    before = {name: parameter.detach().clone() for name, parameter in poisoned.named_parameters()}
    trainer = make(
        tiny_model_folder,
        tmp_path,
        model=poisoned,
        channel=Hinted(SdpoSettings()),
        native=native,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )
    with pytest.raises(NonFinite) as caught:
        trainer.train()
    # the first token behind the hint is the third of the answer, behind a prompt of one
    token = COMPLETIONS[2][2]
    assert caught.value.problem == (
        f"the loss of 'mine' is nan at step 1: the divergence of row 0 (1-1-0), token 3 (id {token}), is not finite"
    )
    assert trainer.state.global_step == 0
    for name, parameter in poisoned.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_arithmetic_of_the_channels_own_is_named_without_a_token(tiny_model_folder, tmp_path):
    trainer = make(tiny_model_folder, tmp_path, model=None, channel=Overflow())
    with pytest.raises(NonFinite) as caught:
        trainer.train()
    assert caught.value.problem == "the loss of 'mine' is -inf at step 1"


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["without clipping", "with clipping"])
def test_a_finite_loss_with_a_gradient_that_is_not_stops_too(clip, tiny_model_folder, tmp_path):
    class Cliff(ChannelDefaults):
        def loss(self, view, batch):
            logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
            return Term((logps * 0).abs().sqrt().sum(), "tokens")  # 0, and its slope is 0 x inf

    trainer = make(tiny_model_folder, tmp_path, model=None, channel=Cliff(), max_grad_norm=clip)
    start = trainer.model.lm_head.weight.detach().clone()
    with pytest.raises(NonFinite) as caught:
        trainer.train()
    assert caught.value.problem == "the gradient norm is nan at step 1"
    assert torch.equal(trainer.model.lm_head.weight, start)


def test_a_step_that_went_well_stays(tiny_model_folder, tmp_path):
    class Later(ChannelDefaults):
        def loss(self, view, batch):
            logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
            return Term(logps.sum() if batch.step == 1 else logps.sum() * torch.inf, "tokens")

    trainer = make(tiny_model_folder, tmp_path, model=None, channel=Later(), num_iterations=2, max_steps=2)
    start = trainer.model.lm_head.weight.detach().clone()
    with pytest.raises(NonFinite, match="the loss of 'mine' is -inf at step 2"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not torch.equal(trainer.model.lm_head.weight, start)
    assert trainer.model.lm_head.weight.isfinite().all()
