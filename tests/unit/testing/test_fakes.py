import torch

from composer_core.batch import Rollouts, Seqs
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Owner
from composer_core.protocols import RolloutText
from composer_core.testing import fakes
from composer_core.testing.fakes import HintFake, HintFakeSettings


def _text(reward=0.0, action=(True, False, True)):
    return RolloutText("u", [10, 11], [20, 21, 22], list(action), reward)


def test_a_row_holds_the_text_and_the_action_positions():
    assert HintFake().prepare(_text()) == {"prompt": [10, 11], "completion": [20, 21, 22], "actions": [0, 2]}


def test_good_rollouts_and_those_without_an_action_have_no_row():
    assert HintFake().prepare(_text(reward=1.0)) is None
    assert HintFake().prepare(_text(action=(False,) * 3)) is None
    assert HintFake().prepare(_text(reward=None)) is not None


def test_the_teacher_reads_the_hint_before_the_completion_and_tokens_pair_up():
    channel = HintFake(HintFakeSettings(hint=[3, 4]))
    seqs = Seqs.from_lists([[10, 11, 20, 21, 22], [10, 11, 20, 21, 22]])
    hints = channel.collate([None, channel.prepare(_text())], Rollouts(seqs, action=torch.ones(10).bool()))
    # filler: the first token of its own rollout; then prompt, hint, completion
    assert hints.seqs.ids.tolist() == [10, 10, 11, 3, 4, 20, 21, 22]
    assert hints.seqs.cu.tolist() == [0, 1, 8]
    assert hints.student.tolist() == [0, 7, 9]  # 5 + 2 + 0, 5 + 2 + 2
    assert hints.teacher.tolist() == [0, 5, 7]  # 1 + 4 + 0, 1 + 4 + 2
    assert hints.weight.tolist() == [0.0, 1.0, 1.0]
    assert torch.equal(seqs.ids[hints.student], hints.seqs.ids[hints.teacher])


def test_it_counts_hinted_tokens():
    channel = HintFake()
    assert channel.count(channel.prepare(_text())) == {"tokens": 2.0}
    assert channel.count(None) == {"tokens": 0.0}


def test_the_fakes_can_be_contributed_by_a_tests_own_registry(plugin_registry):
    plugin_registry.add(fakes.plugin, Owner("fakes", "0"))
    assert plugin_registry.problems == []
    assert plugin_registry.names(Kind.CHANNEL) == ["brevity", "hint-fake"]
    assert plugin_registry.get(Kind.CHANNEL, "hint-fake")[1].load() is HintFake
