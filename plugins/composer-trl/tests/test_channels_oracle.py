"""Hints in the prompt give, token by token, the divergences of TRL's own self-distillation (trl.experimental.sdpo).

The channel runs in the real trainer; TRL's pure functions get the logits of a plain forward of the same model. The
rewards are all equal, so that the policy loss is 0 and every gradient is the channel's.
"""

import copy
import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from trl.experimental.sdpo.loss_utils import (
    compute_full_logit_self_distillation_loss,
    compute_sampled_token_self_distillation_loss,
    compute_topk_self_distillation_loss,
)

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer
from transformers import TrainerCallback

from composer_core.channels.rows import Segment, pack
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import SdpoSettings, sdpo_needs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_trl.metrics import OWN

PROMPTS = [[10, 11, 12], [13]]
COMPLETIONS = [[30 + 5 * i + j for j in range(n)] + [1] for i, n in enumerate([4, 1, 6, 3])]
HINT = [90, 91, 92]
WEIGHT = 2.0


class Recording(Sdpo):
    """Every completion token learns from the same token behind prompt + hint; keeps what the view gave."""

    def __init__(self, settings):
        super().__init__(settings)
        self.values = []

    def prepare(self, rollout):
        own, begin = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
        tokens = range(begin, len(own))
        teacher_ids = [*rollout.prompt_ids, *HINT, *rollout.completion_ids]
        return pack([Segment(teacher_ids, tokens, [at + len(HINT) for at in tokens])], rollout)

    def loss(self, view, batch):
        kept = _Kept(view, batch.rollouts.uid, batch.hints)
        term = super().loss(kept, batch)
        owner = batch.rollouts.seqs.owner[batch.hints.student]
        for row, uid in enumerate(batch.rollouts.uid):
            self.values.append((uid, kept.first[owner == row]))
        return term


class _Kept:
    """A view whose first divergence is kept; the second one is only for the log."""

    def __init__(self, view, *_):
        self._view, self.first = view, None

    def divergence(self, *args, **kwargs):
        values = self._view.divergence(*args, **kwargs)
        self.first = values.detach().clone() if self.first is None else self.first
        return values

    def __getattr__(self, name):
        return getattr(self._view, name)


class Gradients(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, *_, model, **__):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


def full(alpha):
    return lambda student, teacher, ids: compute_full_logit_self_distillation_loss(
        student, teacher, distillation_alpha=alpha
    )


def topk(alpha, tail):
    return lambda student, teacher, ids: compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=7, distillation_alpha=alpha, distillation_add_tail=tail
    )


TOPK = {"support": "topk", "k": 7, "side": "student"}
# settings of the channel -> TRL's per-token loss of logits; its alpha is the teacher's share of the mixture, our beta
FORMS = {
    "full KL(teacher, student)": ({"divergence": "kl_teacher_student"}, full(0.0)),
    "full KL(student, teacher)": ({"divergence": "kl_student_teacher", "support": "full"}, full(1.0)),
    "full JSD": ({"beta": 0.5}, full(0.5)),
    "full lopsided JSD": ({"beta": 0.2}, full(0.2)),
    "top-k JSD with tail": ({**TOPK}, topk(0.5, True)),
    "top-k KL(teacher, student) with tail": ({**TOPK, "divergence": "kl_teacher_student"}, topk(0.0, True)),
    "top-k KL(student, teacher) with tail": ({**TOPK, "divergence": "kl_student_teacher"}, topk(1.0, True)),
    "top-k lopsided JSD without tail": ({**TOPK, "tail": False, "beta": 0.3}, topk(0.3, False)),
}


@pytest.fixture(scope="module")
def model(tiny_model_folder):
    """The tiny model with weights that give distributions which are not all alike."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_trls_functions(form, model, tiny_model_folder, tmp_path):
    settings, function = FORMS[form]
    channel, found, logged = run(settings, model, tiny_model_folder, tmp_path)
    policy = copy.deepcopy(model)
    values = theirs(policy, model, function)

    assert sorted(uid for uid, _ in channel.values) == ["1-0-0", "1-0-1", "1-1-0", "1-1-1"]
    for uid, mine in channel.values:
        torch.testing.assert_close(mine, values[uid].detach(), rtol=1e-5, atol=1e-6)
    mean = torch.cat(list(values.values())).sum() / sum(map(len, COMPLETIONS))
    assert logged[f"{OWN}loss/sdpo"] == pytest.approx(mean.item(), rel=1e-5)
    assert logged[f"{OWN}loss/policy"] == 0.0
    assert logged[f"{OWN}loss/total"] == pytest.approx(WEIGHT * mean.item(), rel=1e-5)
    (WEIGHT * mean).backward()
    assert_gradients(found, policy)


def test_sampled_tokens_have_the_gradient_of_trls_estimate(model, tiny_model_folder, tmp_path):
    settings = {"support": "sampled", "divergence": "kl_student_teacher"}
    channel, found, _ = run(settings, model, tiny_model_folder, tmp_path)
    policy = copy.deepcopy(model)
    logps = []

    def estimate(student, teacher, ids):
        logps.append(student.log_softmax(-1).gather(-1, ids[..., None])[..., 0])
        return compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)

    values = theirs(policy, model, estimate)
    # TRL's value is (log q - log p) log q, whose gradient is what it is for; ours is the estimate log q - log p itself
    ratios = {uid: (value / own).detach()[0] for (uid, value), own in zip(values.items(), logps, strict=True)}
    for uid, mine in channel.values:
        torch.testing.assert_close(mine, ratios[uid].reshape(-1), rtol=1e-4, atol=1e-5)
    (WEIGHT * sum(value.sum() for value in values.values()) / sum(map(len, COMPLETIONS))).backward()
    assert_gradients(found, policy)


def run(settings, model, folder, tmp_path):
    chosen = SdpoSettings(on="all", **settings)
    channel, gradients = Recording(chosen), Gradients()
    trainer = fixed_trainer(
        folder,
        tmp_path,
        model=copy.deepcopy(model),
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=[0.5] * len(COMPLETIONS),
        loss=CompositeLoss([ActiveChannel("sdpo", WEIGHT, channel, sdpo_needs(chosen)[0])], None),
        # TRL's dr_grpo gives an exact 0 for advantages of 0
        loss_type="dr_grpo",
    )
    trainer.add_callback(gradients)
    trainer.train()
    return channel, gradients.found, trainer.state.log_history[0]


def theirs(policy, teacher, function):
    """uid -> (tokens,) of TRL's function, each sequence by itself and unpadded."""
    values = {}
    for i, completion in enumerate(COMPLETIONS):
        prompt, ids = PROMPTS[i // 2], torch.tensor([completion])
        student = policy(input_ids=torch.tensor([prompt + completion])).logits[:, len(prompt) - 1 : -1]
        with torch.no_grad():
            hinted = [*prompt, *HINT, *completion]
            taught = teacher(input_ids=torch.tensor([hinted])).logits[:, len(prompt) + len(HINT) - 1 : -1]
        values[f"1-{i // 2}-{i % 2}"] = function(student, taught, ids).reshape(-1)
    return values


def assert_gradients(found, policy):
    assert found.keys() == dict(policy.named_parameters()).keys()
    for name, parameter in policy.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
