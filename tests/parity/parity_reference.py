"""What every row of the table must give: `CompositeLoss` on a `ModelView` of the whole step, made the plain way.

One micro-batch, padded on the right; no hook; teacher and reference are deep copies of the model; old and reference
log-probs come from a plain log-softmax of the model's logits. Only the losses themselves are the core's, which have
tests of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parity_table import (
    COMPLETIONS,
    GROUP_SIZE,
    LONGEST,
    PROMPTS,
    REWARDS,
    Case,
    Step,
    action,
    composite,
    kept,
    reward,
    rollout,
)  # fmt: skip
from torch import Tensor, nn

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.views import ModelView

_SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_SMALL, "tie_word_embeddings": True},
    "llama": {**_SMALL, "tie_word_embeddings": False},
    "gemma2": {**_SMALL, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "cohere": {**_SMALL, "logit_scale": 0.25},
    "granite": {**_SMALL, "logits_scaling": 0.5},
    "opt": {
        "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0,
        "word_embed_proj_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 1,
    },
}  # fmt: skip
"""Model type -> its config; some 5,000 to 10,000 parameters each."""


def save_models(folder: Path) -> None:
    """Write each model with the tiny tokenizer to `folder/<type>`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from composer_core.hf.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for name, numbers in MODELS.items():
        config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **numbers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():  # wider than the usual start: distributions that are not all alike
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.3)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def build(case: Case, folder: Path) -> nn.Module:
    """The policy of a case as it starts, the same each time."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if case.dtype == "autocast" else getattr(torch, case.dtype)
    # from a folder, which a backend may load its reference from
    model = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=dtype)
    if case.drifted:
        _disturb(model, std=0.05)
    return model if case.adapter == "none" else _adapted(model, trained=case.adapter == "trained")


def _adapted(model: nn.Module, *, trained: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        if trained:
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.data.normal_(std=0.3)
    return adapted


def _disturb(model: nn.Module, *, std: float) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += std * torch.randn(parameter.shape, generator=generator)


def expected(case: Case, folder: Path) -> Sequence[Step]:
    """Losses and gradients of each optimiser step."""
    return list(_steps(case, folder))


def _steps(case: Case, folder: Path) -> Iterator[Step]:
    loss, policy = composite(case), build(case, folder).train()
    start = copy.deepcopy(policy).requires_grad_(False).eval()
    average = copy.deepcopy(start)
    teacher = average if (case.sdpo or {}).get("teacher") == "self-ema" else start
    rollouts = fixed(case, folder, loss.objective)
    own = {a.name: [a.channel.prepare(rollout(i, case)) for i in range(len(REWARDS))] for a in loss.active}
    for step in range(1, case.steps + 1):
        policy.zero_grad(set_to_none=True)
        rows = {**own, **loss.draw(step, 0, 1)}
        counts = {
            "tokens": float(rollouts.action.sum()),
            "sequences": float(len(REWARDS)),
            "max_tokens": float(len(REWARDS) * LONGEST),
            "micro_batches": 1.0,
            **loss.count(rows),
        }
        batch = Batch(rollouts=rollouts, counts=counts, step=step, total_steps=case.steps, temperature=case.temperature)
        view = ModelView(policy, rollouts=rollouts.seqs, teacher=teacher, reference=start)
        term = loss.policy(view, batch)
        parts = loss.channels(view, loss.batches(rows, batch))
        policy_loss = term.sum / counts[term.count]
        (policy_loss + parts.total).backward()
        losses = {"loss/policy": float(policy_loss.detach()), "loss/total": float((policy_loss + parts.total).detach())}
        losses |= {name: float(value) for name, value in parts.sums().items() if name.startswith("loss/")}
        yield Step(losses, {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
        loss.on_step_end(step, {**losses, **{f"active/{a.name}": 1.0 for a in loss.active}})
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.grad is not None:
                    parameter -= case.rate * parameter.grad
            rate = (case.sdpo or {}).get("ema_rate", 0.05)
            for mine, its in zip(average.parameters(), policy.parameters(), strict=True):
                mine.mul_(1 - rate).add_(its, alpha=rate)


def _origin(case: Case, folder: Path) -> nn.Module:
    """The reference of a KL: what a backend loads again, or the adapter as it was handed over."""
    from transformers import AutoModelForCausalLM

    if case.adapter != "none":
        return build(case, folder).eval()
    return AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=torch.float32).eval()


def fixed(case: Case, folder: Path, objective: Any) -> Rollouts:
    """The rollouts of a case, with what a trainer knows of them before its first step."""
    old, reference = build(case, folder).eval(), _origin(case, folder)
    ids = [PROMPTS[i // GROUP_SIZE] + COMPLETIONS[i] for i in range(len(REWARDS))]
    flags = [
        [False] * len(PROMPTS[i // GROUP_SIZE]) + [flag and kept(i, case) for flag in action(i)]
        for i in range(len(REWARDS))
    ]
    seqs = Seqs.from_lists(ids)
    mask = torch.tensor([flag for sequence in flags for flag in sequence])
    old_logps = _plain_logps(old, ids, temperature=case.temperature)
    ref_logps = _plain_logps(reference, ids, temperature=case.temperature)
    rewards = torch.tensor([torch.nan if (r := reward(i, case)) is None else r for i in range(len(REWARDS))])
    group = torch.arange(len(REWARDS)) // GROUP_SIZE
    lengths = torch.tensor([float(sum(sequence)) for sequence in flags])
    drift = torch.stack([((old_logps - ref_logps) * mask)[seqs.owner == i].sum() for i in range(len(ids))])
    advantages = objective.advantages(rewards, group, lengths, drift)
    return Rollouts(
        seqs=seqs,
        action=mask,
        advantages=advantages[seqs.owner],
        old_logps=old_logps if case.steps > 1 else None,
        ref_logps=ref_logps,
        rewards=rewards,
        group=group,
        uid=tuple(str(i) for i in range(len(REWARDS))),
    )


@torch.no_grad()
def _plain_logps(model: nn.Module, sequences: Sequence[Sequence[int]], *, temperature: float) -> Tensor:
    """(N,), each sequence by itself; 0 for first tokens."""
    found = []
    for ids in sequences:
        logits = model(input_ids=torch.tensor([ids])).logits[0].float() / temperature
        logps = logits.log_softmax(-1)
        found += [0.0] + [float(logps[i - 1, ids[i]]) for i in range(1, len(ids))]
    return torch.tensor(found)
