"""Cross-entropy by hand, against torch's own, and as an objective."""

import math

import pytest
import torch
from torch.nn import functional as F

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.errors import RunFailed
from composer_core.loss.lm_ce import LmCe, smoothed_cross_entropy
from composer_core.loss.views import KnownLogps, LeafView
from composer_core.plugins.builtin_settings import LmCeSettings

SEQS = Seqs.from_lists([[0, 1, 2], [0, 3]])
ACTION = torch.tensor([False, True, True, False, True])


class LogitsView:
    """Hands out logits that depend on the place only."""

    def __init__(self, logits):
        self.given = logits

    def logits(self, seqs, at, *, model="policy", grad, temperature):
        assert (model, grad) == ("policy", True)
        return self.given[at] / temperature


def test_smoothing_mixes_in_the_mean_over_the_vocabulary():
    # q = (1/2, 1/4, 1/4): -log q(0) = ln 2; the mean of -log q is (ln 2 + 2 ln 4) / 3 = 5/3 ln 2
    logits = torch.tensor([[math.log(2), 0.0, 0.0]])
    value = smoothed_cross_entropy(logits, torch.tensor([0]), label_smoothing=0.3)
    assert value.item() == pytest.approx(0.7 * math.log(2) + 0.3 * 5 / 3 * math.log(2))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_equals_torchs_cross_entropy_in_value_and_gradient(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 6, 3, 3])
    ours = smoothed_cross_entropy(logits, ids, label_smoothing=smoothing)
    theirs = F.cross_entropy(logits, ids, label_smoothing=smoothing, reduction="none")
    assert torch.allclose(ours, theirs)
    found, expected = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs))
    assert torch.allclose(found, expected)
    assert torch.autograd.gradcheck(lambda x: smoothed_cross_entropy(x, ids, label_smoothing=smoothing), logits)


def test_half_precision_is_computed_in_single():
    logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    value = smoothed_cross_entropy(logits, torch.tensor([1]))
    assert value.dtype is torch.float32
    assert value.item() == pytest.approx(math.log(math.exp(3) + math.exp(1) + math.exp(-2)) - 1)


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^logits \(2, 3\) and ids \(1,\) must be \(N, V\) and \(N,\)$"):
        smoothed_cross_entropy(torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^ids must be in \[0, 3\), got 1 to 3$"):
        smoothed_cross_entropy(torch.zeros(2, 3), torch.tensor([1, 3]))


def test_the_objective_raises_every_action_by_the_same_amount_and_nothing_else():
    batch = Batch(rollouts=Rollouts(seqs=SEQS, action=ACTION))
    view = LeafView([KnownLogps(SEQS, torch.tensor([math.nan, -1.0, -2.0, math.nan, -4.0]))], temperature=1.0)
    term = LmCe(LmCeSettings()).loss(view, batch)
    assert (term.sum.item(), term.count) == (7.0, "tokens")
    assert view.coefficients(term.sum)[0].tolist() == [0.0, -1.0, -1.0, 0.0, -1.0]


def test_smoothed_it_reads_the_logits_of_the_actions_at_the_batchs_temperature():
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    batch = Batch(rollouts=Rollouts(seqs=SEQS, action=ACTION), temperature=0.5)
    term = LmCe(LmCeSettings(label_smoothing=0.1)).loss(LogitsView(logits), batch)
    expected = F.cross_entropy(logits[ACTION] * 2, torch.tensor([1, 2, 3]), label_smoothing=0.1, reduction="sum")
    assert term.sum.item() == pytest.approx(expected.item(), rel=1e-6)


def test_rewards_do_not_enter():
    objective = LmCe(LmCeSettings())
    rewards = torch.tensor([0.0, math.nan, 7.0])
    assert objective.advantages(rewards, torch.zeros(3), torch.ones(3), None).tolist() == [1.0, 1.0, 1.0]


def test_a_batch_without_rollouts_is_refused():
    with pytest.raises(RunFailed, match=r"^objective 'lm-ce' needs rollouts or recorded traces; this batch has none$"):
        LmCe(LmCeSettings()).loss(LogitsView(torch.zeros(5, 3)), Batch())
