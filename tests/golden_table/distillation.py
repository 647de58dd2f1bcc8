"""Families of divergences between distributions and their targets."""

from __future__ import annotations

import re

import torch
from oracles import distillation as oracles
from oracles.policy import verl_shares
from torch import Tensor

from composer_core.batch import Seqs
from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.compat import entropy_aware_opd_loss, generalized_jsd_loss, sampled_opd_loss
from composer_core.loss.corrections import sampler_ratio, truncate
from composer_core.loss.distributions import log_probs, sampled_surrogate
from composer_core.loss.divergence import divergence
from composer_core.loss.reduce import COUNT_OF, aggregate
from composer_core.loss.taid_schedule import TAIDScheduler
from composer_core.loss.targets import soft_weight, taid_loss, teacher_entropy, trust_region_target
from composer_core.loss.topk import truncated_kl
from composer_core.protocols import Aggregation
from golden_table.case import Answer, Case, Compute, nan_means_zero

ENDS = {0.0: DivergenceKind.KL_TEACHER_STUDENT, 1.0: DivergenceKind.KL_STUDENT_TEACHER}
SDPO_AGGREGATION = {
    "token-mean": Aggregation.TOKEN_MEAN,
    "seq-mean-token-sum": Aggregation.SEQUENCE_SUM,
    "seq-mean-token-mean": Aggregation.SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": Aggregation.CONSTANT,
}


def gen_jsd(case: Case) -> Answer:
    args, compat = case.args, "OPSD" in case.source or case.args.get("reduction") == "none"
    are_probs = args.get("logits_are_probs", False)  # the official code then ignores temperature and top_k
    loss = generalized_jsd_loss(
        case.inputs["student_logits"],
        case.inputs["teacher_logits"],
        case.inputs.get("labels"),
        beta=args["beta"],
        temperature=1.0 if are_probs else args.get("temperature", 1.0),
        reduction=args.get("reduction", "batchmean"),
        logits_are_probs=are_probs,
        top_k=None if are_probs else args.get("top_k"),
        token_clip=args.get("token_clip"),
        num_items=args.get("num_items_in_batch"),
        opsd_compat=compat,
    )
    if case.inputs["student_logits"].isneginf().any():
        return Answer({"loss": loss}, **_without_banned_entries(case))
    return Answer({"loss": loss}, **nan_means_zero(case))


def _without_banned_entries(case: Case) -> dict[str, dict[str, Tensor]]:
    """Rule N3: entries at -inf on both sides are as if they were not there."""
    student, teacher = (case.inputs[side].detach() for side in ("student_logits", "teacher_logits"))
    kept = ~student.isneginf().flatten(0, -2).any(0)
    allowed = student[..., kept].requires_grad_()
    loss = generalized_jsd_loss(allowed, teacher[..., kept], case.inputs.get("labels"), beta=case.args["beta"])
    gradient = torch.zeros_like(student)
    (gradient[..., kept],) = torch.autograd.grad(loss, allowed)
    return {"instead": {"loss": loss}, "instead_grads": {"student_logits": gradient}}


def jsd_support(case: Case) -> Answer:
    beta = case.args["beta"]
    support = {0: Support.TOPK_TEACHER, 1: Support.TOPK_STUDENT}.get(beta, Support.TOPK_UNION)
    loss = generalized_jsd_loss(
        case.inputs["student_logits"],
        case.inputs["teacher_logits"],
        case.inputs.get("labels"),
        beta=beta,
        top_k=case.args["top_k"],
        support=support,
        tail=case.args["add_tail"],
    )
    return Answer({"loss": loss})


def iw_opd(case: Case) -> Answer:
    inputs = case.inputs
    loss = oracles.importance_weighted_opd(
        inputs["student_logits"],
        inputs["tokens"],
        inputs["labels"] != -100,
        inputs["teacher_logps"],
        inputs["rollout_logps"],
        **case.args,
    )
    return Answer({"loss": loss}, oracle=True)


def sdpo(case: Case) -> Answer:
    args, inputs = case.args, case.inputs
    mask = inputs["response_mask"].bool()
    if "self_distillation_mask" in inputs:
        mask = mask & inputs["self_distillation_mask"].bool()[:, None]
    rows, width = mask.shape
    seqs = Seqs.from_padded(torch.zeros(rows, width, dtype=torch.int64), torch.ones(rows, width))
    per_token = _sdpo_per_token(case, args["distillation_topk"] if args["full_logit_distillation"] else "sampled")
    if "old_logps" in inputs and args["is_clip"] is not None:
        logps, old = _picked(case, "student_logits"), inputs["old_logps"].flatten()
        ratio = sampler_ratio(logps.flatten(), old, mask.flatten(), seqs, level="token")
        per_token = per_token * truncate(ratio, high=args["is_clip"])
    if "rollout_is_weights" in inputs:
        per_token = per_token * inputs["rollout_is_weights"].flatten()
    how = SDPO_AGGREGATION[args["loss_agg_mode"]]
    if how is Aggregation.SEQUENCE_MEAN:
        how, per_token = Aggregation.SEQUENCE_SUM, per_token * verl_shares(mask)
    counts = {"tokens": mask.sum(), "sequences": rows, "max_tokens": width}
    loss = aggregate(per_token, mask.flatten(), seqs, how=how) / max(counts[COUNT_OF[how]], 1)
    return Answer({"loss": loss})


