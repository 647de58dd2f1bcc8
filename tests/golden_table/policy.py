"""Families of policy losses, KL estimators, advantages and rollout corrections."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from oracles import policy as oracles
from torch import Tensor

from composer_core.batch import Rollouts, Seqs
from composer_core.loss import clip, kl
from composer_core.loss.advantages import group_advantages
from composer_core.loss.corrections import mask_outside, off_policy_mask, sampler_ratio, top_entropy_mask, truncate
from composer_core.loss.policy import KlTerm, policy_loss
from composer_core.loss.reduce import COUNT_OF, aggregate
from composer_core.protocols import Aggregation
from golden_table.case import Answer, Case, Compute

VERL_CAP = 10.0
"""verl bounds k3's value here."""
TRL_AGGREGATION = {
    "grpo": Aggregation.SEQUENCE_MEAN,
    "sapo": Aggregation.SEQUENCE_MEAN,
    "gmpo": Aggregation.SEQUENCE_MEAN,
    "luspo": Aggregation.SEQUENCE_SUM,
    "bnpo": Aggregation.TOKEN_MEAN_LOCAL,
    "dapo": Aggregation.TOKEN_MEAN,
    "cispo": Aggregation.TOKEN_MEAN,
    "vespo": Aggregation.TOKEN_MEAN,
    "dr_grpo": Aggregation.CONSTANT,
}
VERL_AGGREGATION = {
    "token-mean": Aggregation.TOKEN_MEAN,
    "token-sum": Aggregation.TOKEN_MEAN,
    "seq-mean-token-sum": Aggregation.SEQUENCE_SUM,
    "seq-mean-token-mean": Aggregation.SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": Aggregation.CONSTANT,
}


def _rollouts(case: Case) -> Rollouts:
    """(B, T) tensors packed row behind row; advantages may be one per row."""
    inputs, mask = case.inputs, case.inputs["mask"].bool()
    advantages = inputs["advantages"]
    per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask.shape)

    def packed(name: str) -> Tensor | None:
        return inputs[name].flatten() if name in inputs else None

    return Rollouts(
        seqs=_seqs(mask),
        action=mask.flatten(),
        advantages=per_token.flatten(),
        old_logps=packed("old_logps"),
        sampler_logps=packed("sampling_logps"),
        ref_logps=packed("ref_logps"),
    )


def _seqs(mask: Tensor) -> Seqs:
    return Seqs.from_padded(torch.zeros(mask.shape, dtype=torch.int64), torch.ones(mask.shape))


def policy_trl(case: Case) -> Answer:
    args, rollouts = case.args, _rollouts(case)
    how = TRL_AGGREGATION[args["loss_type"]]
    ratio = args["importance_sampling_level"].replace("_", "-")
    kl_term = KlTerm(args["beta"], corrected=args["use_bias_correction_kl"]) if args["beta"] else None
    logps = case.inputs["logps"].flatten()
    weights = _trl_weights(case, rollouts, logps)
    total, _ = policy_loss(
        logps, rollouts, rule=_trl_rule(args), aggregation=how, ratio=ratio, weights=weights, kl=kl_term
    )
    sequences = len(rollouts.seqs)
    counts = {
        "tokens": rollouts.action.sum(),
        "sequences": sequences,
        "max_tokens": sequences * args["max_completion_length"],
        "micro_batches": 1,
    }
    return Answer({"loss": total / max(counts[COUNT_OF[how]], 1)})


def _trl_rule(args: Any) -> clip.Rule:
    low, high = args["epsilon_low"], args["epsilon_high"]
    rules = {
        "cispo": partial(clip.cispo, cap=high),
        "sapo": partial(
            clip.sapo,
            temperature_positive=args["sapo_temperature_pos"],
            temperature_negative=args["sapo_temperature_neg"],
        ),
        "vespo": partial(
            clip.vespo,
            k_positive=args["vespo_k_pos"],
            lambda_positive=args["vespo_lambda_pos"],
            k_negative=args["vespo_k_neg"],
            lambda_negative=args["vespo_lambda_neg"],
        ),
        "gmpo": partial(clip.gmpo, epsilon=low, epsilon_high=high),
    }
    return rules.get(args["loss_type"], partial(clip.ppo, epsilon=low, epsilon_high=high, delta=args["delta"]))


