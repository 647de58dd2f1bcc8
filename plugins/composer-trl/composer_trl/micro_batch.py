"""TRL's padded micro-batch as the core's packed one, and TRL's forward of it as a view of the policy.

TRL pads prompts on the left and completions on the right, so the tokens of a row lie together and begin at a column of
their own. Nothing here knows of steps, windows or channels. Letters: B rows, P and C the widths of prompts and
completions, N tokens packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from composer_core.batch import Rollouts, Seqs
from composer_core.errors import RunFailed
from composer_core.loss.heads import take_apart
from composer_core.loss.outputs import Outputs
from composer_core.loss.teachers import Teacher
from composer_core.loss.views import KnownForward, ModelView
from composer_core.protocols import RolloutText

REWARD, GROUP, UID = "composer_reward", "composer_group", "composer_uid"
"""Keys that we add to TRL's batch, one entry per row; they ride through its shuffle and split."""


def sampled(inputs: Mapping[str, Any]) -> Tensor:
    """(B, C) bool: completion tokens that the policy sampled, without padding and tool output."""
    mask: Tensor = inputs["completion_mask"]
    return (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()


def ids_and_mask(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(B, P+C) ids and attention mask, as TRL's forward reads them."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


def packed(per_completion_token: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """(B, C) values of completion tokens as (N,) values of all tokens, 0 in the prompts."""
    prompt = per_completion_token.new_zeros(inputs["prompt_mask"].shape)
    _, mask = ids_and_mask(inputs)
    return torch.cat([prompt, per_completion_token], dim=1)[mask.bool()]


def rollouts_of(inputs: Mapping[str, Any]) -> Rollouts:
    """A micro-batch of TRL's as rollouts; its log-probs are looked at where tokens were sampled only."""
    action = packed(sampled(inputs), inputs)
    seqs = replace(Seqs.from_padded(*ids_and_mask(inputs)), scored=action)
    advantages: Tensor = inputs["advantages"]

    def tokens(key: str) -> Tensor | None:
        return packed(inputs[key], inputs) if inputs.get(key) is not None else None

    return Rollouts(
        seqs=seqs,
        action=action,
        advantages=advantages[seqs.owner] if advantages.dim() == 1 else packed(advantages, inputs),
        old_logps=tokens("old_per_token_logps"),
        sampler_logps=tokens("sampling_per_token_logps"),
        ref_logps=tokens("ref_per_token_logps"),
        rewards=inputs[REWARD],
        group=inputs[GROUP],
        uid=tuple(inputs[UID]),
    )


def texts_of(
    batch: Mapping[str, Any], columns: Iterable[Mapping[str, Any]], *, tokenizer: Any
) -> Iterator[RolloutText]:
    """A generation's rollouts as `prepare` sees them; `columns` has the data row of each.

    A truncated completion that the trainer leaves out (`mask_truncated_completions`) has no tokens here either: the
    policy's forward does not see them.
    """
    # lists of all rows at once: taken row by row, each would wait for the device
    read, kept, action = batch["prompt_mask"].tolist(), batch["completion_mask"].tolist(), sampled(batch).tolist()
    prompts, completions, rewards = (batch[key].tolist() for key in ("prompt_ids", "completion_ids", REWARD))
    for i, row in enumerate(columns):
        yield RolloutText(
            uid=batch[UID][i],
            prompt_ids=list(compress(prompts[i], read[i])),
            completion_ids=list(compress(completions[i], kept[i])),
            action=list(compress(action[i], kept[i])),
            reward=None if math.isnan(rewards[i]) else rewards[i],
            columns=row,
            tokenizer=tokenizer,
        )


@dataclass
class Forward:
    """What TRL's own forward of the policy gave, with its graph."""

    states: Tensor | None = None
    """(B, P+C, H) last hidden states; None for a model type whose head is not known."""
    logps: Tensor | None = None
    """(B, C) at the trainer's temperature."""


@contextmanager
def listen(policy: nn.Module) -> Iterator[Forward]:
    """Keep the hidden states of the policy's forward inside, so that no loss needs one of its own."""
    forward = Forward()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            forward.states = output.last_hidden_state

    parts = take_apart(policy)
    if parts is None:
        yield forward
        return
    handle = parts.backbone.register_forward_hook(keep)
    try:
        yield forward
    finally:
        handle.remove()


def view_of(
    policy: nn.Module,
    inputs: Mapping[str, Any],
    forward: Forward,
    *,
    seqs: Seqs,
    temperature: float,
    teacher: Teacher | None,
    reference: Teacher | None,
    pad_id: int,
    autocast: Callable[[], AbstractContextManager[None]],
) -> ModelView:
    """The policy as losses see it; its forward on `seqs`, the rollouts of `inputs`, is the one that TRL ran."""
    known = None
    parts = take_apart(policy)
    if parts is not None:
        if forward.states is None or forward.logps is None:
            raise RunFailed("trl computed its loss without a forward of the model that could be listened to")
        _, mask = ids_and_mask(inputs)
        # the first token that is attended to: prompts are padded on the left
        outputs = Outputs(seqs, forward.states, parts.head, start=mask.int().argmax(dim=1))
        logps = packed(forward.logps, inputs)
        known = KnownForward(outputs, torch.where(packed(sampled(inputs), inputs), logps, 0), temperature)
    return ModelView(
        policy,
        rollouts=seqs,
        teacher=teacher,
        reference=reference,
        pad_id=pad_id,
        known=known,
        around_forward=autocast,
    )
