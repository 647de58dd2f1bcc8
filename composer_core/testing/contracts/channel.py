# ruff: noqa: D102 - the name of a test is its sentence
"""What every loss channel must do. Runs on a small recurrent model in float64: no download, no transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_core.batch import Batch, Hints, Rollouts, Seqs
from composer_core.divergences import Divergence
from composer_core.loss.composite import ActiveChannel, CompositeLoss, Rows
from composer_core.loss.reduce import global_count
from composer_core.loss.views import KnownLogps, LeafView, ModelView
from composer_core.protocols import Aggregation, LossChannel, Model, Need, PolicyView, RolloutText, Row, Stateful, Term
from composer_core.testing.accumulate import Window, accumulate_gradients

NAME = "under-test"
OTHERS: tuple[Model, ...] = ("teacher", "reference")
SPLITS: tuple[Sequence[Sequence[int]], ...] = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2], [3, 0, 1]])


# its model is of no type that the fused losses know, which is nothing the author of a channel can change
@pytest.mark.filterwarnings("ignore:SmallModel is no model type:UserWarning")
class ChannelContract:
    """Give the fixture `channel`; override `needs` (what its contribution declares) and `columns` (its data row)."""

    @pytest.fixture
    def needs(self) -> frozenset[Need]:
        """What it asks of a trainer."""
        return frozenset({Need.LOGPS})

    @pytest.fixture
    def columns(self) -> Mapping[str, Any]:
        """Columns that `prepare` reads from the data row."""
        return {}

    # -- the half without a model ------------------------------------------------------------------------------------

    def test_a_row_is_json_or_none(self, channel: LossChannel, columns: Mapping[str, Any]) -> None:
        for row in _rows(channel, columns):
            assert row is None or json.loads(json.dumps(row, allow_nan=False)) == row

    def test_counts_are_finite_and_have_the_same_names_for_every_row(
        self, channel: LossChannel, columns: Mapping[str, Any]
    ) -> None:
        counts = _composite(channel).count({NAME: [*_rows(channel, columns), None]})
        assert all(math.isfinite(value) and value >= 0 for value in counts.values())

    # -- the half beside the model -----------------------------------------------------------------------------------

    def test_the_loss_is_a_finite_scalar_with_finite_gradients(
        self, channel: LossChannel, columns: Mapping[str, Any]
    ) -> None:
        model, window = SmallModel(), _window(channel, columns)
        term = _term(channel, _view(model, window), window)
        assert term.sum.shape == ()
        assert term.sum.isfinite()
        assert all(not value.requires_grad for value in term.metrics.values())
        gradients = torch.autograd.grad(term.sum, list(model.parameters()), allow_unused=True)
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)

    def test_without_a_single_row_the_loss_is_still_joined_to_the_graph(
        self, channel: LossChannel, columns: Mapping[str, Any]
    ) -> None:
        window = _window(channel, columns, rows=[None] * 4)
        term = _term(channel, _view(SmallModel(), window), window)
        assert term.sum.isfinite()
        assert term.sum.requires_grad, "every rank must run the same backward"

    @pytest.mark.parametrize("splits", SPLITS[1:], ids=["one-by-one", "ragged"])
    def test_value_and_gradient_do_not_depend_on_the_split(
        self, channel: LossChannel, columns: Mapping[str, Any], splits: Sequence[Sequence[int]]
    ) -> None:
        value, gradients = _accumulated(channel, columns, SPLITS[0])
        split_value, split_gradients = _accumulated(channel, columns, splits)
        assert split_value == pytest.approx(value, rel=1e-5, abs=1e-9)
        for name, gradient in gradients.items():
            assert torch.allclose(split_gradients[name], gradient, rtol=1e-5, atol=1e-9), name

    def test_it_asks_only_for_divergences_it_announced(self, channel: LossChannel, columns: Mapping[str, Any]) -> None:
        window = _window(channel, columns)
        view = _Recording(_view(SmallModel(), window))
        _term(channel, view, window)
        assert view.asked <= set(channel.divergences(0))

    def test_with_weight_zero_it_is_not_computed(self, channel: LossChannel, columns: Mapping[str, Any]) -> None:
        model, window = SmallModel(), _window(channel, columns)
        loss = _composite(channel, weight=0.0)
        view = _view(model, window)
        result = loss.channels(view, loss.batches(window.rows, Batch(rollouts=window.rollouts)))
        assert (float(result.total), result.terms, model.forwards) == (0.0, {}, 0)

    def test_its_state_comes_back_after_a_checkpoint(self, channel: LossChannel) -> None:
        if not isinstance(channel, Stateful):
            pytest.skip("this channel has no state")
        saved = dict(channel.state_dict())
        _composite(channel).on_step_end(1, {f"loss/{NAME}": 1.0, "loss/total": 1.0})
        channel.load_state_dict(saved)
        assert _plain(channel.state_dict()) == _plain(saved)

    def test_through_log_probs_alone_it_has_the_same_gradient(
        self, channel: LossChannel, columns: Mapping[str, Any], needs: frozenset[Need]
    ) -> None:
        if not needs <= {Need.LOGPS, Need.PAIRS, Need.REFERENCE, Need.STATE}:
            pytest.skip("this channel needs more than log-probs")
        model, window = SmallModel(), _window(channel, columns)
        batch = _batch(channel, window)
        direct = torch.autograd.grad(channel.loss(_view(model, window), batch).sum, list(model.parameters()))
        known = [KnownLogps(seqs, _logps(model, seqs)) for seqs in _sequences(batch)]
        frozen = [KnownLogps(seqs, _logps(model, seqs), other) for seqs in _sequences(batch) for other in OTHERS]
        leaf = LeafView([*known, *frozen], temperature=batch.temperature, rollouts=window.rollouts.seqs)
        coefficients = leaf.coefficients(channel.loss(leaf, batch).sum)
        weighted = sum((c * k.logps).sum() for c, k in zip(coefficients, known, strict=True))
        assert isinstance(weighted, Tensor)
        assert any(gradient.any() for gradient in direct), "these rollouts give it nothing to do: give `columns`"
        for through, expected in zip(torch.autograd.grad(weighted, list(model.parameters())), direct, strict=True):
            assert torch.allclose(through, expected, rtol=1e-6, atol=1e-12)


class SmallModel(nn.Module):
    """Embedding, GRU, head: what a token's log-prob depends on everything before it, as in a real model."""

    def __init__(self, vocabulary: int = 48, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(vocabulary, width, dtype=torch.float64)
            self.mixer = nn.GRU(width, width, batch_first=True, dtype=torch.float64)
            self.head = nn.Linear(width, vocabulary, dtype=torch.float64)
        self.forwards = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        """Logits, (S, T, V); padding is on the right, where a causal model does not see it."""
        self.forwards += 1
        return SimpleNamespace(logits=self.head(self.mixer(self.embedding(input_ids))[0]))


class _NoObjective:
    """A policy loss of zero, joined to the graph."""

    aggregation = Aggregation.TOKEN_MEAN

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        return torch.zeros_like(rewards)

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        assert batch.rollouts is not None
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term(logps.sum() * 0, "tokens")


class _Recording:
    """A view that notes which divergences were asked for."""

    def __init__(self, view: PolicyView) -> None:
        self.view = view
        self.asked: set[Divergence] = set()

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        return self.view.logps(seqs, model=model, grad=grad, temperature=temperature)

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        self.asked.add(spec)
        return self.view.divergence(hints, spec, teacher=teacher)

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        return self.view.logits(seqs, at, model=model, grad=grad, temperature=temperature)


def _texts(columns: Mapping[str, Any]) -> list[RolloutText]:
    """Ragged, rewarded and not, one with tool output in its middle."""
    shapes = [(3, [True] * 4, 1.0), (2, [True, True, False, False, True], 0.0), (4, [True], None), (2, [True] * 6, 0.5)]
    return [
        RolloutText(
            uid=str(i),
            prompt_ids=[10 + i] * prompt,
            completion_ids=[20 + (3 * i + j) % 17 for j in range(len(action))],
            action=action,
            reward=reward,
            columns=columns,
        )
        for i, (prompt, action, reward) in enumerate(shapes)
    ]


def _rollouts(texts: Sequence[RolloutText]) -> Rollouts:
    seqs = Seqs.from_lists([[*text.prompt_ids, *text.completion_ids] for text in texts])
    flags = [flag for text in texts for flag in [False] * len(text.prompt_ids) + list(text.action)]
    rewards = torch.tensor([math.nan if text.reward is None else text.reward for text in texts])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5])
    return Rollouts(
        seqs=seqs,
        action=torch.tensor(flags),
        advantages=advantages[seqs.owner],
        rewards=rewards,
        group=torch.tensor([0, 0, 1, 1]),
        uid=tuple(text.uid for text in texts),
    )