def _sdpo_per_token(case: Case, support: int | str | None) -> Tensor:
    """(B x T,): full, over the student's top k, or of the sampled token."""
    if support == "sampled":
        return sampled_surrogate(_picked(case, "student_logits"), _picked(case, "teacher_logits").detach()).flatten()
    student, teacher = (case.inputs[side].flatten(0, 1) for side in ("student_logits", "teacher_logits"))
    alpha, tail = case.args["alpha"], case.args.get("distillation_add_tail", case.args.get("add_tail"))
    chosen = {} if support is None else {"support": Support.TOPK_STUDENT, "k": support, "tail": tail}
    spec = Divergence(ENDS.get(alpha, DivergenceKind.JSD), alpha, **chosen)
    return divergence(student, teacher, spec)


def _picked(case: Case, side: str) -> Tensor:
    """Log-probs of the tokens, (B, T)."""
    return log_probs(case.inputs[side], 1.0).gather(-1, case.inputs["tokens"][..., None]).squeeze(-1)


def sdpo_per_token(case: Case) -> Answer:
    per_token = _sdpo_per_token(case, case.args["topk"])
    return Answer({"loss": per_token.view(case.inputs["student_logits"].shape[:-1])})


def opd_sampled(case: Case) -> Answer:
    return Answer({"loss": sampled_surrogate(_picked(case, "student_logits"), _picked(case, "teacher_logits"))})


def is_clip(case: Case) -> Answer:
    logps, old = case.inputs["logps"], case.inputs["old_logps"]
    seqs = Seqs.from_lists([[0] * logps.numel()])
    everywhere = torch.ones(logps.numel(), dtype=torch.bool)
    ratio = sampler_ratio(logps.flatten(), old.flatten(), everywhere, seqs, level="token")
    weights = truncate(ratio, high=case.args["clip"]).view_as(logps)
    return Answer({"loss": case.inputs["per_token_loss"] * weights})


def trust_region(case: Case) -> Answer:
    mix = case.args["mix_coef"]
    return Answer({"logits": trust_region_target(case.inputs["ref_logits"], case.inputs["student_logits"], mix=mix)})


def discounted_sum(case: Case) -> Answer:
    return Answer({"y": oracles.discounted_future_sum(case.inputs["x"], gamma=case.args["gamma"])}, oracle=True)


def taid(case: Case) -> Answer:
    inputs = case.inputs
    loss = taid_loss(inputs["student_logits"], inputs["teacher_logits"], inputs["mask"], t=case.args["t"])
    return Answer({"loss": loss})


def taid_schedule(case: Case) -> Answer:
    found = re.search(r"num_train_steps=(\d+)", case.function)
    assert found, "the case does not say how many steps its schedule is for"
    scheduler = TAIDScheduler(int(found[1]), **case.args)
    rows = []
    for step, loss in enumerate(case.inputs["losses"]):
        delta = scheduler.update_t(loss, global_step=step)
        rows.append((scheduler.t, torch.nan if delta is None else delta, scheduler.momentum))
    t, delta_t, momentum = torch.tensor(rows).T
    return Answer({"t": t, "delta_t": delta_t, "momentum": momentum})


def fkl_topk_raw(case: Case) -> Answer:
    log_q, log_p = (log_probs(case.inputs[side], 1.0) for side in ("student_logits", "teacher_logits"))
    ids = log_p.topk(case.args["k"], dim=-1).indices
    return Answer({"loss": truncated_kl(log_q.gather(-1, ids), log_p.gather(-1, ids))})


def eopd_seed(case: Case) -> Answer:
    student, teacher = case.inputs["student_logits"], case.inputs["teacher_logits"]
    h_max = case.args["h_max"]
    loss = entropy_aware_opd_loss(student, teacher, labels=case.inputs["labels"] != -100, h_max=h_max)
    share = soft_weight(teacher_entropy(teacher), SoftGate(h_max), vocab=teacher.shape[-1])
    return Answer({"loss": loss, "w": share})


def eopd_paper(case: Case) -> Answer:
    gate = PaperGate(**case.args)
    teacher = case.inputs["teacher_logits"]
    loss = sampled_opd_loss(
        case.inputs["student_logits"], teacher, case.inputs["tokens"], labels=case.inputs["labels"], gate=gate
    )
    return Answer({"loss": loss, "gate": (teacher_entropy(teacher) > gate.tau).to(teacher.dtype)})


def _distillm(name: str) -> Compute:
    def compute(case: Case) -> Answer:
        inputs = case.inputs
        oracle = getattr(oracles, name)
        loss = oracle(inputs["student_logits"], inputs["teacher_logits"], inputs["mask"], **case.args)
        return Answer({"loss": loss}, oracle=True)

    return compute


FAMILIES: dict[str, Compute] = {
    "gen_jsd": gen_jsd,
    "jsd_support": jsd_support,
    "iw_opd": iw_opd,
    "sdpo": sdpo,
    "sdpo_per_token": sdpo_per_token,
    "opd_sampled": opd_sampled,
    "is_clip": is_clip,
    "trust_region": trust_region,
    "discounted_sum": discounted_sum,
    "taid": taid,
    "taid_schedule": taid_schedule,
    "fkl_topk_raw": fkl_topk_raw,
    "eopd_seed": eopd_seed,
    "eopd_paper": eopd_paper,
    "distillm_fkl": _distillm("forward_cross_entropy"),
    "distillm_rkl": _distillm("reverse_kl"),
    "distillm_js": _distillm("mixed_js"),
    "distillm_skew_fkl": _distillm("skew_forward"),
    "distillm_skew_rkl": _distillm("skew_reverse"),
    "distillm_tvd": _distillm("total_variation"),
    "distillm_adaptive_kl": _distillm("adaptive_kl"),
}
