"""The whole loss in one call, for scripts and comparisons: cross-entropy + SDPO + preference pairs on padded tensors.

A thin front of what a run uses: the same objective, view, divergence and preference forms; only batches are padded
here, and each part is a mean over this batch alone. A run divides by global counts instead (`composite.py`).
Letters: B rows, T_s and T_t padded lengths of student and teacher.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer_core.batch import Batch, Hints, Rollouts, Seqs
from composer_core.divergences import Divergence, DivergenceKind, SoftGate
from composer_core.loss.checks import check_mask
from composer_core.loss.lm_ce import LmCe
from composer_core.loss.preference import FORMS, PairLogps, answer_logps, complete_pairs
from composer_core.loss.reduce import masked_mean
from composer_core.loss.views import ModelView

SDPO_KEYS = ("ctx_teacher_input_ids", "sdpo_loss_mask")
PAIR_KEYS = (
    "dpo_chosen_input_ids",
    "dpo_chosen_response_mask",
    "dpo_rejected_input_ids",
    "dpo_rejected_response_mask",
)
REFERENCE_KEYS = ("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
VARIANTS = ("dpo", "simpo")
WRAPPERS = ("none", "taid", "entropy_opd")


@dataclass
class LossComponents:
    """Scalars; a part that was not computed is 0."""

    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    total: Tensor
    """lm_ce + alpha_sdpo x sdpo_jsd + beta_replay x trace_replay_dpo."""

    def detached(self) -> dict[str, float]:
        """All four as numbers."""
        return {field.name: float(getattr(self, field.name).detach()) for field in fields(self)}


def compose_loss(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.05,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    lm_ce_label_smoothing: float = 0.0,
    dpo_variant: Literal["dpo", "simpo"] = "dpo",
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none",
    taid_t: float | None = None,
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    entropy_opd_h_max: float | None = None,
) -> LossComponents:
    """Three losses of one model and their weighted sum.

    A part of weight 0, or whose inputs are not there, is not computed: the total is then the same to the last bit as
    without it.

    Args:
        model: a causal LM, called with `input_ids`, that returns `.logits`.
        inputs: `input_ids` (B, T_s) and `response_mask` (B, T_s), 1 on answer tokens. For SDPO `ctx_teacher_input_ids`
            (B, T_t) and `sdpo_loss_mask` (B, T_t): in each row the i-th masked teacher token is the i-th answer token.
            For pairs `dpo_{chosen,rejected}_{input_ids,response_mask}`, and `dpo_{chosen,rejected}_ref_logprobs` (B,),
            summed over the answer, which `simpo` does not read. Rows are padded on the right.
        alpha_sdpo: weight of the divergence between the model and itself in the teacher's context, a token mean.
        beta_replay: weight of the preference loss, a mean over pairs; one with an empty side is left out, with a
            warning that says how many.
        sdpo_jsd_beta: the teacher's share of the mixture; 0 is KL(teacher || student), 1 KL(student || teacher).
        sdpo_temperature: divides both logits.
        sdpo_token_clip: cap on each token's divergence, after the vocabulary sum.
        replay_dpo_beta: beta of DPO.
        lm_ce_label_smoothing: share spread over the vocabulary.
        dpo_variant: form of the preference loss.
        sdpo_wrapper: `taid`: towards a target between student (t = 0) and teacher (t = 1) by the same divergence;
            `entropy_opd`: forward and reverse KL mixed by the teacher's entropy, in place of `sdpo_jsd_beta`.
        taid_t: in [0, 1], for `taid`.
        simpo_beta: scale of SimPO's margin.
        simpo_gamma: SimPO's margin.
        entropy_opd_h_max: entropy in nats at which only the forward KL counts; None is log of the vocabulary.

    Raises:
        ValueError: an unknown variant or wrapper, a number out of range, missing or misshapen inputs, or teacher
            tokens that are not the answer's.
    """
    if dpo_variant not in VARIANTS:
        raise ValueError(f"dpo_variant must be one of {', '.join(VARIANTS)}, got {dpo_variant!r}")
    spec = _divergence(
        sdpo_wrapper,
        beta=sdpo_jsd_beta,
        temperature=sdpo_temperature,
        clip=sdpo_token_clip,
        taid_t=taid_t,
        h_max=entropy_opd_h_max,
    )
    form = (
        partial(FORMS["dpo"], beta=replay_dpo_beta)
        if dpo_variant == "dpo"
        else partial(FORMS["simpo"], beta=simpo_beta, gamma=simpo_gamma)
    )
    rollouts = _answers(inputs, "input_ids", "response_mask")
    view = ModelView(_as_hugging_face(model), rollouts=rollouts.seqs)
    total = lm_ce = _cross_entropy(view, rollouts, label_smoothing=lm_ce_label_smoothing)
    sdpo_jsd = pairs = lm_ce.new_zeros(())
    if alpha_sdpo and _given(inputs, SDPO_KEYS):
        sdpo_jsd = _self_distillation(view, rollouts, inputs, spec)
        total = total + alpha_sdpo * sdpo_jsd
    if beta_replay and _given(inputs, PAIR_KEYS):
        needed = REFERENCE_KEYS if dpo_variant == "dpo" else ()
        pairs = _preference(form, _pair_logps(view, inputs, needed))
        total = total + beta_replay * pairs
    return LossComponents(lm_ce, sdpo_jsd, pairs, total)


def _divergence(
    wrapper: str, *, beta: float, temperature: float, clip: float | None, taid_t: float | None, h_max: float | None
) -> Divergence:
    if wrapper not in WRAPPERS:
        raise ValueError(f"sdpo_wrapper must be one of {', '.join(WRAPPERS)}, got {wrapper!r}")
    if wrapper == "taid" and taid_t is None:
        raise ValueError("sdpo_wrapper='taid' needs taid_t, in [0, 1]: take it from a TAIDScheduler")
    if not 0 <= beta <= 1:
        raise ValueError(f"sdpo_jsd_beta must be in [0, 1], got {beta}")
    if wrapper == "entropy_opd":
        kind, gate = DivergenceKind.KL_STUDENT_TEACHER, SoftGate(h_max)
        return Divergence(kind, temperature=temperature, clip=clip, gate=gate)
    ends = {0.0: DivergenceKind.KL_TEACHER_STUDENT, 1.0: DivergenceKind.KL_STUDENT_TEACHER}
    kind = ends.get(float(beta), DivergenceKind.JSD)
    return Divergence(kind, beta, temperature, clip=clip, taid=taid_t if wrapper == "taid" else None)


def _given(inputs: Mapping[str, Tensor], keys: tuple[str, ...]) -> bool:
    """Whether the inputs have all of these keys; having some is a mistake, not a wish to leave the part out."""
    missing = [key for key in keys if key not in inputs]
    if missing and len(missing) < len(keys):
        raise ValueError(f"inputs have {[key for key in keys if key in inputs]} and not {missing}: give all or none")
    return not missing


def _answers(inputs: Mapping[str, Tensor], ids_key: str, mask_key: str) -> Rollouts:
    """Rows of (B, T) as packed sequences, padding included: on the right it changes nothing before it."""
    for key in (ids_key, mask_key):
        if key not in inputs:
            raise ValueError(f"inputs lack {key!r}")
    ids, mask = inputs[ids_key], inputs[mask_key]
    if ids.dim() != 2 or ids.shape != mask.shape:
        raise ValueError(f"{ids_key} {tuple(ids.shape)} and {mask_key} {tuple(mask.shape)} must both be (B, T)")
    check_mask(mask_key, mask)
    seqs = Seqs.from_padded(ids, torch.ones_like(ids))
    # the first token of a row is predicted by nothing, so it cannot be part of an answer
    return Rollouts(seqs=seqs, action=mask.bool().flatten() & ~seqs.first)


def _cross_entropy(view: ModelView, rollouts: Rollouts, *, label_smoothing: float) -> Tensor:
    objective = LmCe(SimpleNamespace(label_smoothing=label_smoothing))
    term = objective.loss(view, Batch(rollouts=rollouts))
    return term.sum / max(int(rollouts.action.sum()), 1)


def _self_distillation(view: ModelView, rollouts: Rollouts, inputs: Mapping[str, Tensor], spec: Divergence) -> Tensor:
    taught = _answers(inputs, *SDPO_KEYS)
    mine, theirs = (side.action.reshape(len(side.seqs), -1).sum(-1).tolist() for side in (rollouts, taught))
    if mine != theirs:
        raise ValueError(
            f"sdpo_loss_mask selects {theirs} teacher tokens per row and response_mask {mine} answer tokens: the i-th "
            "of one is the i-th of the other"
        )
    student, teacher = (side.action.nonzero().flatten() for side in (rollouts, taught))
    differing = (rollouts.seqs.ids[student] != taught.seqs.ids[teacher]).nonzero().flatten()
    if len(differing):
        k = int(differing[0])
        raise ValueError(
            f"answer token {k} has id {int(rollouts.seqs.ids[student[k]])} in input_ids and "
            f"{int(taught.seqs.ids[teacher[k]])} in ctx_teacher_input_ids: the teacher must read the same answer"
        )
    weight = torch.ones(student.shape, device=student.device)
    values = view.divergence(Hints(taught.seqs, student, teacher, weight), spec)
    return masked_mean(values, weight.bool(), count=len(student))


def _pair_logps(view: ModelView, inputs: Mapping[str, Tensor], reference: tuple[str, ...]) -> PairLogps:
    sides = []
    for side in ("chosen", "rejected"):
        answers = _answers(inputs, f"dpo_{side}_input_ids", f"dpo_{side}_response_mask")
        logps = view.logps(replace(answers.seqs, scored=answers.action), grad=True, temperature=1.0)
        sides.append(answer_logps(logps, answers.action, answers.seqs))
    (chosen, chosen_tokens), (rejected, rejected_tokens) = sides
    missing = [key for key in reference if key not in inputs]
    if missing:
        raise ValueError(f"dpo_variant='dpo' compares with a reference; inputs lack {missing}")
    ref_chosen, ref_rejected = (inputs[key].to(chosen.device) for key in reference) if reference else (None, None)
    return PairLogps(chosen, rejected, chosen_tokens, rejected_tokens, ref_chosen, ref_rejected)


def _preference(form: Callable[[PairLogps], Tensor], pairs: PairLogps) -> Tensor:
    """Mean of a form over the pairs that have two answers."""
    complete = complete_pairs(pairs.chosen_tokens, pairs.rejected_tokens)
    left_out = len(complete) - int(complete.sum())
    if left_out:
        warnings.warn(f"{left_out} of {len(complete)} pairs have an empty side and are left out", stacklevel=3)
    return masked_mean(form(pairs), complete, count=complete.sum())


def _as_hugging_face(model: nn.Module) -> nn.Module:
    """The model itself, or one that takes the arguments of a Hugging Face model and passes on those it knows."""
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return model
    return _IdsOnly(model)


class _IdsOnly(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        return self.model(input_ids=input_ids)
