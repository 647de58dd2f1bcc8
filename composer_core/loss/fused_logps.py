"""Log-probs of sampled tokens, and entropies, from hidden states and an output head, a chunk of tokens at a time.

No tensor of all tokens x vocabulary is made, in the forward or in the backward. The forward cannot know the weights of
the gradient, as that of `fused.py` can. With a frozen head each token's gradient by its hidden state is formed there
all the same and only multiplied later; else the backward projects a second time, except for the first chunks, whose
log-probs are kept as far as a fixed number of bytes goes.
Letters: N tokens, n tokens of a chunk, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_core.loss.checks import check_chunk, check_ids, check_projection, check_single_backward
from composer_core.loss.head import Buffers, Head, HeadGrads, accumulation_dtype, chunk_size, split

_KEPT_BYTES = 128 * 2**20
"""What the kept log-probs may take together, whatever the number of tokens."""


def fused_logps(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of one token each, (N,), and entropies in nats, (N,), or None, in at least float32.

    Logits are softcap x tanh(logit_scale (h W^T + b) / softcap) / temperature, without a softcap logit_scale
    (h W^T + b) / temperature. The log-probs are differentiable once by hidden, weight and bias; the entropies are not.

    Args:
        hidden: (N, H), that of the position before each token.
        weight: (V, H).
        ids: (N,) int64.
        temperature: > 0.
        bias: (V,).
        logit_scale: multiplies the logits.
        softcap: bounds the logits.
        chunk: tokens at a time; None is `head.chunk_size`.
        entropy: whether to compute the entropies.

    Raises:
        ValueError: shapes do not fit, ids are outside of the vocabulary, or a number is out of range.
    """
    check_projection("", hidden, weight, bias, softcap=softcap)
    check_ids("ids", ids, tokens=hidden.shape[0], vocab=weight.shape[0])
    check_chunk(chunk)
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    settings = _Settings(
        ids=ids,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk=chunk or chunk_size(weight.shape[0]),
        dtype=accumulation_dtype(hidden, weight),
        entropy=entropy,
        grad=torch.is_grad_enabled(),
    )
    logps, entropies = _FusedLogps.apply(hidden, weight, bias, settings)  # type: ignore[no-untyped-call]
    return logps, entropies if entropy else None


@dataclass(frozen=True)
class _Settings:
    ids: Tensor
    temperature: float
    logit_scale: float
    softcap: float | None
    chunk: int
    dtype: torch.dtype
    entropy: bool
    grad: bool


@dataclass(frozen=True)
class _Chunk:
    at: Tensor
    """(n,) token indices."""
    hidden: Tensor
    """(n, H)"""
    log_q: Tensor
    """(n, V), in a buffer."""
    slope: Tensor | None
    """(n, V): the logits, where a softcap needs them for the gradient."""


