"""TRL once more, with the policy's log-probs from the core's output head, as the backend runs it on a CPU."""

from __future__ import annotations

from join_trl import Trl
from parity_table import Case

CONCERNED = (
    "plain", "padded-to-a-multiple", "eight-micro-batches", "dapo-without-truncated", "untied", "soft-capped",
    "logit-scale", "unknown-model-type", "teacher-ema-checkpointing", "lora-trained", "hot", "capped-ratios", "sapo",
    "vespo", "core-gmpo", "core-lm-ce", "kl-in-the-loss", "bf16-weights", "bf16-autocast",
)  # fmt: skip


class OwnHead(Trl):
    """See the module."""

    def refuses(self, case: Case) -> str | None:
        """What does not touch the head is as in `join_trl.py`."""
        return None if case.id in CONCERNED else "nothing that the head is concerned with"


joiner = OwnHead(own_head=True)
