"""Policy views that the core itself has: `ModelView` on a plain causal LM, and `LeafView` on log-probs alone.

`ModelView` is the reference every backend's own view is compared with. `LeafView` needs no model: where a trainer
hands out log-probs and takes coefficients, it runs any channel that asks for nothing else.
Letters: N tokens packed, S sequences, K hint tokens, V vocabulary, T longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from composer_core.batch import Hints, Seqs
from composer_core.errors import RunFailed
from composer_core.loss.divergence import divergence
from composer_core.protocols import Divergence, Model, Need


class ModelView:
    """A Hugging Face causal LM (anything called with ids and mask that returns `.logits`) seen by losses.

    Make one per micro-batch: the policy's forward with gradient runs once for the same `Seqs` object and its logits
    are kept as long as the view lives, so a loss from it can be backpropagated once. Rows of padding are never
    projected into a loss. The exact dense form: a divergence holds (K, V) in memory.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        rollouts: Seqs | None,
        teacher: nn.Module | None = None,
        reference: nn.Module | None = None,
        pad_id: int = 0,
    ) -> None:
        self._models: dict[Model, nn.Module | None] = {"policy": policy, "teacher": teacher, "reference": reference}
        self._rollouts = rollouts
        self._pad_id = pad_id
        # the Seqs are kept beside their logits: identity is only a key while the object lives
        self._forwards: list[tuple[Seqs, Tensor]] = []

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (N,), in at least float32.

        Raises:
            RunFailed: the view has no such model.
        """
        logits = self._logits(seqs, model=model, grad=grad)
        parts = []
        for s, (start, stop) in enumerate(pairwise(seqs.cu.tolist())):
            if start == stop:
                continue
            rows = _scaled(logits[s, : stop - start - 1], temperature)
            picked = rows.gather(-1, seqs.ids[start + 1 : stop, None]).squeeze(-1)
            # not log_softmax: its (T, V) result would be kept for one entry of each row
            parts += [rows.new_zeros(1), picked - rows.logsumexp(-1)]
        # without any token the result must still be joined to the graph
        return torch.cat(parts) if parts else logits[:0].flatten()

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """See `protocols.PolicyView`: (K,). The teacher reads `hints.seqs`, the student the view's rollouts.

        Both forwards run whatever the weights are, so that a rank without hints does as the others do.

        Raises:
            RunFailed: the view has no rollouts, or student and teacher tokens are not the same.
        """
        if self._rollouts is None:
            raise RunFailed("a divergence needs rollouts, and this view has none: hints point at their tokens")
        _check_same_tokens(hints, self._rollouts)
        student = _rows(self._logits(self._rollouts, model="policy", grad=True), self._rollouts, hints.student)
        taught = _rows(self._logits(hints.seqs, model=teacher, grad=False), hints.seqs, hints.teacher)
        return divergence(student, taught, spec)

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (len(at), V), divided by the temperature, in at least float32."""
        return _scaled(_rows(self._logits(seqs, model=model, grad=grad), seqs, at), temperature)

    def _logits(self, seqs: Seqs, *, model: Model, grad: bool) -> Tensor:
        """(S, T, V) of right-padded sequences, in the model's dtype."""
        network = self._models[model]
        if network is None:
            raise RunFailed(f"a loss asks for the {model} model, and this trainer was given none")
        if not grad:
            with torch.no_grad(), _evaluating(network):
                return self._forward(network, seqs)
        if model != "policy":
            return self._forward(network, seqs)
        for known, logits in self._forwards:
            if known is seqs:
                return logits
        logits = self._forward(network, seqs)
        self._forwards.append((seqs, logits))
        return logits

    def _forward(self, network: nn.Module, seqs: Seqs) -> Tensor:
        ids, mask = seqs.padded(self._pad_id)
        if not ids.numel():  # nothing here, yet the other ranks run a forward: one padding token joins them
            ids, mask = ids.new_full((1, 1), self._pad_id), mask.new_ones((1, 1))
        # an empty sequence among others would leave its row nothing to attend to, which is NaN in some kernels
        mask[:, 0] = True
        logits: Tensor = network(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return wide if temperature == 1 else wide / temperature


def _rows(logits: Tensor, seqs: Seqs, at: Tensor) -> Tensor:
    """Rows of (S, T, V) logits that predict the tokens at flat indices `at`, (len(at), V).

    A filler that points at a first token, which nothing predicts, gets the row of that token itself.
    """
    if not at.numel():
        return logits.reshape(-1, logits.shape[-1])[:0]
    sequence = seqs.owner[at]
    return logits[sequence, (at - seqs.cu[sequence] - 1).clamp(min=0)]


def _check_same_tokens(hints: Hints, rollouts: Seqs) -> None:
    real = hints.weight != 0
    differs = (rollouts.ids[hints.student] != hints.seqs.ids[hints.teacher]) & real
    unpredicted = (rollouts.first[hints.student] | hints.seqs.first[hints.teacher]) & real
    for wrong, what in ((differs, "student and teacher have different tokens"), (unpredicted, "nothing predicts it")):
        if wrong.any():
            k = int(wrong.nonzero()[0])
            raise RunFailed(
                f"hint token {k} pairs rollout token {int(hints.student[k])} with teacher token "
                f"{int(hints.teacher[k])}: {what}",
                fix="the channel's collate must point both at one and the same token, not the first of its sequence",
            )


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """No dropout inside; every submodule gets its own mode back, also one that was frozen in eval before."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class KnownLogps:
    """Log-probs that a trainer already has for some sequences."""

    seqs: Seqs
    logps: Tensor
    """(N,)"""
    model: Model = "policy"
    """Those of the policy become leaves; those of another model stay constants."""


class LeafView:
    """Known log-probs as leaf tensors: runs a loss without a model and gives its derivative per token.

    With c = `coefficients(loss)`, the sum of c x log-prob has the loss's gradient in the model's parameters, so a
    trainer that only weights log-probs can run every channel which needs `Need.LOGPS` and `Need.PAIRS` alone.
    """

    def __init__(self, known: Sequence[KnownLogps], *, temperature: float) -> None:
        self._temperature = temperature
        self._known = [(k.seqs, k.model, k.logps.detach().clone().requires_grad_(k.model == "policy")) for k in known]

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """The known log-probs of these sequences, (N,), found by identity or equal content.

        Raises:
            RunFailed: these sequences, this model or this temperature were not given.
        """
        if temperature != self._temperature:
            raise RunFailed(
                f"a loss asks for log-probs at temperature {temperature:g}, and this trainer has them at "
                f"{self._temperature:g} only"
            )
        for known, known_model, logps in self._known:
            if known_model == model and _same(known, seqs):
                return logps if grad else logps.detach()
        raise RunFailed(f"a loss asks for {model} log-probs of sequences that this trainer has none of")

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """Refused: log-probs of sampled tokens do not determine it."""
        raise self._refusal("divergence", Need.DIVERGENCE_FULL)

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """Refused, as there is no model."""
        raise self._refusal("logits", Need.LOGITS)

    def coefficients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Derivative of a scalar by each policy log-prob, one (N,) per `KnownLogps` of the policy, in their order."""
        leaves = [logps for _, model, logps in self._known if model == "policy"]
        if not loss.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    def _refusal(self, what: str, need: Need) -> RunFailed:
        return RunFailed(
            f"a loss asks for {what} (need {need.value!r}), and this trainer has log-probs only",
            fix="declare the need in the channel's contribution: `plan` then refuses the spec or takes an alternative",
        )


def _same(a: Seqs, b: Seqs) -> bool:
    return a is b or (torch.equal(a.cu, b.cu) and torch.equal(a.ids, b.ids))