class _FusedLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, settings.logit_scale, settings.softcap)
        needs = ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        frozen = settings.grad and needs == (True, False, False)
        keeps = settings.grad and (needs[1] or needs[2]) and head.softcap is None
        unit = HeadGrads.zeros(hidden, head, needs=needs, dtype=settings.dtype) if frozen else None
        logps = torch.zeros(hidden.shape[0], dtype=settings.dtype, device=hidden.device)
        entropies = torch.zeros_like(logps)
        kept: list[Tensor] = []
        everything = torch.arange(hidden.shape[0], device=hidden.device)
        buffers = Buffers(head.vocab, settings.dtype, hidden.device)
        with _full_precision(hidden):
            for chunk in _chunks(hidden, head, settings, buffers, everything, grad=frozen):
                logps[chunk.at] = chunk.log_q.gather(-1, settings.ids[chunk.at, None]).squeeze(-1)
                if settings.entropy:
                    entropies[chunk.at] = _entropy(chunk.log_q, buffers.get("spare", len(chunk.at)))
                if unit is not None:
                    _add(unit, chunk, head, settings, logps.new_ones(len(chunk.at)))
                elif keeps and (
                    keeps := _room(kept, chunk.log_q)
                ):  # none after one that was not: they must be the first
                    kept.append(chunk.log_q)
                    buffers.give_up("logits")
        ctx.save_for_backward(hidden, weight, bias)
        ctx.settings, ctx.unit, ctx.kept = settings, None if unit is None else unit.hidden, kept
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        check_single_backward()
        hidden, weight, bias = ctx.saved_tensors
        if ctx.unit is not None:
            wanted = grad_logps[:, None]
            return torch.where(wanted != 0, ctx.unit * wanted, 0).to(hidden.dtype), None, None, None
        settings: _Settings = ctx.settings
        head = Head(weight, bias, settings.logit_scale, settings.softcap)
        grads = HeadGrads.zeros(hidden, head, needs=ctx.needs, dtype=settings.dtype)
        buffers = Buffers(head.vocab, settings.dtype, hidden.device)
        kept, ctx.kept = ctx.kept, []  # used up: a second backward projects everything again
        tokens = grad_logps.nonzero().flatten()
        with _full_precision(hidden):
            start = 0
            while kept:
                log_q = kept.pop(0)
                chunk = _kept_chunk(log_q, hidden, tokens, start=start)
                start += len(log_q)
                _add(grads, chunk, head, settings, grad_logps[chunk.at])
            for chunk in _chunks(hidden, head, settings, buffers, tokens[tokens >= start], grad=True):
                _add(grads, chunk, head, settings, grad_logps[chunk.at])
        return *grads.finish(head, None), None


def _room(kept: list[Tensor], log_q: Tensor) -> bool:
    return sum(tile.numel() * tile.element_size() for tile in (*kept, log_q)) <= _KEPT_BYTES


def _kept_chunk(log_q: Tensor, hidden: Tensor, tokens: Tensor, *, start: int) -> _Chunk:
    """The rows of a kept chunk, which begins at token `start`, that are among `tokens`."""
    at = tokens[(tokens >= start) & (tokens < start + len(log_q))]
    return _Chunk(at, hidden[at], log_q if len(at) == len(log_q) else log_q[at - start], None)


def _chunks(
    hidden: Tensor, head: Head, settings: _Settings, buffers: Buffers, tokens: Tensor, *, grad: bool
) -> Iterator[_Chunk]:
    for at in split(tokens, settings.chunk):
        logits, rows = buffers.get("logits", len(at)), hidden[at]
        head.project(rows, logits, temperature=settings.temperature)
        slope = buffers.get("slope", len(at)).copy_(logits) if grad and head.softcap is not None else None
        yield _Chunk(at, rows, torch.log_softmax(logits, -1, out=logits), slope)


def _full_precision(hidden: Tensor) -> torch.autocast:
    """Also inside autocast: the products' dtypes are chosen in `head.py`."""
    return torch.autocast(hidden.device.type, enabled=False)


def _add(grads: HeadGrads, chunk: _Chunk, head: Head, settings: _Settings, wanted: Tensor) -> None:
    """Add `wanted` x d log-prob of each token of the chunk; its log-probs are used up."""
    # the derivative by the logits is (1 at the token) - q; its negative needs one sweep less
    negative = chunk.log_q.exp_()
    negative.scatter_add_(1, settings.ids[chunk.at, None], negative.new_full((len(chunk.at), 1), -1))
    factor = head.unscale(negative, chunk.slope, temperature=settings.temperature)
    grads.add(negative, wanted * -factor, at=chunk.at, hidden=chunk.hidden, weight=head.weight)


def _entropy(log_q: Tensor, spare: Tensor) -> Tensor:
    terms = torch.exp(log_q, out=spare).mul_(log_q)
    return -terms.masked_fill_(log_q == -torch.inf, 0).sum(-1)  # 0 x -inf
