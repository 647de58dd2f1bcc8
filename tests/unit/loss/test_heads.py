"""Every model type that is taken apart gives its own logits back, and the fused losses those of its logits."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from composer_core.batch import Hints, Seqs
from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.heads import HEADS, take_apart
from composer_core.loss.views import ModelView

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OWN = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "falcon_h1": {
        "lm_head_multiplier": 0.4,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "gemma2": {"final_logit_softcapping": 0.7},
    "gemma3_text": {"final_logit_softcapping": 0.7},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_oss": {"num_local_experts": 4},
    "granite": {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0, "num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "nanochat": {"final_logit_softcapping": 0.7},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
}


def _model(model_type, *, seed=0):
    config = AutoConfig.for_model(model_type, **{**SMALL, **OWN.get(model_type, {})})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:  # a head's bias starts at 0 and would hide
            nn.init.normal_(parameter, std=0.3)
    return model


SEQS = Seqs.from_lists([[3, 9, 4, 5, 7], [11], [8, 6, 20]])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(HEADS))
def test_a_known_type_gives_its_own_logits(model_type):
    model = _model(model_type)
    assert take_apart(model) is not None
    at = torch.tensor([1, 4, 8])
    with torch.no_grad():
        found = ModelView(model, rollouts=SEQS).logits(SEQS, at, grad=True, temperature=0.7)
        ids, mask = SEQS.padded()
        whole = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits / 0.7
    assert torch.allclose(found, torch.stack([whole[0, 0], whole[0, 3], whole[2, 1]]), rtol=1e-6, atol=1e-6)


class Opaque(nn.Module):
    """The same model, of no type that anybody knows."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, use_cache):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


# one for each way of making logits: plain and tied, bias, softcap, scale
WAYS = ("qwen3", "phi", "gemma2", "cohere")
SPECS = {
    "jsd": Divergence(temperature=1.3),
    "forward": Divergence(DivergenceKind.KL_TEACHER_STUDENT, clip=0.02),
    "taid": Divergence(DivergenceKind.KL_STUDENT_TEACHER, taid=0.4),
    "topk": Divergence(support=Support.TOPK_UNION, k=7),
    "sampled": Divergence(DivergenceKind.KL_STUDENT_TEACHER, support=Support.SAMPLED),
    "soft": Divergence(DivergenceKind.KL_STUDENT_TEACHER, gate=SoftGate()),
    "paper": Divergence(DivergenceKind.KL_STUDENT_TEACHER, gate=PaperGate(tau=0.1, k=5)),
}
HINTS = Hints(
    seqs=Seqs.from_lists([[3, 9, 30, 4, 5, 7], [8, 31, 6, 20]]),
    student=torch.tensor([2, 3, 8, 0]),
    teacher=torch.tensor([3, 4, 9, 0]),
    weight=torch.tensor([1.0, 0.5, 2.0, 0.0]),  # the last is filler
)


def _loss_and_gradients(policy, teacher, spec):
    """A divergence and log-probs together: their gradients meet in the same hidden states."""
    view = ModelView(policy, rollouts=SEQS, teacher=teacher)
    values = view.divergence(HINTS, spec, teacher="teacher")
    logps = view.logps(SEQS, grad=True, temperature=0.8)
    loss = 3.0 * (values * HINTS.weight).sum() / 4 + (logps * torch.linspace(-1, 1, len(logps))).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    return values.detach(), logps.detach(), [g for g in gradients if g is not None]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("model_type", WAYS)
def test_the_fused_losses_are_those_of_the_logits(model_type, spec):
    policy, teacher = _model(model_type).double(), _model(model_type, seed=1).double()
    fused = _loss_and_gradients(policy, teacher, spec)
    with pytest.warns(UserWarning, match="Opaque is no model type that composer_core.loss.heads knows"):
        dense = _loss_and_gradients(Opaque(policy), Opaque(teacher), spec)
    assert torch.allclose(fused[0], dense[0], rtol=1e-9, atol=1e-12)
    assert torch.allclose(fused[1], dense[1], rtol=1e-9, atol=1e-12)
    assert len(fused[2]) == len(dense[2])
    for mine, theirs in zip(fused[2], dense[2], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-7, atol=1e-11)


def test_a_frozen_head_still_sends_its_gradient_through(tmp_path):
    policy = _model("phi").double()
    policy.lm_head.requires_grad_(False)
    opaque = Opaque(copy.deepcopy(policy))
    opaque.model.lm_head.requires_grad_(False)

    def gradient(model, parameters):
        view = ModelView(model, rollouts=SEQS, teacher=policy)
        return torch.autograd.grad((view.divergence(HINTS, Divergence()) * HINTS.weight).sum(), parameters)

    fused = gradient(policy, list(policy.model.layers.parameters()))
    with pytest.warns(UserWarning, match="Opaque"):
        dense = gradient(opaque, list(opaque.model.model.layers.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-7, atol=1e-12) for a, b in zip(fused, dense, strict=True))


def test_inside_a_lora_model_the_adapters_take_part_and_the_base_is_the_frozen_teacher():
    from peft import LoraConfig, get_peft_model

    from composer_core.loss.teachers import SelfTeacher, make_teacher

    base = _model("qwen3")
    expected = ModelView(copy.deepcopy(base), rollouts=SEQS).logps(SEQS, grad=False, temperature=1.0)
    policy = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    assert take_apart(policy) is not None
    view = ModelView(policy, rollouts=SEQS, teacher=teacher)
    own = view.logps(SEQS, grad=True, temperature=1.0)
    ids, mask = SEQS.padded()
    whole = policy(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.log_softmax(-1)
    assert own[1].item() == pytest.approx(whole[0, 0, 9].item(), rel=1e-5)
    frozen = view.logps(SEQS, model="teacher", grad=False, temperature=1.0)
    assert torch.allclose(frozen, expected, atol=1e-6)
    assert not torch.allclose(own, expected, atol=1e-3)


def test_a_head_with_an_adapter_is_not_taken_apart():
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(_model("phi"), LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert take_apart(policy) is None


def test_adapters_that_were_trained_before_are_part_of_the_frozen_teacher():
    from peft import LoraConfig, get_peft_model

    from composer_core.loss.teachers import SelfTeacher, make_teacher

    policy = get_peft_model(_model("qwen3"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = [parameter for name, parameter in policy.named_parameters() if "lora_B" in name]
    for parameter in adapters:
        nn.init.normal_(parameter, std=0.5)
    expected = ModelView(policy, rollouts=SEQS).logps(SEQS, grad=False, temperature=1.0)
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    with torch.no_grad():
        for parameter in adapters:
            parameter.zero_()
    view = ModelView(policy, rollouts=SEQS, teacher=teacher)
    assert torch.equal(view.logps(SEQS, model="teacher", grad=False, temperature=1.0), expected)


def test_a_stored_teacher_brings_its_own_head_to_a_divergence():
    from composer_core.loss.teachers import SelfTeacher, make_teacher

    policy = _model("qwen3")
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    other = copy.deepcopy(policy)
    with torch.no_grad():
        policy.lm_head.weight.mul_(0.5)
    mine = ModelView(policy, rollouts=SEQS, teacher=teacher).divergence(HINTS, Divergence(), teacher="teacher")
    theirs = ModelView(policy, rollouts=SEQS, teacher=other).divergence(HINTS, Divergence(), teacher="teacher")
    assert torch.equal(mine, theirs)
    assert (mine.detach() > 0).any()
