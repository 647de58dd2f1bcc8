"""Policy views that the core itself has: `ModelView` on a plain causal LM, and `LeafView` on log-probs alone.

`ModelView` is the reference every backend's own view is compared with. `LeafView` needs no model: where a trainer
hands out log-probs and takes coefficients, it runs any channel that asks for nothing else.
Letters: N tokens packed, S sequences, K hint tokens, V vocabulary, T longest sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_core.batch import Hints, Seqs
from composer_core.divergences import Divergence, Support
from composer_core.errors import RunFailed
from composer_core.loss.distributions import sampled_kl
from composer_core.loss.heads import take_apart
from composer_core.loss.outputs import Outputs, divergence_between
from composer_core.loss.reading import Models, check_same_tokens, given, packed_together
from composer_core.loss.reduce import check_shapes, select
from composer_core.loss.teachers import Teacher
from composer_core.protocols import Model, Need


class ModelView:
    """A Hugging Face causal LM (anything called with ids and mask that returns `.logits`) seen by losses.

    Make one per micro-batch: the policy's forward with gradient runs once for the same `Seqs` object and its outputs
    are kept as long as the view lives, so a loss from it can be backpropagated once. Without gradient, a plain sampled
    divergence of the same `Hints` object costs nothing after another one at the same temperature. Models of a known
    type are taken apart (`heads.py`) and never hold logits of all tokens; others are computed from their logits, with a
    warning.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        rollouts: Seqs | None,
        teacher: nn.Module | Teacher | None = None,
        reference: nn.Module | Teacher | None = None,
        pad_id: int = 0,
        known: KnownForward | None = None,
        around_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`known` is the policy's forward on `rollouts` where the trainer has run it; `around_forward` is entered for
        each forward of a model, for a trainer's autocast.
        """
        self._models = Models(policy, teacher=teacher, reference=reference)
        self._rollouts = rollouts
        self._pad_id = pad_id
        self._around_forward = around_forward
        # the Seqs are kept beside their outputs: identity is only a key while the object lives
        self._forwards: list[tuple[Seqs, Model, bool, Outputs]] = []
        self._logps: list[tuple[Seqs, Model, bool, float, Tensor]] = []
        self._gaps: list[tuple[Hints, Model, float, Tensor]] = []
        self._joined: list[tuple[Seqs, ...]] = []
        self.anchors: list[Tensor] = []
        """See `watch.Anchored`."""
        if known is not None:
            self._forwards.append((known.outputs.seqs, "policy", True, known.outputs))
            if known.logps is not None:
                self._logps.append((known.outputs.seqs, "policy", True, known.temperature, known.logps))

    def join(self, *seqs: Seqs) -> None:
        """See `watch.Joins`: all are padded to the longest, so join what is of a length."""
        self._joined.append(seqs)

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (N,), in at least float32.

        Raises:
            RunFailed: the view has no such model.
            ValueError: `seqs.scored` does not have one entry per token.
        """
        for known, known_model, known_grad, known_temperature, logps in self._logps:
            if known is seqs and (known_model, known_grad, known_temperature) == (model, grad, temperature):
                return logps
        if seqs.scored is not None:
            check_shapes("one entry per token", ids=seqs.ids, scored=seqs.scored)
        with self._models.reading(model, grad=grad):
            outputs = self._outputs(seqs, model=model, grad=grad)
            at = (~seqs.first if seqs.scored is None else seqs.scored & ~seqs.first).nonzero().flatten()
            picked = outputs.logps(at, temperature=temperature)
            # scattered into zeros: nothing predicts a first token
            logps = picked.new_zeros(seqs.ids.shape).index_put((at,), picked)
        self._logps.append((seqs, model, grad, temperature, logps))
        return logps

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """See `protocols.PolicyView`: (K,), 0 for filler. The teacher reads `hints.seqs`, the student the rollouts.

        Backpropagate the values times `hints.weight` times one number: gradients are formed for those. Both forwards
        run whatever the weights are, so that a rank without hints does as the others do.

        Raises:
            RunFailed: the view has no rollouts, or student and teacher tokens are not the same.
        """
        if (known := self._known_gap(hints, spec, teacher)) is not None:
            return known
        rollouts = given(self._rollouts)
        check_same_tokens(hints, rollouts)
        student = self._outputs(rollouts, model="policy", grad=True)
        with self._models.reading(teacher, grad=False):
            taught = self._outputs(hints.seqs, model=teacher, grad=False)
        rows = student.rows(hints.student)
        self.anchors.append(rows)
        ids = rollouts.ids[hints.student]
        values, gap = divergence_between(student, taught, hints, spec, rows=rows, ids=ids)
        if gap is not None:
            self._gaps.append((hints, teacher, spec.temperature, gap))
        return values

    def _known_gap(self, hints: Hints, spec: Divergence, teacher: Model) -> Tensor | None:
        """The values of a sampled divergence as an earlier one of the same hints left them behind, (K,)."""
        if torch.is_grad_enabled() or spec.support is not Support.SAMPLED or spec.taid is not None or spec.gate:
            return None
        asked = (teacher, spec.temperature)
        return next((gap for known, *given, gap in self._gaps if known is hints and tuple(given) == asked), None)

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """See `protocols.PolicyView`: (len(at), V), divided by the temperature, in at least float32."""
        with self._models.reading(model, grad=grad):
            return self._outputs(seqs, model=model, grad=grad).logits(at, temperature=temperature)

    def _outputs(self, seqs: Seqs, *, model: Model, grad: bool) -> Outputs:
        """The model's forward on right-padded sequences, or what an earlier one gave."""
        for known, known_model, known_grad, outputs in self._forwards:
            if known is seqs and (known_model, known_grad) == (model, grad):
                return outputs
        network = self._models.network(model)
        if not grad and take_apart(network) is None:  # its logits would be kept for nothing
            return self._forward(network, [seqs], grad=False)[0]
        together = next((joined for joined in self._joined if any(part is seqs for part in joined)), (seqs,))
        read = self._forward(network, together, grad=grad)
        self._forwards += [(outputs.seqs, model, grad, outputs) for outputs in read]
        return next(outputs for outputs in read if outputs.seqs is seqs)

    def _forward(self, network: nn.Module, together: Sequence[Seqs], *, grad: bool) -> list[Outputs]:
        """One forward of them all, and what it gave for each."""
        ids, mask = packed_together(together).padded(self._pad_id)
        if not ids.numel():  # nothing here, yet the other ranks run a forward: one padding token joins them
            ids, mask = ids.new_full((1, 1), self._pad_id), mask.new_ones((1, 1))
        # an empty sequence among others would leave its row nothing to attend to, which is NaN in some kernels
        mask[:, 0] = True
        parts = take_apart(network)
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        if parts is None:
            _tell_dense(network)
        with self._around_forward():
            states = network(**inputs).logits if parts is None else parts.backbone(**inputs).last_hidden_state
        # without gradient the head is the tensor that is there now: a teacher's weights are gone when it is used
        head = None if parts is None else parts.head if grad else parts.head.detached()
        rows = [states] if len(together) == 1 else states.split([len(seqs) for seqs in together])
        return [Outputs(seqs, own, head) for seqs, own in zip(together, rows, strict=True)]


