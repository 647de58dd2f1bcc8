"""From a plan document to what a training process computes with: plugins, spec, objective and channels.

`rebuild` is all of it, for the processes that a trainer starts by itself, such as Ray's actors: rows come to them from
the worker, so they have no pairs to draw from and no teachers to ask. The worker takes the same steps one by one, with
its own in between, and feeds the channels (`feeding.py`, `scoring.py`). Plans are made and checked in `spec/plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_core.loss.channel import TakesRegistry
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.protocols import Need, Objective
from composer_core.spec.model import Plugged, RunSpec
from composer_core.spec.plan import Plan, restore


@dataclass(frozen=True)
class Rebuilt:
    """What a plan means in this process. It may hold secrets: never write it anywhere."""

    spec: RunSpec
    plan: Plan
    registry: Registry
    loss: CompositeLoss

    @property
    def objective(self) -> Objective | None:
        """None where the spec has none."""
        return self.loss.objective


def rebuild(document: Any) -> Rebuilt:
    """All that a plan says about the loss, as this process has it installed.

    The loss can `count`, `batches`, `policy` and `channels`, and has its state. Preparing rows of rollouts and drawing
    pairs is the worker's.

    Args:
        document: what plan.json holds.

    Raises:
        UsageError: not a plan, or one of a local plugin file that has changed.
        MissingError: a plugin is not installed here, or in another version than the plan was made with; an environment
            variable is not set.
    """
    spec, plan, registry = restored(document)
    return Rebuilt(spec, plan, registry, composite(spec, plan, registry))


def restored(document: Any) -> tuple[RunSpec, Plan, Registry]:
    """Spec and plan against the plugins of this process; see `spec.plan.restore` for what is refused."""
    registry = Registry.discover()
    spec, plan = restore(document, registry)
    return spec, plan, registry


def build(registry: Registry, block: Plugged) -> Any:
    """The object that runs, from a `use:` block.

    Raises:
        MissingError: it cannot be imported.
    """
    _, contribution = registry.get(block.kind, block.use)
    return contribution.load()(block.settings)


def composite(spec: RunSpec, plan: Plan, registry: Registry) -> CompositeLoss:
    """The objective and the channels of a spec, each the way the plan chose; those that look up plugins can.

    Raises:
        MissingError: one of them cannot be imported.
    """
    objective: Objective | None = None if spec.loss.objective is None else build(registry, spec.loss.objective)
    needs = {channel.name: frozenset(Need(need) for need in channel.needs) for channel in plan.channels}
    channels = [
        ActiveChannel(block.name, block.weight, build(registry, block), needs.get(block.name, frozenset()))
        for block in spec.loss.channels
    ]
    loss = CompositeLoss(channels, objective)
    for active in loss.active:
        if isinstance(active.channel, TakesRegistry):
            active.channel.take_registry(registry)
    return loss
