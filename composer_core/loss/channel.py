"""Defaults for loss channels: inherit `ChannelDefaults`, write `loss`, and it is a whole channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from composer_core.batch import Hints, Pairs, Rollouts
from composer_core.divergences import Divergence
from composer_core.loss.teachers import SelfTeacher
from composer_core.protocols import Need, RolloutText, Row, ScoreRequest

if TYPE_CHECKING:
    from collections import Counter

    from composer_core.plugins.registry import Registry
    from composer_core.traces.chat_template import TokenizerLike
    from composer_core.traces.recorded import TraceRow, TraceRows


class ChannelDefaults:
    """A channel that needs nothing beyond the rollouts themselves.

    Example::

        class Brevity(ChannelDefaults):
            def __init__(self, settings): ...

            def loss(self, view, batch):
                seqs, action = batch.rollouts.seqs, batch.rollouts.action
                logps = view.logps(seqs, grad=True, temperature=batch.temperature)
                return Term(sum=masked_sum(logps, action), count="tokens")
    """

    rows_per_step: int = 0
    """0: rows come from rollouts, by `prepare`. Else the channel has rows of its own, so many in one optimiser step
    over all ranks, and `draw` gives them."""
    teacher: SelfTeacher | None = None
    """Which weights it means by the model "teacher"; None: it asks for none."""

    def planned(self, needs: frozenset[Need]) -> None:
        """Which of its alternatives the plan chose, told once before the first step. Nothing to choose here."""

    def prepare(self, rollout: RolloutText) -> Row | None:
        """An empty row: active on every rollout. None would report the channel as idle."""
        return {}

    def draw(self, step: int, rank: int, world: int) -> Sequence[Row]:
        """Own rows of a step for this rank, the same whenever they are asked for; none here."""
        return []

    def count(self, row: Row | None) -> Mapping[str, float]:
        """Nothing of its own: `loss` names a count of the backend, such as `tokens`."""
        return {}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints | Pairs | Mapping[str, Tensor]:
        """No tensors beside the rollouts."""
        return {}

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """None."""
        return ()


@runtime_checkable
class Draws(Protocol):
    """A channel with rows of its own, beside those of the rollouts."""

    rows_per_step: int

    def draw(self, step: int, rank: int, world: int) -> Sequence[Row]:
        """See `ChannelDefaults.draw`."""
        ...


@runtime_checkable
class Planned(Protocol):
    """A channel with several ways of computing its loss."""

    def planned(self, needs: frozenset[Need]) -> None:
        """See `ChannelDefaults.planned`."""
        ...


@runtime_checkable
class TakesPairs(Protocol):
    """A channel that learns from the run's preference pairs."""

    def take_pairs(self, rows: Sequence[Row]) -> None:
        """All of them as rows (`channels/rows.py`, `pair_row`), once, in the same order on every rank."""
        ...


@runtime_checkable
class HintsTraces(Protocol):
    """A channel that hints recorded traces where they are read: only there their turns and error sites are known."""

    def trace_rows(self, tokenizer: TokenizerLike, *, skipped: Counter[str]) -> TraceRows:
        """What tokenises the traces and makes its rows; `skipped` receives what is left out, with how many.

        Raises:
            UsageError: its settings do not fit recorded traces or this tokenizer.
        """
        ...

    def of_trace(self, row: TraceRow) -> Row | None:
        """Its own row in one that this made, in place of `prepare`."""
        ...


@runtime_checkable
class PreparesAll(Protocol):
    """A channel that has to ask somebody else about rollouts, and asks about several at once."""

    def prepare_all(self, rollouts: Sequence[RolloutText]) -> Sequence[Row | None]:
        """`prepare` of each."""
        ...


class Scorer(Protocol):
    """A named teacher that reads texts."""

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Sequence[float] | None]:
        """For each text the log-probs that were asked for, None where there are none; why is the scorer's to say."""
        ...


@runtime_checkable
class TakesScorers(Protocol):
    """A channel that learns from named teachers' log-probs (`LossChannelPlugin.teachers`)."""

    def take_scorers(self, scorers: Mapping[str, Scorer]) -> None:
        """Those it named, by name; once, before the first rollout."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A channel that cannot use everything, and counts what it left out."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Reason -> how often, since it was made."""
        ...


@runtime_checkable
class TakesRegistry(Protocol):
    """A channel that looks up other plugins' contributions, such as hint templates."""

    def take_registry(self, registry: Registry) -> None:
        """Those of the run, local plugin files included; once."""
        ...
