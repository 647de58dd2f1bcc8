"""The core's own way from rollouts to gradients joins the table: `testing/accumulate.py`, as in the toy trainer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from parity_reference import build, fixed
from parity_table import LONGEST, REWARDS, Case, Step, composite, rollout

from composer_core.batch import Batch
from composer_core.testing.accumulate import Window, accumulate_gradients


class Accumulate:
    """See the module."""

    def refuses(self, case: Case) -> str | None:
        """It has one reference, which never moves, and no autocast."""
        if (case.sdpo or {}).get("teacher") == "self-ema":
            return "no average of the policy"
        if case.dtype == "autocast":
            return "no autocast"
        return None

    def run(self, case: Case, folder: Path, scratch: Path) -> Sequence[Step]:
        """Plain gradient descent around `accumulate_gradients`; micro-batches as they come."""
        loss, policy = composite(case), build(case, folder).train()
        start = copy.deepcopy(policy).requires_grad_(False)
        if case.checkpointing:
            policy.gradient_checkpointing_enable()
        rollouts = fixed(case, folder, loss.objective)
        own = {a.name: [a.channel.prepare(rollout(i, case)) for i in range(len(REWARDS))] for a in loss.active}
        size, steps = case.micro_batch, []
        splits = [range(first, first + size) for first in range(0, len(REWARDS), size)]
        for step in range(1, case.steps + 1):
            policy.zero_grad(set_to_none=True)
            window = Window(rollouts, {**own, **loss.draw(step, 0, 1)}, splits, LONGEST)
            base = Batch(step=step, total_steps=case.steps, temperature=case.temperature)
            metrics = accumulate_gradients(policy, loss, window, base=base, reference=start)
            gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
            steps.append(Step({name: value for name, value in metrics.items() if "loss/" in name}, gradients))
            loss.on_step_end(step, metrics)
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.grad is not None:
                        parameter -= case.rate * parameter.grad
        return steps


joiner = Accumulate()
