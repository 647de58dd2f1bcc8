"""Losses of the vocabulary's size, as they are written elsewhere and here: the contenders of `bench/loss.py`.

To add a contender, write a function from a case and its inputs to what is timed, and name it in `DIVERGENCES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer_core.divergences import Divergence, DivergenceKind
from composer_core.loss.fused import fused_linear_divergence
from composer_core.loss.fused_logps import fused_logps

WIDTH = 512
SPECS = {"kl": Divergence(DivergenceKind.KL_TEACHER_STUDENT), "jsd": Divergence(DivergenceKind.JSD, 0.5)}
PEERS = ("trl", "liger")
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row of the comparison."""

    kind: str
    tokens: int = 2048
    vocab: int = 32000
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    """The head gets no gradient, as with LoRA."""
    counted: float = 1.0
    """Share of tokens with weight 1; the others have 0."""

    def __str__(self) -> str:
        head = "frozen head" if self.frozen else "head trained"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} N={self.tokens} V={self.vocab} {dtype}, {head}, {self.counted:.0%} counted"


@dataclass(frozen=True)
class Inputs:
    """Leaves and constants of a case."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    rows: Tensor
    """(N,) 0 or 1."""
    ids: Tensor

    @classmethod
    def make(cls, case: Case) -> Inputs:
        """Seeded normals; logits have a spread of about 2."""
        torch.manual_seed(0)
        shapes = ((case.tokens, WIDTH), (case.vocab, WIDTH)) * 2
        hidden, weight, teacher_hidden, teacher_weight = (torch.randn(shape).to(case.dtype) for shape in shapes)
        for head in (weight, teacher_weight):
            head.mul_(2 / math.sqrt(WIDTH))
        rows = (torch.arange(case.tokens) % 100 < round(100 * case.counted)).float()
        ids = torch.randint(case.vocab, (case.tokens,))
        hidden.requires_grad_()
        weight.requires_grad_(not case.frozen)
        return cls(hidden, weight, teacher_hidden, teacher_weight, rows, ids)

    def clear(self) -> None:
        """Forget gradients."""
        self.hidden.grad = self.weight.grad = None


def published(hidden: Tensor, inputs: Inputs, teacher_hidden: Tensor, kind: str) -> Tensor:
    """Divergence per token the plain way, (N,), in the inputs' dtype."""
    student = F.log_softmax(hidden @ inputs.weight.T, dim=-1)
    teacher = F.log_softmax(teacher_hidden @ inputs.teacher_weight.T, dim=-1)
    if kind == "kl":
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    half = math.log(0.5)
    mixture = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0)
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (0.5 * to_teacher + 0.5 * to_student).sum(-1)


def naive(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        values = published(inputs.hidden, inputs, inputs.teacher_hidden, case.kind)
        ((values * inputs.rows).sum() / inputs.rows.sum()).backward()

    return run


def checkpointed(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        chunks = zip(inputs.hidden.split(256), inputs.teacher_hidden.split(256), strict=True)
        values = [checkpoint(published, h, inputs, t, case.kind, use_reentrant=False) for h, t in chunks]
        ((torch.cat(values) * inputs.rows).sum() / inputs.rows.sum()).backward()

    return run


def ours(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        sides = (inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight)
        loss, _ = fused_linear_divergence(*sides, SPECS[case.kind], weight=inputs.rows)
        (loss / inputs.rows.sum()).backward()

    return run


def trl(case: Case, inputs: Inputs) -> Run:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = {"kl": 0.0, "jsd": 0.5}[case.kind]

    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        sides = (inputs.hidden[at], inputs.weight, None, inputs.teacher_hidden[at], inputs.teacher_weight, None)
        values, _ = ChunkedDivergenceFunction.apply(*sides, beta)
        (values.sum() / len(at)).backward()

    return run


def liger(case: Case, inputs: Inputs) -> Run:
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

    beta = {"kl": 0.0, "jsd": 0.5}[case.kind]
    # student and teacher biases, weights of hard and soft loss, beta, ignored label, temperature, compiled, chunk
    options = (None, None, 0.0, 1.0, beta, -100, 1.0, False, 256)

    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        sides = (inputs.hidden[at], inputs.weight, inputs.teacher_hidden[at], inputs.teacher_weight)
        loss = LigerFusedLinearJSDFunction.apply(*sides, inputs.ids[at], *options)
        (loss[0] if isinstance(loss, tuple) else loss).backward()

    return run


def matmuls(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        at = inputs.rows.nonzero().flatten()
        total = None if case.frozen else torch.zeros_like(inputs.weight)
        for rows in at.split(256):
            hidden, taught = inputs.hidden[rows], inputs.teacher_hidden[rows]
            logits, _ = hidden @ inputs.weight.T, taught @ inputs.teacher_weight.T
            _ = logits @ inputs.weight
            if total is not None:
                total.addmm_(logits.T, hidden)

    return run


def plain_logps(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        logits = inputs.hidden @ inputs.weight.T
        logps = logits.float().log_softmax(-1).gather(-1, inputs.ids[:, None]).squeeze(-1)
        (logps * inputs.rows).sum().backward()

    return run


def our_logps(case: Case, inputs: Inputs) -> Run:
    def run() -> None:
        logps, _ = fused_logps(inputs.hidden, inputs.weight, inputs.ids)
        (logps * inputs.rows).sum().backward()

    return run


def plain_values(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        (inputs.hidden @ inputs.weight.T).float().log_softmax(-1).gather(-1, inputs.ids[:, None])

    return run


def our_values(case: Case, inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> None:
        fused_logps(inputs.hidden, inputs.weight, inputs.ids)

    return run


Make = Callable[[Case, Inputs], Run]
DIVERGENCES: dict[str, Make] = {
    "naive": naive,
    "ours": ours,
    "liger": liger,
    "trl": trl,
    "checkpointed": checkpointed,
    "matmuls": matmuls,
}
LOGPS: dict[str, Make] = {"plain": plain_logps, "ours": our_logps}
LOGPS_VALUES: dict[str, Make] = {"plain": plain_values, "ours": our_values}