def _composite(channel: LossChannel, *, weight: float = 0.5) -> CompositeLoss:
    return CompositeLoss([ActiveChannel(NAME, weight, channel)], _NoObjective())


def _rows(channel: LossChannel, columns: Mapping[str, Any]) -> list[Row | None]:
    """What it makes of the rollouts, or its own rows where it has some."""
    drawn = _composite(channel).draw(step=1, rank=0, world=1)
    return list(drawn[NAME]) if drawn else [channel.prepare(text) for text in _texts(columns)]


def _window(
    channel: LossChannel,
    columns: Mapping[str, Any],
    *,
    splits: Sequence[Sequence[int]] = SPLITS[0],
    rows: Sequence[Row | None] | None = None,
) -> Window:
    texts = _texts(columns)
    prepared: Rows = {NAME: rows if rows is not None else _rows(channel, columns)}
    return Window(rollouts=_rollouts(texts), rows=prepared, splits=splits, longest=6)


def _batch(channel: LossChannel, window: Window) -> Batch:
    sequences = float(len(window.rollouts.seqs))
    counts = {
        "tokens": float(window.rollouts.action.sum()),
        "sequences": sequences,
        "max_tokens": sequences * window.longest,
        "micro_batches": 1.0,
    }
    loss = _composite(channel)
    base = Batch(rollouts=window.rollouts, counts=counts | loss.count(window.rows))
    return loss.batches(window.rows, base)[NAME]


