"""The core's head in place of TRL's: the same log-probs, entropies and gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from composer_core.loss.heads import take_apart
from composer_trl import policy_head
from composer_trl.micro_batch import listen

IDS = torch.tensor([[0, 0, 7, 8, 20, 21, 22, 1], [3, 4, 5, 6, 30, 31, 1, 0], [0, 4, 5, 6, 9, 9, 9, 9]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0]])
WIDTH, TEMPERATURE = 4, 0.7
SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def _qwen(lora=False):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)) if lora else model


def _gemma():
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0, attn_implementation="eager"))
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


def _theirs(model, mask):
    labels = IDS.masked_fill(mask == 0, -100)
    labels[:, :-WIDTH] = -100
    out = model(input_ids=IDS, attention_mask=mask, labels=labels, fused_lm_head=True)
    return out.log_probs[:, -WIDTH:], out.entropy[:, -WIDTH:]


def _ours(model, mask):
    with listen(model) as forward:
        return policy_head.score(
            model,
            IDS,
            mask,
            WIDTH,
            forward=forward,
            head=take_apart(model).head,
            temperature=TEMPERATURE,
            autocast=lambda: torch.autocast("cpu", enabled=False),
        )


def _gradients(model, logps):
    model.zero_grad()
    (logps * torch.arange(1.0, 13.0).view(3, 4)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [_qwen, lambda: _qwen(lora=True), _gemma], ids=["full", "lora", "softcap"])
def test_log_probs_entropies_and_gradients_are_those_of_trls_head(make):
    torch.manual_seed(0)
    model = make()
    theirs, their_entropies = _theirs(model, MASK)
    expected = _gradients(model, theirs)
    ours, entropies = _ours(model, MASK)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.allclose(entropies, their_entropies, atol=1e-5)
    assert (ours[MASK[:, -WIDTH:] == 0] == 0).all()
    actual = _gradients(model, ours)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-4, atol=1e-6), name


def test_a_micro_batch_without_a_scored_token_is_joined_to_the_graph():
    model = _qwen()
    ours, _ = _ours(model, MASK * torch.tensor([1] * 4 + [0] * 4))
    assert not ours.any()
    assert not any(gradient.any() for gradient in _gradients(model, ours).values())


def test_a_call_that_wants_more_than_log_probs_is_not_for_this_head():
    assert policy_head.is_enough({"compute_entropy": True, "compute_aux_loss": False, "pixel_values": None})
    assert not policy_head.is_enough({"compute_entropy": True, "compute_aux_loss": True})
    assert not policy_head.is_enough({"pixel_values": torch.zeros(1)})
