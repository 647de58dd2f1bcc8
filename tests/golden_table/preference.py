"""Families of preference losses. A form of the package, or an oracle where the case asks for one it does not ship."""

from __future__ import annotations

import torch
from oracles import preference as oracles
from torch import Tensor

from composer_core.batch import Seqs
from composer_core.loss.lm_ce import smoothed_cross_entropy
from composer_core.loss.preference import (
    FORMS,
    PairLogps,
    answer_logps,
    avg_sequence_logprob,
    kto_desirable,
    kto_undesirable,
    log_odds,
    logistic,
    odds_ratio,
    reference_drift,
    simpo_per_pair,
)
from composer_core.loss.reduce import masked_mean
from golden_table.case import Answer, Case, Compute, nan_means_zero

TRL_FORM = {
    "sigmoid": "dpo",
    "ipo": "ipo",
    "robust": "robust",
    "apo_zero": "apo-zero",
    "apo_down": "apo-down",
    "sigmoid_norm": "sigmoid-norm",
}
"""TRL's `loss_type` -> ours."""
SMOOTHED = {"robust"}
"""TRL reads label_smoothing for these only; its sigmoid ignores it."""


def simpo(case: Case) -> Answer:
    chosen, rejected, args = case.inputs["chosen_avg_logps"], case.inputs["rejected_avg_logps"], case.args
    beta, gamma = args["beta"], args["beta"] * args["gamma_beta_ratio"]
    rewards = {"chosen_rewards": beta * chosen, "rejected_rewards": beta * rejected}
    if args["loss_type"] == "hinge":
        loss = oracles.hinge(chosen - rejected - args["gamma_beta_ratio"], beta=beta)
        return Answer({"loss": loss, **rewards}, oracle=True)
    loss = simpo_per_pair(chosen, rejected, beta=beta, gamma=gamma, label_smoothing=args["label_smoothing"])
    return Answer({"loss": loss, **rewards})


def avg_logps(case: Case) -> Answer:
    logits, labels = case.inputs["logits"][:, :-1], case.inputs["labels"][:, 1:]
    counted = labels != -100
    ids = labels.masked_fill(~counted, 0)
    logps = -smoothed_cross_entropy(logits.flatten(0, 1), ids.flatten()).view(labels.shape)
    return Answer({"loss": avg_sequence_logprob(logps, counted)}, **nan_means_zero(case))


def cpo(case: Case) -> Answer:
    chosen, rejected, args = case.inputs["chosen_logps"], case.inputs["rejected_logps"], case.args
    beta, smoothing = args["beta"], args["label_smoothing"]
    if args["loss_type"] == "hinge":
        return Answer({"loss": oracles.hinge(chosen - rejected, beta=beta)}, oracle=True)
    if args["alpha"]:
        loss = oracles.alphapo(chosen, rejected, beta=beta, gamma=args["simpo_gamma"], alpha=args["alpha"])
        return Answer({"loss": loss}, oracle=True)
    if args["loss_type"] == "ipo":
        one, nothing = torch.ones_like(chosen), torch.zeros_like(chosen)
        return Answer({"loss": FORMS["ipo"](PairLogps(chosen, rejected, one, one, nothing, nothing), beta=beta)})
    gamma = args["simpo_gamma"] if args["loss_type"] == "simpo" else 0.0
    return Answer({"loss": simpo_per_pair(chosen, rejected, beta=beta, gamma=gamma, label_smoothing=smoothing)})


def orpo(case: Case) -> Answer:
    chosen, rejected, beta = case.inputs["chosen_avg_logps"], case.inputs["rejected_avg_logps"], case.args["beta"]
    ratio = -odds_ratio(chosen, rejected)  # TRL returns beta times this and subtracts it
    return Answer(
        {
            "loss": beta * ratio,
            "chosen_rewards": beta * chosen,
            "rejected_rewards": beta * rejected,
            "ratio_mean": ratio.mean(),
            "log_odds_mean": (log_odds(chosen) - log_odds(rejected)).mean(),
        }
    )


