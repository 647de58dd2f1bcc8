"""Divergences between a teacher's and a student's next-token distributions, from full logits.

The plain exact form, (K, V) tensors and all: the reference that the leaner forms (`fused.py`) are compared with. Its
pieces are `distributions.py` (kinds), `topk.py` (supports) and `targets.py` (targets, gates). Masks, weights and
denominators are the caller's. Letters: K hint tokens, V vocabulary; q student, p teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_core.divergences import Divergence, PaperGate, SoftGate
from composer_core.loss.checks import check_logits, check_sampled_ids
from composer_core.loss.distributions import between, entropy, floored, kl_entries, log_probs, tell_infinite
from composer_core.loss.reduce import select
from composer_core.loss.targets import soft_weight, taid_target
from composer_core.loss.topk import entries_of, is_full, restricted, truncated_kl


def divergence(
    student_logits: Tensor, teacher_logits: Tensor, spec: Divergence, *, sampled_ids: Tensor | None = None
) -> Tensor:
    """Divergence per token, (K,), from logits (K, V) of both sides, in nats and at least float32.

    Kind, support, target, gate and clip as `Divergence` describes them. Both logits are divided by the temperature;
    there is no temperature-squared factor. The gradient reaches the student only, whatever the teacher requires; an
    entry whose logit is -inf counts as `distributions.LOGP_FLOOR` says and gets none. `sampled_ids`, (K,) int64, are
    the tokens the student sampled, for the sampled support alone, whose value is an estimate of either sign
    (`distributions.sampled_kl`).

    Raises:
        ValueError: the shapes differ, as with two vocabularies; or sampled ids are missing, not wanted or no ids.
    """
    check_logits(student_logits, teacher_logits)
    check_sampled_ids(sampled_ids, spec, tokens=student_logits.shape[0], vocab=student_logits.shape[1])
    if spec.taid == 0:  # the student's own distribution: 0 exactly, which sums of roundings would not be
        return select(student_logits.sum(-1), torch.zeros_like(student_logits[:, 0], dtype=torch.bool))
    log_q = log_probs(student_logits, spec.temperature)
    with torch.no_grad():
        log_p = log_probs(target_logits(student_logits, teacher_logits, spec), spec.temperature)
    h_teacher = _teacher_entropy(teacher_logits, log_p, spec)
    at_q, at_p = _on_support(log_q, log_p, spec, sampled_ids)
    value = on_entries(at_q, at_p, spec, h_teacher=h_teacher, vocab=log_q.shape[1])
    if isinstance(spec.gate, PaperGate):
        value = value + paper_term(log_q, log_p, spec.gate, h_teacher=h_teacher)
    return value if spec.clip is None else value.clamp(max=spec.clip)


def target_logits(student_logits: Tensor, teacher_logits: Tensor, spec: Divergence) -> Tensor:
    """What stands for the teacher's logits, detached: themselves, or TAID's mixture; the shape is kept."""
    if spec.taid is None:
        return teacher_logits.detach()
    return taid_target(student_logits, teacher_logits, t=spec.taid)


def on_entries(log_q: Tensor, log_p: Tensor, spec: Divergence, *, h_teacher: Tensor, vocab: int) -> Tensor:
    """Divergence with the soft gate over the entries given, (K, k) -> (K,), from floored log-probabilities."""
    value = between(log_q, log_p, spec)
    if not isinstance(spec.gate, SoftGate):
        return value
    share = soft_weight(h_teacher, spec.gate, vocab=vocab)
    return share * kl_entries(log_p, log_q).sum(-1) + (1 - share) * value


def paper_term(log_q: Tensor, log_p: Tensor, gate: PaperGate, *, h_teacher: Tensor) -> Tensor:
    """What the paper's gate adds per token, (K,): see `protocols.PaperGate`. Log-probabilities are (K, V)."""
    ids = log_p.topk(min(gate.k, log_p.shape[-1]), dim=-1).indices
    unsure = (h_teacher > gate.tau).to(log_q.dtype)
    return gate.alpha * unsure * truncated_kl(log_q.gather(-1, ids), log_p.gather(-1, ids))


def _on_support(log_q: Tensor, log_p: Tensor, spec: Divergence, sampled_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    if is_full(spec, log_q.shape[-1]):
        log_q, log_p = floored(log_q), floored(log_p)
        tell_infinite(log_q.detach(), log_p, spec)
        return log_q, log_p
    chosen = entries_of(log_q, log_p, spec, sampled_ids=sampled_ids)
    at_q, at_p = (restricted(log.gather(-1, chosen.ids), chosen.valid, spec) for log in (log_q, log_p))
    return at_q, at_p


@torch.no_grad()
def _teacher_entropy(teacher_logits: Tensor, log_p: Tensor, spec: Divergence) -> Tensor:
    """(K,); zeros where no gate asks for it."""
    if spec.gate is None:
        return log_p.new_zeros(log_p.shape[0])
    return entropy(log_p if spec.taid in (None, 1) else log_probs(teacher_logits, spec.temperature))
