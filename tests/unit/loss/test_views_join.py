"""Sequences that a view reads in one forward: the numbers of two, at the price of one."""

import pytest
import torch
from torch import nn

from composer_core.batch import Batch, Seqs
from composer_core.channels.replay import Replay
from composer_core.channels.rows import pair_row
from composer_core.channels.settings import ReplaySettings
from composer_core.loss.views import ModelView
from composer_core.loss.watch import Watched

LONG = Seqs.from_lists([[1, 2, 3, 4], [5, 1]])
SHORT = Seqs.from_lists([[2, 2], [4]])
ROWS = [pair_row([1, 2], [3, 4, 5], [4], reference=(-6.0, -1.0)), pair_row([1], [5], [2, 3], reference=(-2.0, -3.0))]


class RunningSum(nn.Module):
    """Logits depend on all tokens so far: a token taken from another row, or from padding before it, shows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        self.shapes = []

    def forward(self, input_ids, attention_mask, use_cache):
        self.shapes.append(tuple(input_ids.shape))
        return type("Output", (), {"logits": (self.table[input_ids] * attention_mask[..., None]).cumsum(1)})


def _logps(*, join, grad=True):
    model = RunningSum()
    view = ModelView(model, rollouts=None)
    if join:
        view.join(LONG, SHORT)
    logps = [view.logps(seqs, grad=grad, temperature=0.7) for seqs in (SHORT, LONG)]
    if grad:
        (logps[0].sum() + 2 * logps[1].sum()).backward()
    return model, logps


def test_joined_sequences_have_the_numbers_of_separate_ones_and_share_a_forward():
    joined, together = _logps(join=True)
    separate, apart = _logps(join=False)
    assert (joined.shapes, separate.shapes) == ([(4, 4)], [(2, 2), (2, 4)])
    # by hand: token 2 behind token 2
    assert together[0][1].item() == pytest.approx((joined.table[2] / 0.7).log_softmax(-1)[2].item())
    for ours, theirs in zip(together, apart, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.allclose(joined.table.grad, separate.table.grad, rtol=1e-12)


def test_what_was_not_joined_has_a_forward_of_its_own():
    model = RunningSum()
    view = ModelView(model, rollouts=None)
    view.join(LONG, SHORT)
    other = Seqs.from_lists([[1, 2, 3]])
    for seqs in (other, LONG, SHORT):
        view.logps(seqs, grad=True, temperature=1.0)
    assert model.shapes == [(1, 3), (4, 4)]


@pytest.mark.filterwarnings("ignore:RunningSum")
@pytest.mark.parametrize(("variant", "shapes"), [("dpo", [(4, 5)]), ("imitate", [(2, 5)])])
def test_both_answers_of_pairs_are_read_in_one_forward_and_unread_ones_in_none(variant, shapes):
    model = RunningSum()
    channel = Replay(ReplaySettings(variant=variant))
    channel.take_pairs(ROWS)
    view = Watched(ModelView(model, rollouts=None))
    channel.loss(view, Batch(pairs=channel.collate(ROWS, None))).sum.backward()
    assert model.shapes == shapes
