# ruff: noqa: D102 - the name of a test is its sentence
"""What every policy objective must do. Runs on log-probs alone: no model is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.reduce import COUNT_OF, global_count
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.protocols import Aggregation, Objective
from composer_core.testing.accumulate import take

LONGEST = 5


class ObjectiveContract:
    """Give the fixture `objective`."""

    # -- advantages --------------------------------------------------------------------------------------------------

    def test_advantages_are_finite_one_per_rollout(self, objective: Objective) -> None:
        advantages = _advantages(objective, [0.0, 1.0, 0.5, 0.25], [0, 0, 1, 1])
        assert advantages.shape == (4,)
        assert advantages.isfinite().all()

    def test_the_better_rollout_of_a_group_has_the_larger_advantage(self, objective: Objective) -> None:
        worse, better = _advantages(objective, [0.0, 1.0], [0, 0]).tolist()
        assert worse < better

    def test_equal_rewards_have_no_advantage(self, objective: Objective) -> None:
        assert _advantages(objective, [0.1] * 4, [0] * 4).abs().max() < 1e-6

    def test_an_unrewarded_rollout_has_no_advantage_and_changes_no_other(self, objective: Objective) -> None:
        with_nan = _advantages(objective, [0.0, math.nan, 1.0, 0.5], [0] * 4)
        without = _advantages(objective, [0.0, 1.0, 0.5], [0] * 3)
        assert with_nan[1] == 0
        assert torch.allclose(with_nan[[0, 2, 3]], without)

    # -- loss --------------------------------------------------------------------------------------------------------

    def test_the_loss_is_a_scalar_that_names_a_count_of_the_backend(self, objective: Objective) -> None:
        batch = _batch(_rollouts())
        term = objective.loss(_view(batch), batch)
        assert term.sum.shape == ()
        assert term.count == COUNT_OF[objective.aggregation]
        assert all(not value.requires_grad for value in term.metrics.values())

    def test_an_empty_mask_gives_zero_joined_to_the_graph(self, objective: Objective) -> None:
        rollouts = _rollouts()
        batch = _batch(_replaced(rollouts, action=torch.zeros_like(rollouts.action)))
        view = _view(batch)
        term = objective.loss(view, batch)
        assert term.sum.item() == 0
        assert term.sum.requires_grad, "every rank must run the same backward"
        assert not view.coefficients(term.sum)[0].any()

    def test_a_nan_in_a_masked_token_reaches_neither_value_nor_gradient(self, objective: Objective) -> None:
        clean, dirty = _batch(_rollouts()), _batch(_rollouts(masked=math.nan))
        clean_view, dirty_view = _view(clean), _view(dirty, masked=math.nan)
        value, expected = objective.loss(dirty_view, dirty).sum, objective.loss(clean_view, clean).sum
        assert torch.allclose(value, expected)
        assert torch.allclose(dirty_view.coefficients(value)[0], clean_view.coefficients(expected)[0])

    @pytest.mark.parametrize("splits", [[[0, 1], [2, 3]], [[3], [1], [0], [2]], [[0], [1, 2, 3]]])
    def test_the_gradient_does_not_depend_on_the_split(
        self, objective: Objective, splits: Sequence[Sequence[int]]
    ) -> None:
        local = objective.aggregation is Aggregation.TOKEN_MEAN_LOCAL
        if local and len({len(split) for split in splits}) > 1:
            pytest.skip("a local token mean promises this for equal splits only")
        rollouts = _rollouts(even=local)
        whole = _gradient(objective, rollouts, [[0, 1, 2, 3]])
        assert torch.allclose(_gradient(objective, rollouts, splits), whole, rtol=1e-5, atol=1e-7)

    def test_a_positive_advantage_raises_a_tokens_log_prob_and_a_negative_one_lowers_it(
        self, objective: Objective
    ) -> None:
        rollouts = _rollouts(off_policy=False)
        assert rollouts.advantages is not None
        gradient = _gradient(objective, rollouts, [[0, 1, 2, 3]])
        descent = -gradient[rollouts.action]
        assert torch.equal(descent.sign(), rollouts.advantages[rollouts.action].sign())


def _advantages(objective: Objective, rewards: list[float], group: list[int]) -> Tensor:
    n = len(rewards)
    return objective.advantages(torch.tensor(rewards), torch.tensor(group), torch.full((n,), 3.0), torch.zeros(n))


def _rollouts(*, even: bool = False, masked: float = 0.0, off_policy: bool = True) -> Rollouts:
    """Four sequences of prompt and completion; `masked` stands wherever no action was taken."""
    lengths = [3, 3, 3, 3] if even else [3, 1, 5, 2]
    seqs = Seqs.from_lists([[7, 8, *range(20, 20 + n)] for n in lengths])
    action = torch.tensor([flag for n in lengths for flag in [False, False] + [True] * n])
    advantages = torch.tensor([1.5, -0.5, 0.25, -1.25])[seqs.owner]
    logps = _logps(seqs)

    def known(values: Tensor) -> Tensor:
        return torch.where(action, values, torch.tensor(masked))

    wave = torch.linspace(-0.4, 0.4, len(logps))  # ratios from 0.67 to 1.5: some are clipped
    return Rollouts(
        seqs=seqs,
        action=action,
        advantages=known(advantages),
        old_logps=known(logps + wave) if off_policy else None,
        ref_logps=known(logps - 0.1),
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.0]),
        group=torch.tensor([0, 0, 1, 1]),
        uid=("a", "b", "c", "d"),
    )


def _logps(seqs: Seqs) -> Tensor:
    """Made-up log-probs that depend on token and place, so that parts of a split see the same ones."""
    place = torch.cat([torch.arange(int(n)) for n in seqs.lengths])
    return -(0.5 + 0.1 * (seqs.ids % 7).float() + 0.05 * place.float())


def _replaced(rollouts: Rollouts, *, action: Tensor) -> Rollouts:
    return Rollouts(**{**rollouts.__dict__, "action": action})


def _batch(rollouts: Rollouts) -> Batch:
    counts = {
        "tokens": float(rollouts.action.sum()),
        "sequences": float(len(rollouts.seqs)),
        "max_tokens": float(len(rollouts.seqs) * LONGEST),
        "micro_batches": 1.0,
    }
    return Batch(rollouts=rollouts, counts=counts)


def _view(batch: Batch, *, masked: float | None = None) -> LeafView:
    assert batch.rollouts is not None
    logps = _logps(batch.rollouts.seqs)
    if masked is not None:
        logps = torch.where(batch.rollouts.action, logps, torch.tensor(masked))
    return LeafView([KnownLogps(batch.rollouts.seqs, logps)], temperature=batch.temperature)


def _gradient(objective: Objective, rollouts: Rollouts, splits: Sequence[Sequence[int]]) -> Tensor:
    """Derivative of the whole loss by each log-prob, (N,), computed in the micro-batches given."""
    counts = dict(_batch(rollouts).counts) | {"micro_batches": float(len(splits))}
    bounds = rollouts.seqs.cu.tolist()
    gradient = torch.zeros(len(rollouts.action))
    for split in splits:
        batch = Batch(rollouts=take(rollouts, split), counts=counts)
        view = _view(batch)
        term = objective.loss(view, batch)
        (part,) = view.coefficients(term.sum / global_count(counts, term.count))
        places = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in split])
        gradient[places] += part
    return gradient
