"""A suite that passes everything proves nothing: here are the classic mistakes, and the test that catches each."""

import pytest
import torch

from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.loss.reduce import masked_sum
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import Aggregation, Term
from composer_core.testing.contracts import ChannelContract, ObjectiveContract, RewardContract
from composer_core.testing.fakes import HintFake

COLUMNS = {}
objectives, channels, rewards = ObjectiveContract(), ChannelContract(), RewardContract()


class Honest(PolicyObjective):
    def __init__(self):
        super().__init__(PRESETS["dapo"], OBJECTIVE_SETTINGS["dapo"]())


class WrongSign(Honest):
    def loss(self, view, batch):
        term = super().loss(view, batch)
        return Term(-term.sum, term.count)


class LocalMean(Honest):
    """Divides by its own tokens although it declares a global mean."""

    def loss(self, view, batch):
        term = super().loss(view, batch)
        return Term(term.sum / batch.rollouts.action.sum(), term.count)


class Multiplies(Honest):
    """Masks by multiplication: NaN x 0 is NaN."""

    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=1.0)
        return Term(-(logps * batch.rollouts.advantages * batch.rollouts.action).sum(), "tokens")


class Detached(Honest):
    """Returns a constant where there is nothing to do."""

    def loss(self, view, batch):
        return super().loss(view, batch) if batch.rollouts.action.any() else Term(torch.zeros(()), "tokens")


class OtherCount(Honest):
    aggregation = Aggregation.TOKEN_MEAN

    def loss(self, view, batch):
        return Term(super().loss(view, batch).sum, "sequences")


@pytest.mark.parametrize(
    ("objective", "test"),
    [
        (WrongSign(), objectives.test_a_positive_advantage_raises_a_tokens_log_prob_and_a_negative_one_lowers_it),
        (Multiplies(), objectives.test_a_nan_in_a_masked_token_reaches_neither_value_nor_gradient),
        (Detached(), objectives.test_an_empty_mask_gives_zero_joined_to_the_graph),
        (OtherCount(), objectives.test_the_loss_is_a_scalar_that_names_a_count_of_the_backend),
    ],
    ids=["wrong-sign", "multiplies-by-the-mask", "detached", "other-count"],
)
def test_a_faulty_objective_fails(objective, test):
    test(Honest())
    with pytest.raises(AssertionError):
        test(objective)


def test_an_objective_that_divides_by_its_own_tokens_fails_on_a_split():
    objectives.test_the_gradient_does_not_depend_on_the_split(Honest(), [[0], [1, 2, 3]])
    with pytest.raises(AssertionError):
        objectives.test_the_gradient_does_not_depend_on_the_split(LocalMean(), [[0], [1, 2, 3]])


class Good(ChannelDefaults):
    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term(masked_sum(logps**2, batch.rollouts.action), "tokens")


class OwnMean(Good):
    def loss(self, view, batch):
        term = super().loss(view, batch)
        return Term(term.sum / batch.rollouts.action.sum(), term.count)


class NotJson(Good):
    def prepare(self, rollout):
        return {"when": (1, 2)}


class Unannounced(HintFake):
    def divergences(self, step):
        return ()


class SkipsWithoutRows(HintFake):
    def loss(self, view, batch):
        return super().loss(view, batch) if batch.hints.weight.any() else Term(torch.zeros(()), "tokens")


@pytest.mark.parametrize(
    ("channel", "test"),
    [
        (NotJson(), channels.test_a_row_is_json_or_none),
        (Unannounced(), channels.test_it_asks_only_for_divergences_it_announced),
        (SkipsWithoutRows(), channels.test_without_a_single_row_the_loss_is_still_joined_to_the_graph),
    ],
    ids=["row-is-not-json", "unannounced-divergence", "skips-without-rows"],
)
def test_a_faulty_channel_fails(channel, test):
    test(Good(), COLUMNS)
    with pytest.raises(AssertionError):
        test(channel, COLUMNS)


def test_a_channel_that_divides_by_its_own_tokens_fails_on_a_split():
    channels.test_value_and_gradient_do_not_depend_on_the_split(Good(), COLUMNS, [[2], [3, 0, 1]])
    with pytest.raises(AssertionError):
        channels.test_value_and_gradient_do_not_depend_on_the_split(OwnMean(), COLUMNS, [[2], [3, 0, 1]])


def _one_score(completions, **columns):
    return [1.0]


def _length_of_whatever_comes(completions, **columns):
    return [float(len(completion)) for completion in completions]


def _number_of_columns(completions, **columns):
    return [float(len(columns))] * len(completions)


@pytest.mark.parametrize(
    ("reward", "test"),
    [
        (_one_score, rewards.test_gives_one_number_or_none_per_completion),
        (_length_of_whatever_comes, rewards.test_scores_chat_messages_like_their_text),
        (_number_of_columns, rewards.test_ignores_columns_it_does_not_know),
    ],
    ids=["too-few", "reads-a-chat-as-text", "depends-on-columns"],
)
def test_a_faulty_reward_fails(reward, test):
    with pytest.raises(AssertionError):
        test(reward, ["please wait", "no", "7"], COLUMNS)
