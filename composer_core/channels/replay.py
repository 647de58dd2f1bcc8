"""Channel `replay`: preference pairs from recorded sessions, where teachers agreed against the agent.

Its rows are no rollout's: they come from the run's pair file, which the backend reads once and hands over with
`take_pairs`; at each step `draw` gives every rank its share, by step alone, so that a resumed run goes on where it was.
The loss forms are in `loss/preference.py`, the row in `channels/rows.py` (`pair_row`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from composer_core.batch import Batch, Pairs, Rollouts, Seqs
from composer_core.channels.rows import ints
from composer_core.channels.settings import ReplaySettings
from composer_core.errors import RunFailed, UsageError
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.preference import FORMS, PairLogps, answer_logps
from composer_core.loss.reduce import select
from composer_core.loss.watch import Joins
from composer_core.protocols import Model, PolicyView, RolloutText, Row, Term

FILLER_ID = 0
"""Token of a pair that stands in where a micro-batch has none; every vocabulary has it."""
TEMPERATURE = 1.0
"""Pairs are not samples of this policy at its temperature: their log-probs are the model's own."""
logger = logging.getLogger(__name__)


class Replay(ChannelDefaults):
    """See the module."""

    def __init__(self, settings: ReplaySettings | None = None) -> None:
        self.settings = settings or ReplaySettings()
        self.rows_per_step = self.settings.pairs_per_step
        self._loss = partial(FORMS[self.settings.variant], **self.settings.numbers)
        self._pairs: list[Row] = []

    def take_pairs(self, rows: Sequence[Row]) -> None:
        """The run's pairs, once, before the first step and in the same order on every rank.

        Pairs with an empty or too long side are left out, and the log says how many.

        Raises:
            UsageError: none is left, or reference log-probs are to come from the file and are not in it.
        """
        self._pairs = [row for row in rows if self._fits(row)]
        left_out = len(rows) - len(self._pairs)
        if not self._pairs:
            raise UsageError(
                f"none of the {len(rows)} pairs has two answers of at most {self.settings.max_tokens} tokens",
                at="data.pairs",
                fix="raise max_tokens of the channel replay, or make pairs",
            )
        if left_out:
            logger.warning("replay: %d of %d pairs have an empty or too long side, left out", left_out, len(rows))
        if self._reads_stored and any("ref_chosen" not in row or "ref_rejected" not in row for row in self._pairs):
            raise UsageError(
                f"{self.settings.variant} compares with a reference, and some pairs have no reference log-probs",
                at="data.pairs",
                fix="set reference: model in the channel replay, or a variant without one (simpo, orpo, imitate)",
            )

    def prepare(self, rollout: RolloutText) -> Row | None:
        """Nothing: rollouts are not pairs."""
        return None

    def draw(self, step: int, rank: int, world: int) -> Sequence[Row]:
        """Every world-th of this step's pairs; each pair comes once per round, in an order of its own each time.

        Raises:
            RunFailed: there are no pairs.
        """
        total = len(self._pairs)
        if not total:
            raise RunFailed("channel 'replay' has no pairs to draw from", fix="data.pairs: {path: pairs.jsonl}")
        first = step * self.rows_per_step
        places = [divmod(index, total) for index in range(first + rank, first + self.rows_per_step, world)]
        orders = {round_: self._order(round_) for round_ in {round_ for round_, _ in places}}
        return [self._pairs[orders[round_][index]] for round_, index in places]

    def count(self, row: Row | None) -> Mapping[str, float]:
        """`pairs`, and `tokens` of their answers."""
        if row is None:
            return {"pairs": 0.0, "tokens": 0.0}
        return {"pairs": 1.0, "tokens": float(len(ints(row, "chosen")) + len(ints(row, "rejected")))}

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Pairs:
        """The pairs among the rows; one of filler where there is none."""
        device = rollouts.seqs.ids.device if rollouts is not None else torch.device("cpu")
        real = [row for row in rows if row is not None]
        chosen, chosen_action = _side(real, "chosen", device)
        rejected, rejected_action = _side(real, "rejected", device)
        return Pairs(
            chosen=chosen,
            rejected=rejected,
            chosen_action=chosen_action,
            rejected_action=rejected_action,
            weight=torch.tensor([1.0] * len(real) or [0.0], device=device),
            ref_chosen=self._stored(real, "ref_chosen", device),
            ref_rejected=self._stored(real, "ref_rejected", device),
        )

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """Weighted sum of the variant's loss over pairs; its margin and how often the chosen answer wins.

        Raises:
            RunFailed: the backend did not collate its rows.
        """
        if batch.pairs is None:
            raise RunFailed("channel 'replay' got no pairs: the backend did not collate its rows")
        pairs, weight = self._logps(view, batch.pairs), batch.pairs.weight
        values = select(self._loss(pairs), weight != 0)
        margin = (pairs.margin if self.settings.form.reference else _mean_margin(pairs)).detach()
        metrics = {"margin": (weight * margin).sum(), "accuracy": (weight * (margin > 0)).sum()}
        if self.settings.variant == "imitate":  # its rejected answers are not read
            metrics = {}
        return Term((values * weight).sum(), "pairs", metrics)

    # -- its parts ---------------------------------------------------------------------------------------------------

    @property
    def _reads_stored(self) -> bool:
        return self.settings.form.reference and self.settings.reference == "stored"

    def _fits(self, row: Row) -> bool:
        prompt, answers = len(ints(row, "prompt")), [len(ints(row, side)) for side in ("chosen", "rejected")]
        return prompt > 0 and min(answers) > 0 and prompt + max(answers) <= self.settings.max_tokens

    def _order(self, round_: int) -> list[int]:
        order = list(range(len(self._pairs)))
        random.Random(f"{self.settings.seed}-{round_}").shuffle(order)
        return order

    def _stored(self, rows: Sequence[Row], key: str, device: torch.device) -> Tensor | None:
        if not self._reads_stored:
            return None
        return torch.tensor([float(row[key]) for row in rows] or [0.0], device=device)  # type: ignore[arg-type]

    def _logps(self, view: PolicyView, pairs: Pairs) -> PairLogps:
        def answers(seqs: Seqs, action: Tensor, model: Model) -> tuple[Tensor, Tensor]:
            logps = view.logps(seqs, model=model, grad=model == "policy", temperature=TEMPERATURE)
            return answer_logps(logps, action, seqs)

        if self.settings.variant != "imitate" and isinstance(view, Joins):
            view.join(pairs.chosen, pairs.rejected)
        chosen, chosen_tokens = answers(pairs.chosen, pairs.chosen_action, "policy")
        if self.settings.variant == "imitate":
            nothing = torch.zeros_like(chosen.detach())
            return PairLogps(chosen, nothing, chosen_tokens, torch.ones_like(nothing))
        rejected, rejected_tokens = answers(pairs.rejected, pairs.rejected_action, "policy")
        ref_chosen, ref_rejected = pairs.ref_chosen, pairs.ref_rejected
        if self.settings.form.reference and self.settings.reference == "model":
            ref_chosen, _ = answers(pairs.chosen, pairs.chosen_action, "reference")
            ref_rejected, _ = answers(pairs.rejected, pairs.rejected_action, "reference")
        return PairLogps(chosen, rejected, chosen_tokens, rejected_tokens, ref_chosen, ref_rejected)


def _side(rows: Sequence[Row], side: str, device: torch.device) -> tuple[Seqs, Tensor]:
    """Prompt + answer of each pair, packed, and which tokens are the answer's."""
    texts = [(ints(row, "prompt"), ints(row, side)) for row in rows] or [([FILLER_ID], [])]
    flags = [flag for prompt, answer in texts for flag in [False] * len(prompt) + [True] * len(answer)]
    action = torch.tensor(flags, device=device)
    seqs = Seqs.from_lists([[*prompt, *answer] for prompt, answer in texts], device=device)
    return replace(seqs, scored=action), action


def _mean_margin(pairs: PairLogps) -> Tensor:
    return pairs.per_chosen_token(pairs.chosen) - pairs.per_rejected_token(pairs.rejected)
