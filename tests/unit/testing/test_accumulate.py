import torch

from composer_core.batch import Rollouts, Seqs
from composer_core.run.collectives import sum_over_ranks
from composer_core.testing.accumulate import take


def _rollouts():
    seqs = Seqs.from_lists([[1, 2, 3], [4], [5, 6]])
    return Rollouts(
        seqs=seqs,
        action=torch.tensor([False, True, True, False, False, True]),
        advantages=torch.tensor([0.0, 0.1, 0.2, 1.0, 2.0, 2.1]),
        rewards=torch.tensor([7.0, 8.0, 9.0]),
        group=torch.tensor([0, 1, 1]),
        uid=("a", "b", "c"),
    )


def test_taking_sequences_keeps_everything_about_their_tokens_in_the_order_asked():
    taken = take(_rollouts(), [2, 0])
    assert taken.seqs.ids.tolist() == [5, 6, 1, 2, 3]
    assert taken.seqs.cu.tolist() == [0, 2, 5]
    assert taken.action.tolist() == [False, True, False, True, True]
    assert torch.equal(taken.advantages, torch.tensor([2.0, 2.1, 0.0, 0.1, 0.2]))
    assert (taken.rewards.tolist(), taken.group.tolist(), taken.uid) == ([9.0, 7.0], [1, 0], ("c", "a"))
    assert taken.old_logps is None


def test_taking_nothing_gives_no_sequences():
    taken = take(_rollouts(), [])
    assert (len(taken.seqs), taken.seqs.ids.tolist(), taken.uid) == (0, [], ())


def test_on_one_process_a_sum_over_ranks_is_the_value():
    assert sum_over_ranks({"b": 2.0, "a": 1.0}) == {"a": 1.0, "b": 2.0}