def _view(model: nn.Module, window: Window) -> ModelView:
    return ModelView(model, rollouts=window.rollouts.seqs, teacher=SmallModel(), reference=SmallModel())


def _term(channel: LossChannel, view: PolicyView, window: Window) -> Term:
    batch = _batch(channel, window)
    term = channel.loss(view, batch)
    global_count(batch.counts, f"{NAME}.{term.count}", term.count)  # raises where nobody makes this count
    return term


def _accumulated(
    channel: LossChannel, columns: Mapping[str, Any], splits: Sequence[Sequence[int]]
) -> tuple[float, dict[str, Tensor]]:
    model, window = SmallModel(), _window(channel, columns, splits=splits)
    logged = accumulate_gradients(model, _composite(channel), window, base=Batch(), reference=SmallModel())
    return logged[f"loss/{NAME}"], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _logps(model: nn.Module, seqs: Seqs) -> Tensor:
    return ModelView(model, rollouts=None).logps(seqs, grad=True, temperature=1.0)


def _sequences(batch: Batch) -> list[Seqs]:
    found = [] if batch.rollouts is None else [batch.rollouts.seqs]
    if batch.pairs is not None:
        found += [batch.pairs.chosen, batch.pairs.rejected]
    return found if batch.hints is None else [*found, batch.hints.seqs]


def _plain(state: Mapping[str, Any]) -> Any:
    """State with tensors as lists, so that == compares it."""
    return json.loads(json.dumps(state, default=lambda value: value.tolist()))