@dataclass(frozen=True)
class KnownForward:
    """A forward of the policy with gradient that a trainer has run already."""

    outputs: Outputs
    logps: Tensor | None = None
    """(N,) log-probs with gradient, 0 where `outputs.seqs.scored` leaves a token out."""
    temperature: float = 1.0
    """That of `logps`."""


def _tell_dense(network: nn.Module) -> None:
    # Python shows a warning once per text and place, which is as often as it should be said
    warnings.warn(
        f"{type(network).__name__} is no model type that composer_core.loss.heads knows: losses are computed from the "
        "logits of all tokens, which is exact and needs more memory",
        stacklevel=2,
    )


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

    def __init__(self, known: Sequence[KnownLogps], *, temperature: float, rollouts: Seqs | None = None) -> None:
        """`rollouts` are the sequences that hints point at, for a sampled divergence."""
        self._temperature = temperature
        self._rollouts = rollouts
        self.anchors: list[Tensor] = []
        """See `watch.Anchored`."""
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
        """The sampled estimate, (K,), 0 for filler; log-probs of sampled tokens determine no other.

        Raises:
            RunFailed: another support, target or gate is asked for, or tokens are not the same.
        """
        if spec.support is not Support.SAMPLED or spec.taid is not None or spec.gate is not None:
            raise self._refusal("divergence", Need.DIVERGENCE_FULL)
        rollouts = given(self._rollouts)
        check_same_tokens(hints, rollouts)
        own = self.logps(rollouts, grad=True, temperature=spec.temperature)[hints.student]
        taught = self.logps(hints.seqs, model=teacher, grad=False, temperature=spec.temperature)[hints.teacher]
        self.anchors.append(own)
        return select(sampled_kl(own, taught), hints.weight != 0)

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
