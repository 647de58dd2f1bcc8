"""An output head and its products with hidden states, a chunk of tokens at a time.

What `fused.py` and `fused_logps.py` have in common: no tensor of all tokens times the vocabulary is ever made, half
precision is accumulated in float32, and buffers are reused. No formula of a loss stands here.
Letters: n tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

_CHUNK_BYTES = 128 * 2**20
"""What the two float32 (n, V) buffers of a chunk may take together, within the limits below."""
_LEAST_CHUNK, _LARGEST_CHUNK = 64, 256
"""A smaller chunk sweeps the whole gradient of the head too often, a larger one leaves the cache for nothing."""
_BLOCK_ROWS = 4096
"""Rows of a half-precision head that are widened at a time where no kernel accumulates in float32 by itself."""


def chunk_size(vocab: int) -> int:
    """Tokens per chunk for a vocabulary of that size."""
    return min(max(_CHUNK_BYTES // (8 * vocab), _LEAST_CHUNK), _LARGEST_CHUNK)


def split(tokens: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Token indices in about equal parts of at most a quarter more than `chunk`.

    A small last part would cost nearly as much as a whole one: a product reads the head once, however few its rows.
    """
    return torch.tensor_split(tokens, max(math.ceil(len(tokens) / (1.25 * chunk)), 1))


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where an input is, float32 otherwise."""
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


@dataclass(frozen=True)
class Head:
    """Logits from hidden states: softcap x tanh(logit_scale (h W^T + b) / softcap), or without the cap."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,)"""
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab(self) -> int:
        """V"""
        return self.weight.shape[0]

    def detached(self) -> Head:
        """The same numbers without gradient, also when the parameters get other values in their place later."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, weight=self.weight.detach(), bias=bias)

    def project(self, hidden: Tensor, out: Tensor, *, temperature: float) -> None:
        """Logits of (n, H) hidden states divided by the temperature, written to `out`, (n, V)."""
        _times_rows(hidden, self.weight, out)
        if self.bias is not None:
            out.add_(self.bias.to(out.dtype))
        if self.softcap is None:
            _scale(out, self.logit_scale / temperature)
            return
        out.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / temperature)

    def unscale(self, grad: Tensor, slope: Tensor | None, *, temperature: float) -> float:
        """Turn a gradient by `project`'s result, (n, V), into one by h W^T + b, in place, but for the factor returned.

        `slope` is that result itself before it was overwritten, (n, V), where there is a softcap; it is overwritten.
        """
        if slope is not None and self.softcap is not None:
            tanh = slope.mul_(temperature / self.softcap)
            grad.mul_(tanh.square_().neg_().add_(1))
        return self.logit_scale / temperature


@dataclass
class Buffers:
    """(n, V) work space that every chunk uses again."""

    vocab: int
    dtype: torch.dtype
    device: torch.device
    _made: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, n: int) -> Tensor:
        """The first n rows of the buffer of that name, with what was left in them."""
        if name not in self._made or len(self._made[name]) < n:
            self._made[name] = torch.empty(n, self.vocab, dtype=self.dtype, device=self.device)
        return self._made[name][:n]

    def give_up(self, name: str) -> None:
        """Leave the buffer to whoever holds it; the next `get` makes another."""
        self._made.pop(name, None)


@dataclass
class HeadGrads:
    """Gradients of a weighted sum of per-token values, summed up over chunks; None where nobody asked."""

    hidden: Tensor | None
    """(K, H) in the dtype of the hidden states."""
    weight: Tensor | None
    """(V, H), in the accumulation dtype until `finish`."""
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, head: Head, *, needs: tuple[bool, bool, bool], dtype: torch.dtype) -> HeadGrads:
        """Zeros for those of hidden states, weight and bias that need a gradient."""
        bias = head.bias if needs[2] else None
        return cls(
            hidden=torch.zeros_like(hidden) if needs[0] else None,
            weight=torch.zeros_like(head.weight, dtype=dtype) if needs[1] else None,
            bias=None if bias is None else torch.zeros_like(bias, dtype=dtype),
        )

    def add(self, grad: Tensor, row: Tensor, *, at: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add a chunk: `grad`, (n, V), is each row's gradient by h W^T + b, `row`, (n,), what multiplies it.

        `at`, (n,), are the chunk's token indices and `hidden`, (n, H), its hidden states.
        """
        # the factor goes into the (n, H) sides of the products: no further pass over (n, V)
        if self.hidden is not None:
            pulled = _times_columns(grad, weight).mul_(row[:, None])
            self.hidden.index_copy_(0, at, pulled.to(self.hidden.dtype))
        if self.weight is not None:
            _add_outer(self.weight, grad, hidden, row)
        if self.bias is not None:
            self.bias.addmv_(grad.t(), row)

    def finish(self, head: Head, scale: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in their tensors' dtypes, multiplied IN PLACE by a scalar; use the object once."""
        for grad in (self.hidden, self.weight, self.bias):
            if grad is not None and scale is not None:
                grad.mul_(scale.to(grad.dtype))
        weight = None if self.weight is None else self.weight.to(head.weight.dtype)
        bias = None if self.bias is None or head.bias is None else self.bias.to(head.bias.dtype)
        return self.hidden, weight, bias


def _scale(values: Tensor, factor: float) -> None:
    if factor != 1:
        values.mul_(factor)


def _fast_half(a: Tensor, b: Tensor) -> bool:
    """Whether the device multiplies these half-precision tensors with float32 accumulation and result."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Row blocks of a head in a wider dtype: a whole copy would double the largest input."""
    for start in range(0, weight.shape[0], _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        yield rows, weight[rows].to(dtype)


def _times_rows(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out` = hidden weight^T, (n, V)."""
    if _fast_half(hidden, weight):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        return
    hidden = hidden.to(out.dtype)
    if weight.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
        return
    for rows, block in _blocks(weight, out.dtype):
        torch.mm(hidden, block.t(), out=out[:, rows])


def _times_columns(grad: Tensor, weight: Tensor) -> Tensor:
    """Product of grad and weight, (n, H), in grad's dtype."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    if weight.is_cuda and grad.dtype is torch.float32:
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=torch.float32)
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for rows, block in _blocks(weight, grad.dtype):
        total.addmm_(grad[:, rows], block)
    return total


def _add_outer(total: Tensor, grad: Tensor, hidden: Tensor, row: Tensor) -> None:
    """`total` += (row grad)^T hidden, (V, H)."""
    weighted = hidden.to(total.dtype) * row[:, None]
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        # as a plain bf16 backward rounds its operands, but summed over chunks in float32
        narrow = hidden.dtype
        total.add_(torch.mm(grad.t().to(narrow), weighted.to(narrow), out_dtype=total.dtype))
        return
    total.addmm_(grad.t(), weighted)