def _trl_weights(case: Case, rollouts: Rollouts, logps: Tensor) -> Tensor | None:
    args = case.args
    if args["top_entropy_quantile"] < 1:
        entropies = case.inputs["entropies"].flatten()
        return top_entropy_mask(entropies, rollouts.action, share=args["top_entropy_quantile"])
    if args["off_policy_mask_threshold"] is not None:
        sampler = rollouts.old_logps if rollouts.sampler_logps is None else rollouts.sampler_logps
        threshold = args["off_policy_mask_threshold"]
        return off_policy_mask(rollouts.advantages, logps, sampler, rollouts.action, rollouts.seqs, threshold=threshold)
    return case.inputs["vllm_is"].flatten() if "vllm_is" in case.inputs else None


def policy_verl(case: Case) -> Answer:
    args, inputs, rollouts = case.args, case.inputs, _rollouts(case)
    low, high = (_or(args[name], args["clip_ratio"]) for name in ("clip_ratio_low", "clip_ratio_high"))
    name, mask, logps = args["policy"], inputs["mask"], inputs["logps"]
    how = VERL_AGGREGATION[args["loss_agg_mode"]]
    oracle = {
        "gpg": lambda: oracles.gpg(logps, inputs["advantages"]),
        "dro": lambda: oracles.dro(logps, inputs["old_logps"], inputs["advantages"], beta=args["dro_beta"]),
    }
    if name == "cispo" and low < 1:  # ours has no lower bound; at 1 - low <= 0 neither has verl's
        oracle["cispo"] = lambda: oracles.cispo_two_sided(
            logps, inputs["old_logps"], inputs["advantages"], low=low, high=high
        )
    if name == "geo_mean":
        loss = oracles.geometric_mean(logps, inputs["old_logps"], inputs["advantages"], mask, low=low, high=high)
        return Answer({"loss": loss}, oracle=True)
    if name in oracle:
        total = aggregate(oracle[name]().flatten(), rollouts.action, rollouts.seqs, how=how)
        return Answer({"loss": total / _verl_count(case)}, oracle=True)
    rules = {
        "vanilla": partial(clip.ppo, epsilon=low, epsilon_high=high, dual_clip=args["clip_ratio_c"]),
        "gspo": partial(clip.ppo, epsilon=low, epsilon_high=high),
        "sapo": partial(clip.sapo, temperature_positive=args["tau_pos"], temperature_negative=args["tau_neg"]),
        "cispo": partial(clip.cispo, cap=1 + high),
        "dppo_tv": partial(clip.dppo, measure="tv", epsilon=low, epsilon_high=high, cap=args["clip_ratio_c"]),
        "dppo_kl": partial(clip.dppo, measure="kl", epsilon=low, epsilon_high=high, cap=args["clip_ratio_c"]),
    }
    weights = torch.ones_like(logps).flatten()
    if "rollout_is_weights" in inputs:
        weights = inputs["rollout_is_weights"].flatten()
    if how is Aggregation.SEQUENCE_MEAN:
        how, weights = Aggregation.SEQUENCE_SUM, weights * oracles.verl_shares(mask)
    ratio = "sequence-token" if name == "gspo" else "token"
    total, _ = policy_loss(logps.flatten(), rollouts, rule=rules[name], aggregation=how, ratio=ratio, weights=weights)
    return Answer({"loss": total / _verl_count(case)})


