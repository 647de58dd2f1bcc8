"""Families that start from hidden states and head weights."""

from __future__ import annotations

from composer_core.divergences import Divergence, DivergenceKind
from composer_core.loss.distributions import entropy, log_probs
from composer_core.loss.fused import fused_linear_divergence
from composer_core.loss.reduce import masked_sum
from golden_table.case import Answer, Case, Compute
from golden_table.distillation import ENDS


def fused_jsd(case: Case) -> Answer:
    inputs, args = case.inputs, case.args
    spec = Divergence(ENDS.get(args["beta"], DivergenceKind.JSD), args["beta"], args["temperature"])
    mask = inputs["mask"].bool()
    loss, _ = fused_linear_divergence(
        inputs["student_hidden"],
        inputs["student_weight"],
        inputs["teacher_hidden"],
        inputs["teacher_weight"],
        spec,
        weight=mask.to(inputs["student_hidden"].dtype),
    )
    loss = loss / mask.sum().clamp(min=1)
    if "entropy_sum" not in case.outputs:
        return Answer({"loss": loss})
    logits = inputs["student_hidden"].detach() @ inputs["student_weight"].detach().T
    h_student = entropy(log_probs(logits, args["temperature"]))
    return Answer({"loss": loss, "entropy_sum": masked_sum(h_student, mask), "n_valid": mask.sum()})


FAMILIES: dict[str, Compute] = {"fused_jsd": fused_jsd}
