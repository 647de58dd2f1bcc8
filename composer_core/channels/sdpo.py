"""Channel `sdpo`: self-distillation. The policy with a hint teaches the policy without it (2601.20802).

`prepare` finds hints (`channels/hinting.py`) and gives the row that `channels/rows.py` describes. Here are `collate`
and `loss`; the divergence itself is the view's. With a teacher of another model, which scores (`ScoredSdpo`), the row
also holds its log-probs. To add a kind of hint, contribute a hint template; another loss on
hints is another channel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_core.batch import Batch, Hints, Rollouts, Seqs
from composer_core.channels.hinting import Hinting
from composer_core.channels.rows import floats, ints
from composer_core.channels.scoring import scored_rows
from composer_core.channels.settings import NEED_OF, SdpoSettings, Way, ways
from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.errors import RunFailed
from composer_core.loss.channel import ChannelDefaults, Scorer
from composer_core.loss.clip import bounded
from composer_core.loss.distributions import LOGP_FLOOR, sampled_kl
from composer_core.loss.reduce import select
from composer_core.loss.taid_schedule import TAIDScheduler
from composer_core.loss.teachers import SelfTeacher
from composer_core.plugins.registry import Registry
from composer_core.protocols import Model, Need, PolicyView, RolloutText, Row, Term

if TYPE_CHECKING:
    from composer_core.traces.chat_template import TokenizerLike
    from composer_core.traces.recorded import TraceRow, TraceRows

FILLER_ID = 0
"""Token that the teacher reads where a micro-batch has no hint; every vocabulary has it."""
TOPK = {"student": Support.TOPK_STUDENT, "teacher": Support.TOPK_TEACHER, "union": Support.TOPK_UNION}


class Sdpo(ChannelDefaults):
    """See the module."""

    def __init__(self, settings: SdpoSettings | None = None) -> None:
        self.settings = settings or SdpoSettings()
        self.hinting = Hinting(self.settings.hints, success=self.settings.success)
        self.teacher = _teacher(self.settings)
        live = self.teacher is not None and self.teacher.weights == "live"
        self._model: Model = "policy" if live else "teacher"
        self._way: Way = ways(self.settings)[0]

    def planned(self, needs: frozenset[Need]) -> None:
        """Take the best way whose need the plan has granted."""
        self._way = next(way for way in ways(self.settings) if NEED_OF[way] in needs)

    @property
    def skipped(self) -> Mapping[str, int]:
        """See `loss.channel.LeavesOut`."""
        return self.hinting.skipped

    def take_registry(self, registry: Registry) -> None:
        """Hint templates of the run's plugins."""
        self.hinting = Hinting(self.settings.hints, success=self.settings.success, registry=registry)

    def prepare(self, rollout: RolloutText) -> Row | None:
        """The hinted sites of a rollout; None where it did well (with `on: failed`), or nothing is known to say.

        A rollout without a reward has not failed.
        """
        failed = rollout.reward is not None and rollout.reward < self.settings.success
        if self.settings.on == "failed" and not failed:
            return None
        return self.hinting.row(rollout)

    def trace_rows(self, tokenizer: TokenizerLike, *, skipped: Counter[str]) -> TraceRows:
        """See `loss.channel.HintsTraces`."""
        return self.hinting.trace_rows(tokenizer, skipped=skipped)

    def of_trace(self, row: TraceRow) -> Row | None:
        """The hinted sites of a recorded trace; with `on: failed` none of one whose reward says that it succeeded.

        Few recorded traces have a reward: their errors are what failed.
        """
        succeeded = row["reward"] is not None and row["reward"] >= self.settings.success
        return None if self.settings.on == "failed" and succeeded else row["sdpo"]

    def count(self, row: Row | None) -> Mapping[str, float]:
        """`tokens`: hinted ones."""
        return {"tokens": 0.0 if row is None else float(len(ints(row, "student")))}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints:
        """All segments of all rows; one token of filler, of weight 0, where there is none.

        Raises:
            RunFailed: there are no rollouts.
        """
        if rollouts is None:
            raise RunFailed("channel 'sdpo' needs rollouts: hints point at their tokens")
        sequences: list[list[int]] = []
        student: list[int] = []
        teacher: list[int] = []
        weight: list[float] = []
        read = 0
        for row, start in zip(rows, rollouts.seqs.cu.tolist()[:-1], strict=True):
            if row is None:
                continue
            student += [start + index for index in ints(row, "student")]
            teacher += [read + index for index in ints(row, "teacher")]
            weight += floats(row, "weight")
            sequences += _unpacked(row)
            read += len(ints(row, "teacher_ids"))
        if not sequences:
            sequences = [[FILLER_ID]]
            if rollouts.seqs.ids.numel():
                student, teacher, weight = [0], [0], [0.0]
        device = rollouts.seqs.ids.device
        return Hints(
            seqs=Seqs.from_lists(sequences, device=device),
            student=torch.tensor(student, dtype=torch.int64, device=device),
            teacher=torch.tensor(teacher, dtype=torch.int64, device=device),
            weight=torch.tensor(weight, device=device),
        )

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """The one it learns from, and where that does not say it the sampled one, for `hint_gain`."""
        spec, gap = self._spec(), _gap(self.settings.temperature)
        return (spec, gap) if self.settings.hint_gain and spec != gap else (spec,)

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """Sum over hinted tokens of weight x capped importance ratio x divergence, for `tokens`.

        Raises:
            RunFailed: the backend did not collate its rows.
        """
        hints, rollouts = batch.hints, batch.rollouts
        if hints is None or rollouts is None:
            raise RunFailed("channel 'sdpo' got no hints: the backend did not collate its rows")
        real, metrics = hints.weight != 0, {}
        if self.settings.is_clip is not None and rollouts.old_logps is not None:
            ratio = self._ratio(view, batch, hints, old_logps=rollouts.old_logps)
            metrics["is_clipped"] = ((ratio > self.settings.is_clip) & real).sum()
            # into the hints, not onto the values: a view may form gradients in its forward, for these weights
            hints = replace(hints, weight=hints.weight * ratio.clamp(max=self.settings.is_clip))
        values = select(self._divergence(view, rollouts, hints), real)
        if self.settings.hint_gain:
            metrics["hint_gain"] = self._gain(view, hints, values).sum()
        return Term((values * hints.weight).sum(), "tokens", metrics)

    # -- its parts ---------------------------------------------------------------------------------------------------

    def _divergence(self, view: PolicyView, rollouts: Rollouts, hints: Hints) -> Tensor:
        """Of each hinted token, (K,)."""
        return view.divergence(hints, self._spec(), teacher=self._model)

    def _spec(self) -> Divergence:
        settings = self.settings
        topk = self._way == "topk"
        gate: SoftGate | PaperGate | None = None
        if settings.gate is not None:
            numbers = settings.gate.model_dump(exclude={"use"})
            gate = SoftGate(**numbers) if settings.gate.use == "soft" else PaperGate(**numbers)
        return Divergence(
            # a gate mixes the other direction in by itself
            kind=DivergenceKind.KL_STUDENT_TEACHER if gate else DivergenceKind(settings.divergence),
            beta=settings.beta,
            temperature=settings.temperature,
            support=TOPK[settings.side] if topk else Support(self._way),
            k=settings.k if topk else None,
            tail=settings.tail if topk else True,
            clip=settings.token_clip,
            taid=self._taid(),
            gate=gate,
        )

    def _taid(self) -> float | None:
        return None

    def _ratio(self, view: PolicyView, batch: Batch, hints: Hints, *, old_logps: Tensor) -> Tensor:
        """Importance ratio of each hinted token, (K,), detached; 1 for filler."""
        assert batch.rollouts is not None
        now = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature).detach()
        # select before exp: what the filler points at may have any ratio
        gap = select((now - old_logps)[hints.student], hints.weight != 0)
        return bounded(gap).exp()

    def _gain(self, view: PolicyView, hints: Hints, values: Tensor) -> Tensor:
        """By how much the hint raises the log-prob of each token it should teach, (K,), detached."""
        gap = _gap(self.settings.temperature)
        if self._spec() == gap:
            return -values.detach()
        # the same hints at the same temperature: a view that sees whole vocabularies has these numbers already
        with torch.no_grad():
            return -select(view.divergence(hints, gap, teacher=self._model), hints.weight != 0)