def _verl_count(case: Case) -> float:
    """verl leaves sequences without any token out of its means."""
    mask, mode = case.inputs["mask"].bool(), case.args["loss_agg_mode"]
    told = case.args.get("global_batch_info")
    sequences, tokens = float(mask.any(1).sum()), float(mask.sum())
    if told:  # the trainer averages over ranks: each divides by its share of the global count
        sequences, tokens = (told[name] / told["dp_size"] for name in ("global_batch_size", "batch_num_tokens"))
    counts = {"token-mean": tokens, "token-sum": 1.0, "seq-mean-token-sum-norm": sequences * mask.shape[1]}
    return max(counts.get(mode, sequences), 1.0)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def policy_prime(case: Case) -> Answer:
    args, inputs = case.args, case.inputs
    logps, sampler, advantages, mask = (
        inputs[name] for name in ("logps", "inference_logps", "advantages", "loss_mask")
    )
    weights = inputs.get("loss_weights", torch.ones_like(logps))
    losses = {
        "default_loss_fn": lambda: oracles.dppo_sum(
            logps,
            sampler,
            advantages,
            mask,
            weights,
            low=args["dppo_mask_low"],
            high=args["dppo_mask_high"],
            tau=args["adv_tau"],
            kl=args["kl_tau"],
        ),
        "ipo_loss_fn": lambda: oracles.ipo_sum(
            logps,
            sampler,
            advantages,
            mask,
            weights,
            threshold=args["ipo_threshold"],
            tau=args["adv_tau"],
            kl=args["kl_tau"],
        ),
        "ref_kl_loss_fn": lambda: oracles.ref_kl_sum(logps, sampler, inputs["ref_logps"], mask, weights),
        "ce_loss_fn": lambda: oracles.cross_entropy_sum(logps, mask, weights),
    }
    return Answer({"loss": losses[args["policy"]]()}, oracle=True)


def kl_penalty(case: Case) -> Answer:
    logps, ref, kind = case.inputs["logps"], case.inputs["ref_logps"], case.args["kind"]
    shipped = {
        "k1": kl.k1,
        "k2": kl.k2,
        "k3": partial(kl.k3, cap=VERL_CAP),
        "k3+": partial(kl.k3_straight_through, cap=VERL_CAP),
    }
    if kind in shipped:
        return Answer({"loss": shipped[kind](logps, ref)})
    oracle = {"abs": oracles.absolute_gap, "k1+": oracles.k1_straight_through}[kind]
    return Answer({"loss": oracle(logps, ref)}, oracle=True)


def adv_grpo(case: Case) -> Answer:
    """A lone rollout keeps its raw reward in verl; here it has nothing to be compared with, so 0."""
    mask, names = case.inputs["mask"], case.args["index"]
    group = _group(names)
    scale = "group" if case.args["norm_by_std"] else "none"
    rewards = case.inputs["token_rewards"].sum(-1)
    advantages, _ = group_advantages(rewards, group, scale=scale, eps=case.args["epsilon"])
    lone = torch.tensor([names.count(name) == 1 for name in names])
    decided = torch.where(lone[:, None], 0.0, torch.nan).expand(mask.shape)
    return Answer({"advantages": advantages[:, None] * mask}, instead={"advantages": decided})


def adv_rloo(case: Case) -> Answer:
    advantages = oracles.leave_one_out(case.inputs["token_rewards"].sum(-1), case.args["index"])
    return Answer({"advantages": advantages[:, None] * case.inputs["mask"]}, oracle=True)


def adv_maxrl(case: Case) -> Answer:
    rewards = case.inputs["rewards"]
    group = torch.zeros(len(rewards), dtype=torch.int64)
    for number, members in enumerate(case.args["groups"]):
        group[members] = number
    return Answer({"advantages": group_advantages(rewards, group, scale="mean")[0]})


def _group(names: list[str]) -> Tensor:
    ids = sorted(set(names))
    return torch.tensor([ids.index(name) for name in names])


def rollout_is(case: Case) -> Answer:
    args, log_ratio, mask = case.args, case.inputs["log_ratio"], case.inputs["mask"].bool()
    threshold = args["rollout_is_threshold"]
    if args.get("rollout_is_batch_normalize"):
        weights = oracles.normalised_truncation(log_ratio, mask, high=threshold)
        return Answer({"weights": weights}, oracle=True)
    nothing = torch.zeros(log_ratio.numel(), dtype=log_ratio.dtype)
    ratio = sampler_ratio(log_ratio.flatten(), nothing, mask.flatten(), _seqs(mask), level=args["rollout_is"])
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return Answer({"weights": mask_outside(ratio, low=low, high=high).view(mask.shape)})
    return Answer({"weights": truncate(ratio, high=threshold).view(mask.shape)})


FAMILIES: dict[str, Compute] = {
    "policy_trl": policy_trl,
    "policy_verl": policy_verl,
    "policy_prime": policy_prime,
    "kl_penalty": kl_penalty,
    "adv_grpo": adv_grpo,
    "adv_rloo": adv_rloo,
    "adv_maxrl": adv_maxrl,
    "rollout_is": rollout_is,
}
