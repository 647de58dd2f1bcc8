"""One-call losses in the shapes people know from TRL and OPSD: (B, T, V) logits, labels and a reduction.

Fronts of `divergence.py` for scripts and comparisons; a channel divides by global counts instead and never uses them.
Letters: B sequences, T tokens, V vocabulary, n tokens that count.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.checks import check_ids, check_mask, check_positive
from composer_core.loss.distributions import divergence_entries, entropy, floored, log_probs, sampled_surrogate
from composer_core.loss.divergence import divergence, paper_term
from composer_core.loss.topk import entries_of, is_full, restricted

REDUCTIONS = ("batchmean", "sum", "mean", "none")
IGNORED_LABEL = -100
LEAST_PROBABILITY = 1e-8
"""What a smaller probability is taken for when probabilities are handed in, as in TRL."""


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
    *,
    support: Support = Support.TOPK_TEACHER,
    tail: bool = False,
    num_items: float | None = None,
    opsd_compat: bool = False,
) -> Tensor:
    """Generalised JSD of GKD (2306.13649): KL(teacher || student) at beta 0, KL(student || teacher) at beta 1.

    beta = 0 is no limit of small betas: there the value shrinks as beta x KL. The gradient reaches the student only.

    Args:
        student_logits: (B, T, V).
        teacher_logits: (B, T, V).
        labels: (B, T); tokens with -100 do not count, whatever they hold. None counts all.
        beta: the teacher's share of the mixture, in [0, 1].
        temperature: divides both logits; no temperature-squared factor.
        reduction: `batchmean`: sum / n with labels, sum / B without, as published. `sum`. `mean`: sum / (n x entries
            summed per token), so V times smaller. `none`: (B, T), 0 where a token does not count. Without tokens
            that count every one of them is 0, never NaN.
        logits_are_probs: both are probabilities; smaller ones than 1e-8 are taken for it.
        top_k: sum over the entries of `support` only.
        token_clip: largest value per token, after the vocabulary sum.
        support: which top-k entries, with `top_k`.
        tail: whether the rest of the mass is one more entry; False renormalises, as OPSD and TRL do by default.
        num_items: divides the sum instead of the reduction's count (gradient accumulation).
        opsd_compat: OPSD's code to the letter: `token_clip` caps every single vocabulary term before the sum, and
            `none` gives the terms, (n, entries). With a KL such a clip can point away from the teacher: it warns.

    Raises:
        ValueError: a shape, range or combination is wrong.
    """
    counted = _counted(student_logits, teacher_logits, labels)
    _check_reduction(reduction)
    check_positive(token_clip=token_clip, num_items=num_items)
    if logits_are_probs and (temperature != 1 or top_k is not None):
        raise ValueError("temperature and top_k act on logits; with logits_are_probs they must be 1.0 and None")
    spec = _spec(beta, temperature, top_k, support=support, tail=tail)
    terms = _terms(student_logits[counted], teacher_logits[counted], spec, are_probs=logits_are_probs)
    if opsd_compat:
        terms = _clip_terms(terms, spec, token_clip)
        if reduction == "none":
            return terms
    per_token = terms.sum(-1)
    if token_clip is not None and not opsd_compat:
        per_token = per_token.clamp(max=token_clip)
    if num_items is not None:
        return per_token.sum() / num_items
    if reduction == "mean":  # over (token, entry) pairs, as published
        return per_token.sum() / max(terms.numel(), 1)
    return _reduce(per_token, counted, reduction, labelled=labels is not None)


def entropy_aware_opd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor | None = None,
    h_max: float | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    """Per token w KL(teacher || student) + (1 - w) KL(student || teacher), w = clamp(H_T / h_max, 0, 1).

    A convex mix by the teacher's entropy; arXiv 2603.07079 has another form, `Divergence(gate=PaperGate())`.

    Args:
        student_logits: (B, T, V).
        teacher_logits: (B, T, V); it gets no gradient.
        labels: (B, T) mask of 0 and 1: which tokens count, whatever the others hold. None counts all.
        h_max: entropy in nats at which w is 1; None is log V.
        temperature: divides both logits, also for the entropy.
        reduction: `batchmean`: sum / n with labels, sum / B without. `sum`. `mean`: sum / n. `none`: (B, T).

    Raises:
        ValueError: a shape or range is wrong, or labels are no mask.
    """
    if labels is not None:
        check_mask("labels", labels)
    mask = None if labels is None else torch.where(labels.bool(), 0, IGNORED_LABEL)
    counted = _counted(student_logits, teacher_logits, mask)
    _check_reduction(reduction)
    spec = Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=temperature, gate=SoftGate(h_max))
    per_token = divergence(student_logits[counted], teacher_logits[counted], spec)
    return _reduce(per_token, counted, reduction, labelled=labels is not None)


def sampled_opd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor,
    *,
    labels: Tensor | None = None,
    gate: PaperGate | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    """On-policy distillation on the sampled tokens, with the value that published code prints, which is no KL.

    Per token sg(log q - log p) log q, SDPO (2601.20802); with `gate`, plus its term: arXiv 2603.07079 on policy, where
    the PPO clip is inactive. `Divergence(support=Support.SAMPLED)` has the same gradient and a KL estimate as value.

    Args:
        student_logits: (B, T, V).
        teacher_logits: (B, T, V); it gets no gradient.
        tokens: (B, T) int64, what the student sampled.
        labels: (B, T); tokens with -100 do not count. None counts all.
        gate: the paper's second term.
        temperature: divides both logits.
        reduction: `batchmean`: sum / n with labels, sum / B without. `sum`. `mean`: sum / n. `none`: (B, T).

    Raises:
        ValueError: a shape or range is wrong.
    """
    counted = _counted(student_logits, teacher_logits, labels)
    _check_reduction(reduction)
    check_ids("tokens", tokens[counted], tokens=int(counted.sum()), vocab=student_logits.shape[-1])
    log_q = log_probs(student_logits[counted], temperature)
    log_p = log_probs(teacher_logits.detach()[counted], temperature)
    at_q, at_p = (floored(log.gather(-1, tokens[counted][:, None]).squeeze(-1)) for log in (log_q, log_p))
    per_token = sampled_surrogate(at_q, at_p)
    if gate is not None:
        per_token = per_token + paper_term(log_q, log_p, gate, h_teacher=entropy(log_p))
    return _reduce(per_token, counted, reduction, labelled=labels is not None)


def _counted(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None) -> Tensor:
    """(B, T) bool: the tokens that count. Only they are ever computed, so what the others hold reaches nothing."""
    if student_logits.shape != teacher_logits.shape or student_logits.dim() != 3:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} "
            "must both be (B, T, V) of one vocabulary"
        )
    tokens = student_logits.shape[:2]
    if labels is None:
        return torch.ones(tokens, dtype=torch.bool, device=student_logits.device)
    if labels.shape != tokens:
        raise ValueError(f"labels {tuple(labels.shape)} must be (B, T) of student_logits, {tuple(tokens)}")
    if labels.dtype is torch.bool or labels.is_floating_point():
        # a mask would count every token, as none of its entries is -100
        raise ValueError(f"labels must be token ids with -100 where a token does not count, got {labels.dtype}")
    return labels != IGNORED_LABEL


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


def _spec(beta: float, temperature: float, top_k: int | None, *, support: Support, tail: bool) -> Divergence:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    ends = {0.0: DivergenceKind.KL_TEACHER_STUDENT, 1.0: DivergenceKind.KL_STUDENT_TEACHER}
    kind = ends.get(float(beta), DivergenceKind.JSD)
    if top_k is None:
        return Divergence(kind, beta, temperature)
    return Divergence(kind, beta, temperature, support, top_k, tail)


def _terms(student: Tensor, teacher: Tensor, spec: Divergence, *, are_probs: bool) -> Tensor:
    """(n, entries) before the sum, from logits (n, V) or probabilities."""
    if are_probs:
        log_q, log_p = (x.clamp(min=LEAST_PROBABILITY).log() for x in (student, teacher.detach()))
    else:
        log_q, log_p = log_probs(student, spec.temperature), log_probs(teacher.detach(), spec.temperature)
    if is_full(spec, log_q.shape[-1]):
        return divergence_entries(floored(log_q), floored(log_p), spec.kind, beta=spec.beta)
    chosen = entries_of(log_q, log_p, spec, sampled_ids=None)
    at_q, at_p = (restricted(log.gather(-1, chosen.ids), chosen.valid, spec) for log in (log_q, log_p))
    return divergence_entries(at_q, at_p, spec.kind, beta=spec.beta)


def _clip_terms(terms: Tensor, spec: Divergence, clip: float | None) -> Tensor:
    if clip is None:
        return terms
    if spec.kind is not DivergenceKind.JSD:
        warnings.warn(
            f"opsd_compat caps single terms of {spec.kind}, which are of either sign: the loss can become negative and "
            "its gradient point away from the teacher; use it with 0 < beta < 1, or token_clip without it",
            stacklevel=3,
        )
    return terms.clamp(max=clip)


def _reduce(per_token: Tensor, counted: Tensor, reduction: str, *, labelled: bool) -> Tensor:
    if reduction == "none":
        return per_token.new_zeros(counted.shape).masked_scatter(counted, per_token)
    if reduction == "sum":
        return per_token.sum()
    by_token = labelled or reduction == "mean"
    return per_token.sum() / max(per_token.numel() if by_token else counted.shape[0], 1)