class TaidSdpo(Sdpo):
    """With TAID's target, whose t is state: it moves after each optimiser step and belongs in a checkpoint."""

    def __init__(self, settings: SdpoSettings) -> None:
        super().__init__(settings)
        assert settings.target is not None
        self._target = settings.target
        # made at the first batch, which knows how long the run is; a checkpoint may come before that
        self._scheduler: TAIDScheduler | None = None
        self._saved: dict[str, Any] = {}

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """See `Sdpo.loss`; also logs `t`."""
        if self._scheduler is None:
            self._scheduler = self._new_scheduler(batch.total_steps)
        term = super().loss(view, batch)
        assert batch.hints is not None
        tokens = (batch.hints.weight != 0).sum()
        return Term(term.sum, term.count, {**term.metrics, "t": self._scheduler.t * tokens})

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move t, by this channel's `loss`; a step without a hint has none to go by.

        Raises:
            RunFailed: the metrics hold no loss of this channel.
        """
        if self._scheduler is None:
            return
        if "loss" not in metrics:
            raise RunFailed("channel 'sdpo': the step's metrics hold no loss of it, and TAID's target goes by that")
        idle = metrics.get("active") == 0
        self._scheduler.update_t(float("nan") if idle else metrics["loss"], step)

    def state_dict(self) -> Mapping[str, Any]:
        """The schedule's numbers; none before the first batch."""
        return self._saved if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._saved, self._scheduler = dict(state), None

    def _taid(self) -> float:
        if self._scheduler is not None:
            return self._scheduler.t
        return float(self._saved.get("t", self._target.start))

    def _new_scheduler(self, total_steps: int) -> TAIDScheduler:
        scheduler = TAIDScheduler(
            self._target.steps or total_steps,
            t_start=self._target.start,
            t_end=self._target.end,
            alpha=self._target.alpha,
            beta=self._target.momentum,
            disable_adaptive=not self._target.adaptive,
        )
        if self._saved:
            scheduler.load_state_dict(self._saved)
        return scheduler


