"""The policy's log-probs from the core's output head, on devices that TRL has no kernel of its own for.

There TRL's head makes a dozen tensors of tokens x 32,768 numbers in every pass and projects again in the backward; the
core's works through a few buffers that it keeps. The numbers are the same but for rounding, so this is for runs with
the core's losses only: any other run stays bit-equal to TRL. Letters: B rows, C width of completions, T of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from composer_core.loss.fused_logps import fused_logps
from composer_core.loss.head import Head
from composer_trl.micro_batch import Forward

_WITH_KERNEL = frozenset({"cuda", "xpu"})


def is_faster(ids: Tensor) -> bool:
    """Whether the core's head is, where these ids are."""
    return ids.device.type not in _WITH_KERNEL


def is_enough(asked: Mapping[str, Any]) -> bool:
    """Whether log-probs and entropies without gradient are all that a call of TRL's with these arguments wants."""
    return all(value is None or value is False for name, value in asked.items() if name != "compute_entropy")


def score(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    width: int,
    *,
    forward: Forward,
    head: Head,
    temperature: float,
    autocast: Callable[[], AbstractContextManager[None]],
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the last `width` tokens of each row, (B, C) each, 0 where the mask is.

    Args:
        model: as the trainer calls it: the forward of a wrapper must run, or its gradients are not averaged.
        ids: (B, T)
        mask: (B, T)
        width: C
        forward: listens to the model.
        head: the model's.
        temperature: logits are divided by it.
        autocast: entered around the model.
    """
    with autocast():  # TRL's head would project every token, also those without a label
        model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    assert forward.states is not None
    scored = mask[:, -width:].bool()
    logps, entropies = fused_logps(
        forward.states[:, :-1][:, -width:][scored],
        head.weight,
        ids[:, -width:][scored],
        temperature=temperature,
        bias=head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        entropy=True,
    )
    assert entropies is not None
    zeros = logps.new_zeros(scored.shape)
    return zeros.masked_scatter(scored, logps), zeros.masked_scatter(scored, entropies)
