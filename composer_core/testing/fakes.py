"""Fake channels: real code paths, useless losses. Public, for the tests of backends and plugins; never for training.

`Brevity` uses the policy through log-probs only and has no rows; `HintFake` has rows, a teacher context and a
divergence. Between them they exercise every hop from rollout to gradient. No plugin of the core contributes them;
`plugin` here is one that does, for a test's own registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import Field

from composer_core.batch import Batch, Hints, Rollouts, Seqs
from composer_core.divergences import Divergence, DivergenceKind
from composer_core.errors import RunFailed
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum, select
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import NoSettings, Settings
from composer_core.protocols import Need, PolicyView, RolloutText, Row, Term


class HintFakeSettings(Settings):
    """The made-up hint and the divergence."""

    hint: list[int] = Field([3, 4, 5], min_length=1)
    """Token ids put between prompt and completion in the teacher's context."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Teacher's share of the mixture."""
    below: float = 1.0
    """Only rollouts with a smaller reward get a hint."""


class Brevity(ChannelDefaults):
    """Makes every sampled token less likely: the sum of the actions' log-probs. Needs `Need.LOGPS`."""

    def __init__(self, settings: NoSettings | None = None) -> None:
        pass

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """Sum of action log-probs, divided by `tokens`."""
        if batch.rollouts is None:
            raise RunFailed("the fake channel 'brevity' needs rollouts")
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term(sum=masked_sum(logps, batch.rollouts.action), count="tokens")


class HintFake(ChannelDefaults):
    """Self-distillation on a hint that says nothing. Needs `Need.DIVERGENCE_FULL`."""

    def __init__(self, settings: HintFakeSettings | None = None) -> None:
        self._settings = settings or HintFakeSettings()
        self._spec = Divergence(kind=DivergenceKind.JSD, beta=self._settings.beta)

    def prepare(self, rollout: RolloutText) -> Row | None:
        """Prompt, completion and the completion's action positions; None for a good or an empty rollout."""
        actions = [position for position, action in enumerate(rollout.action) if action]
        good = rollout.reward is not None and rollout.reward >= self._settings.below
        if good or not actions or not rollout.prompt_ids:
            return None
        return {"prompt": list(rollout.prompt_ids), "completion": list(rollout.completion_ids), "actions": actions}

    def count(self, row: Row | None) -> Mapping[str, float]:
        """`tokens`: hinted tokens."""
        return {"tokens": float(len(_ints(row, "actions")))}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints:
        """The teacher reads prompt + hint + completion; a rollout without a row is one token of filler."""
        if rollouts is None:
            raise RunFailed("the fake channel 'hint-fake' needs rollouts")
        starts = rollouts.seqs.cu.tolist()
        sequences: list[list[int]] = []
        student, teacher, weight = [], [], []
        offset = 0
        for row, start in zip(rows, starts[:-1], strict=True):
            prompt, actions = _ints(row, "prompt"), _ints(row, "actions")
            context = prompt + self._settings.hint
            sequence = context + _ints(row, "completion") if row is not None else [int(rollouts.seqs.ids[start])]
            student += [start + len(prompt) + position for position in actions] or [start]
            teacher += [offset + len(context) + position for position in actions] or [offset]
            weight += [1.0] * len(actions) or [0.0]
            sequences.append(sequence)
            offset += len(sequence)
        device = rollouts.seqs.ids.device
        return Hints(
            seqs=Seqs.from_lists(sequences, device=device),
            student=torch.tensor(student, dtype=torch.int64, device=device),
            teacher=torch.tensor(teacher, dtype=torch.int64, device=device),
            weight=torch.tensor(weight, device=device),
        )

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """The one it asks for."""
        return (self._spec,)

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """Weighted sum of the divergence, divided by its own `tokens`."""
        if batch.hints is None:
            raise RunFailed("the fake channel 'hint-fake' got no hints: the backend did not collate its rows")
        values = select(view.divergence(batch.hints, self._spec), batch.hints.weight != 0)
        return Term(sum=(values * batch.hints.weight).sum(), count="tokens")


def _ints(row: Row | None, key: str) -> list[int]:
    value = [] if row is None else row[key]
    if not isinstance(value, list):
        raise RunFailed(f"a row of the fake channel 'hint-fake' has no list {key!r}")
    return [int(item) for item in value]


class plugin:
    """`registry.add(fakes.plugin, owner)` offers both fakes."""

    @staticmethod
    @hookimpl
    def composer_loss_channels() -> Iterable[LossChannelPlugin]:
        """`brevity` and `hint-fake`."""
        yield LossChannelPlugin(
            name="brevity",
            summary="Fake: makes every sampled token less likely",
            target="composer_core.testing.fakes:Brevity",
            needs=lambda settings: (frozenset({Need.LOGPS}),),
        )
        yield LossChannelPlugin(
            name="hint-fake",
            summary="Fake: self-distillation on a hint that says nothing",
            target="composer_core.testing.fakes:HintFake",
            settings=HintFakeSettings,
            needs=lambda settings: (frozenset({Need.DIVERGENCE_FULL}),),
        )