class ScoredSdpo(Sdpo):
    """With a named teacher, whose server reads the hinted texts where rollouts end. Here only the student reads.

    The teacher must have the policy's tokenizer: token ids are sent, and their log-probs come back. Who hands the
    scorer over checks that (`run/scoring.py`). A rollout that it did not score whole has no row.
    """

    def __init__(self, settings: SdpoSettings, teacher: str) -> None:
        super().__init__(settings)
        self._name = teacher
        self._scorer: Scorer | None = None

    def take_scorers(self, scorers: Mapping[str, Scorer]) -> None:
        """See `loss.channel.TakesScorers`."""
        self._scorer = scorers[self._name]

    def prepare(self, rollout: RolloutText) -> Row | None:
        """See `Sdpo.prepare`; with `teacher_logps`."""
        return self.prepare_all([rollout])[0]

    def prepare_all(self, rollouts: Sequence[RolloutText]) -> list[Row | None]:
        """All questions of all rollouts are under way together."""
        return self._scored(list(map(super().prepare, rollouts)), [rollout.uid for rollout in rollouts])

    def of_trace(self, row: TraceRow) -> Row | None:
        """See `Sdpo.of_trace`; with `teacher_logps`."""
        return self._scored([super().of_trace(row)], [row["uid"]])[0]

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints:
        """See `Sdpo.collate`; with the teacher's log-probs."""
        hints = super().collate(rows, rollouts)
        logps = [logp for row in rows if row is not None for logp in floats(row, "teacher_logps")]
        filled = logps or [0.0] * len(hints.student)
        return replace(hints, teacher_logps=torch.tensor(filled, device=hints.weight.device))

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """None: log-probs of the rollouts are enough."""
        return ()

    def _divergence(self, view: PolicyView, rollouts: Rollouts, hints: Hints) -> Tensor:
        """KL(student || teacher) of each hinted token, estimated from the token alone."""
        assert hints.teacher_logps is not None
        own = view.logps(rollouts.seqs, grad=True, temperature=1.0)[hints.student]
        return sampled_kl(own, hints.teacher_logps.clamp(min=LOGP_FLOOR))

    def _gain(self, view: PolicyView, hints: Hints, values: Tensor) -> Tensor:
        return -values.detach()

    def _scored(self, rows: Sequence[Row | None], uids: Sequence[str]) -> list[Row | None]:
        if self._scorer is None:
            raise RunFailed(f"channel 'sdpo' learns from teacher {self._name!r}, and nobody handed it over")
        return scored_rows(rows, uids, self._scorer)


def sdpo(settings: SdpoSettings | None = None) -> Sdpo:
    """The channel for a spec's block."""
    chosen = settings or SdpoSettings()
    if chosen.named_teacher is not None:
        return ScoredSdpo(chosen, chosen.named_teacher)
    return TaidSdpo(chosen) if chosen.target is not None else Sdpo(chosen)


def _gap(temperature: float) -> Divergence:
    """Its values are log q - log p of the hinted tokens."""
    return Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=temperature, support=Support.SAMPLED)


def _teacher(settings: SdpoSettings) -> SelfTeacher | None:
    if settings.named_teacher is not None:
        return None
    if settings.teacher == "self-ema":
        return SelfTeacher("ema", settings.ema_rate)
    return SelfTeacher("live" if settings.teacher == "self-live" else "frozen")


def _unpacked(row: Row) -> list[list[int]]:
    ids, sequences, start = ints(row, "teacher_ids"), [], 0
    for length in ints(row, "teacher_lengths"):
        sequences.append(ids[start : start + length])
        start += length
    return sequences
