"""A named teacher that is the starting model itself teaches exactly what a frozen self-teacher does, in the trainer."""

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer
from transformers import AutoModelForCausalLM

from composer_core.channels.rows import Segment, pack
from composer_core.channels.sdpo import sdpo
from composer_core.channels.settings import SdpoSettings, sdpo_needs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_trl.metrics import OWN

PROMPTS = [[10, 11, 12], [13]]
COMPLETIONS = [[30 + 5 * i + j for j in range(n)] + [1] for i, n in enumerate([4, 1, 6, 3])]
HINT = [90, 91, 92]
FORM = {"divergence": "kl_student_teacher", "support": "sampled", "on": "all"}


class Server:
    """Scores with a model, one text at a time, as a server would; it does not answer about rollout `silent`."""

    def __init__(self, model, silent=""):
        self.model, self.silent, self.calls = model, silent, []

    def score(self, requests):
        self.calls.append([request.state_id for request in requests])
        return [None if request.state_id == self.silent else self._logps(request) for request in requests]

    @torch.no_grad()
    def _logps(self, request):
        ids = torch.tensor([request.ids])
        logps = self.model(input_ids=ids).logits.float().log_softmax(-1)[0, request.start - 1 : -1]
        return logps.gather(-1, ids[0, request.start :, None])[:, 0].tolist()


def _hinted(rollout):
    """Every completion token learns from the same token behind prompt + hint."""
    own, begin = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
    tokens = range(begin, len(own))
    teacher_ids = [*rollout.prompt_ids, *HINT, *rollout.completion_ids]
    return pack([Segment(teacher_ids, tokens, [at + len(HINT) for at in tokens])], rollout)


@pytest.fixture(scope="module")
def model(tiny_model_folder):
    """The tiny model with weights that give distributions which are not all alike."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def _train(model, folder, scratch, *, server=None, teacher="self-frozen"):
    """The weights and the log after two optimiser steps; the second one on rollouts of a policy that has moved."""
    settings = SdpoSettings(teacher=teacher, **FORM)
    channel = sdpo(settings)
    channel.hinting.row = _hinted
    if server is not None:
        channel.take_scorers({teacher: server})
    policy = copy.deepcopy(model)
    trainer = fixed_trainer(
        folder,
        scratch,
        model=policy,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=[0.0, 1.0, 0.5, 0.25],
        loss=CompositeLoss([ActiveChannel("sdpo", 2.0, channel, sdpo_needs(settings)[0])], None),
        num_iterations=2,
        max_steps=2,
        learning_rate=1e-3,
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if f"{OWN}loss/sdpo" in line]
    return {name: p.detach().clone() for name, p in policy.named_parameters()}, logged


def test_a_server_with_the_starting_weights_is_a_frozen_self_teacher(model, tiny_model_folder, tmp_path):
    server = Server(model)
    ours, logged = _train(model, tiny_model_folder, tmp_path / "a", server=server, teacher="strong")
    own, expected = _train(model, tiny_model_folder, tmp_path / "b")
    assert len(logged) == len(expected) == 2
    for mine, theirs in zip(logged, expected, strict=True):
        for name in ("loss/sdpo", "sdpo/hint_gain", "active/sdpo", "tokens/sdpo"):
            assert mine[f"{OWN}{name}"] == pytest.approx(theirs[f"{OWN}{name}"], rel=1e-4), name
        assert mine[f"{OWN}grad_norm/sdpo"] > 0  # by log-probs, where that of the self-teacher is by hidden states
    started = dict(model.named_parameters())
    assert not all(torch.equal(weights, started[name]) for name, weights in own.items())
    for name, weights in own.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-5, atol=1e-6)
    # all rollouts of the generation in one call, and none again for its second pass
    assert [len(call) for call in server.calls] == [4]


def test_a_rollout_that_the_teacher_does_not_score_is_left_out(model, tiny_model_folder, tmp_path):
    server = Server(model, silent="1-0-0")
    _, logged = _train(model, tiny_model_folder, tmp_path, server=server, teacher="strong")
    assert [line[f"{OWN}active/sdpo"] for line in logged] == [0.75, 0.75]
    assert logged[0][f"{OWN}tokens/sdpo"] == sum(map(len, COMPLETIONS[1:]))