def dpo(case: Case) -> Answer:
    args, mask = case.args, case.inputs["completion_mask"][:, 1:].bool()
    pairs = _pairs(case, mask)
    name = args["loss_type"]
    if args["ld_alpha"] is None and args["f_divergence_type"] == "reverse_kl":
        if name in TRL_FORM:
            smoothing = {"label_smoothing": args["label_smoothing"]} if name in SMOOTHED else {}
            return Answer({"loss": _mean(FORMS[TRL_FORM[name]](pairs, beta=args["beta"], **smoothing))})
        if name == "sft":
            logps, answers = case.inputs["per_token_logps"].chunk(2)[0], mask.chunk(2)[0]
            return Answer({"loss": masked_mean(-logps, answers, count=answers.sum())})
    return Answer({"loss": _mean(_dpo_oracle(case, pairs, mask))}, oracle=True)


def _pairs(case: Case, mask: Tensor) -> PairLogps:
    """Rows 0..P-1 are chosen, the others rejected. TRL sums whole rows, which hold 0 outside the answers."""
    logps = case.inputs["per_token_logps"]
    seqs = Seqs.from_padded(torch.zeros(logps.shape, dtype=torch.int64), torch.ones(logps.shape))
    sums, _ = answer_logps(logps.flatten(), torch.ones(logps.numel(), dtype=torch.bool), seqs)
    _, lengths = answer_logps(logps.detach().flatten(), mask.flatten(), seqs)
    refs = case.inputs["ref_chosen_logps"], case.inputs["ref_rejected_logps"]
    return PairLogps(*sums.chunk(2), *lengths.chunk(2), *refs)


def _dpo_oracle(case: Case, pairs: PairLogps, mask: Tensor) -> Tensor:
    args, beta = case.args, case.args["beta"]
    smoothing = args["label_smoothing"]
    w, ll = pairs.chosen_ratio, pairs.rejected_ratio
    if args["ld_alpha"] is not None:
        logps = oracles.length_desensitised(case.inputs["per_token_logps"], mask, ld_alpha=args["ld_alpha"])
        refs = torch.cat([case.inputs["ref_chosen_logps"], case.inputs["ref_rejected_logps"]])
        w, ll = (logps - refs).chunk(2)
    score = oracles.F_SCORES[args["f_divergence_type"]]
    d = score(w) - score(ll)
    forms = {
        "sigmoid": lambda: oracles.dpo_sigmoid(d, beta=beta),
        "hinge": lambda: oracles.hinge(d, beta=beta),
        "exo_pair": lambda: oracles.exo_pair(d, beta=beta, label_smoothing=smoothing),
        "nca_pair": lambda: oracles.nca_pair(w, ll, beta=beta),
        "bco_pair": lambda: oracles.bco_pair(w, ll, beta=beta),
        "sppo_hard": lambda: oracles.sppo_hard(w, ll, beta=beta),
        "aot": lambda: oracles.sorted_pairs(
            pairs.chosen - pairs.rejected,
            case.inputs["ref_chosen_logps"] - case.inputs["ref_rejected_logps"],
            beta=beta,
            label_smoothing=smoothing,
        ),
        "aot_unpaired": lambda: oracles.sorted_pairs(w, ll, beta=beta, label_smoothing=smoothing),
        "discopop": lambda: oracles.discopop(d, beta=beta, tau=args["discopop_tau"]),
    }
    return forms[args["loss_type"]]()


def kto(case: Case) -> Answer:
    args, inputs = case.args, case.inputs
    ratio = inputs["per_token_logps"].sum(-1) - inputs["ref_logps"]
    drift = reference_drift(inputs["kl_logps"], inputs["ref_kl_logps"]) if args["loss_type"] == "kto" else 0.0
    desirable = inputs["label"].bool()
    losses = torch.where(
        desirable,
        args["desirable_weight"] * kto_desirable(ratio, drift, beta=args["beta"]),
        args["undesirable_weight"] * kto_undesirable(ratio, drift, beta=args["beta"]),
    )
    return Answer({"loss": _mean(losses)})


def cdpo(case: Case) -> Answer:
    margin = case.inputs["chosen_logratios"] - case.inputs["rejected_logratios"]
    return Answer({"loss": logistic(margin, **case.args)})


def _mean(per_pair: Tensor) -> Tensor:
    return masked_mean(per_pair, torch.ones_like(per_pair, dtype=torch.bool), count=per_pair.numel())


FAMILIES: dict[str, Compute] = {
    "simpo": simpo,
    "avg_logps": avg_logps,
    "cpo": cpo,
    "orpo": orpo,
    "dpo": dpo,
    "kto": kto,
    "cdpo": cdpo,
}
