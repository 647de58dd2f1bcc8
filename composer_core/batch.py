"""The only tensors that cross a plugin border.

PACKED: S sequences lie one behind the other, N is the sum of their lengths, there is no padding. Per-token tensors
are (N,) and entry i is about TOKEN i, which the model predicts at i - 1. So left padding, right padding and nested
tensors all become the same thing, and a per-token mask needs no shift to be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Seqs:
    """Token ids of S sequences, packed."""

    ids: Tensor
    """(N,) int64."""
    cu: Tensor
    """(S+1,) int64 cumulative lengths: sequence s is `ids[cu[s]:cu[s+1]]`."""
    scored: Tensor | None = None
    """(N,) bool: tokens whose log-probs a loss reads; a view projects no others onto the vocabulary and gives 0 there.
    None: all."""

    @classmethod
    def from_lists(cls, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Seqs:
        """Pack lists of token ids."""
        flat = [token for sequence in sequences for token in sequence]
        lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)], dtype=torch.int64, device=device)
        return cls(ids=torch.tensor(flat, dtype=torch.int64, device=device), cu=lengths.cumsum(0))

    @classmethod
    def from_padded(cls, ids: Tensor, attention_mask: Tensor) -> Seqs:
        """Pack (B, T) ids, whatever side they are padded on."""
        mask = attention_mask.bool()
        lengths = mask.sum(-1)
        return cls(ids=ids[mask], cu=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @property
    def lengths(self) -> Tensor:
        """(S,)"""
        return self.cu[1:] - self.cu[:-1]

    @property
    def owner(self) -> Tensor:
        """(N,): which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.ids.device), self.lengths)

    @property
    def first(self) -> Tensor:
        """(N,) bool: tokens that nothing predicts."""
        mask = torch.zeros_like(self.ids, dtype=torch.bool)
        mask[self.cu[:-1][self.lengths > 0]] = True
        return mask

    def __len__(self) -> int:
        return self.cu.numel() - 1

    def padded(self, pad_id: int = 0) -> tuple[Tensor, Tensor]:
        """Right-padded (S, T) ids and their (S, T) attention mask."""
        lengths = self.lengths
        width = int(lengths.max()) if len(self) else 0
        mask = torch.arange(width, device=self.ids.device)[None, :] < lengths[:, None]
        ids = torch.full(mask.shape, pad_id, dtype=self.ids.dtype, device=self.ids.device)
        ids[mask] = self.ids
        return ids, mask


@dataclass(frozen=True)
class Rollouts:
    """What the policy sampled, and what is known of it."""

    seqs: Seqs
    action: Tensor
    """(N,) bool: tokens the policy sampled (in recorded traces: the assistant's). Tool output, prompts and first
    tokens are False."""
    advantages: Tensor | None = None
    """(N,); None for recorded traces."""
    old_logps: Tensor | None = None
    """(N,) under the policy that the ratio refers to; None means on policy."""
    sampler_logps: Tensor | None = None
    """(N,) as the inference engine reported them."""
    ref_logps: Tensor | None = None
    """(N,) under the reference policy."""
    rewards: Tensor | None = None
    """(S,)"""
    group: Tensor | None = None
    """(S,) ids of the prompt groups, unique over ranks."""
    uid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hints:
    """The student's tokens and the same tokens in the teacher's context, which holds a hint."""

    seqs: Seqs
    """The teacher's sequences."""
    student: Tensor
    """(K,) flat indices into the rollouts' tokens."""
    teacher: Tensor
    """(K,) flat indices into `seqs`, pointing at equal ids."""
    weight: Tensor
    """(K,); 0 = filler, so that a rank without hints runs the same forward."""
    teacher_logps: Tensor | None = None
    """(K,) log-probs of the teacher's tokens, where a teacher elsewhere has read `seqs`: no model here needs to."""


@dataclass(frozen=True)
class Pairs:
    """P preference pairs; sequence p of `chosen` competes with sequence p of `rejected`."""

    chosen: Seqs
    rejected: Seqs
    chosen_action: Tensor
    """(N of chosen,) bool: tokens of the answer, not of the prompt."""
    rejected_action: Tensor
    """(N of rejected,) bool."""
    weight: Tensor
    """(P,); 0 = filler."""
    ref_chosen: Tensor | None = None
    """(P,) summed reference log-probs of the answers; None where the loss needs no reference."""
    ref_rejected: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch as a channel or an objective sees it.

    Rollouts and counts are shared; hints, pairs and extra are what this channel's own `collate` made.
    """

    rollouts: Rollouts | None = None
    hints: Hints | None = None
    pairs: Pairs | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Third parties: "<channel>.<field>", (N,) or (S,)."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """GLOBAL over ranks and accumulation window, made by the adapter: `tokens` (action tokens), `sequences`,
    `max_tokens` (sequences x longest completion), `micro_batches`, and "<channel>.<name>" for what a channel counts."""
    step: int = 0
    total_steps: int = 1
    temperature: float = 1.0
    """At which the rollouts were sampled; a loss takes the log-probs of their tokens at the same one."""
