import math

import pytest
import torch

from composer_core.data.scoring import weigh
from composer_core.run.context import NamedReward
from composer_core.testing.sampling import Completion, sample, score


@pytest.fixture(scope="module")
def tiny(tiny_model_folder):
    from composer_core.hf.models import load_policy, load_tokenizer

    return load_policy(tiny_model_folder, dtype="float32"), load_tokenizer(tiny_model_folder)


def _sample(tiny, prompts, seed=0, **options):
    options = {"limit": 6, "temperature": 1.0} | options
    return sample(*tiny, prompts, generator=torch.Generator().manual_seed(seed), **options)


def test_completions_end_at_the_end_token_or_the_limit(tiny):
    completions = _sample(tiny, [[{"role": "user", "content": "n1"}]] * 60, limit=30)
    end = tiny[1].eos_token_id
    assert {c.truncated for c in completions} == {True, False}
    for c in completions:
        assert end not in c.ids[:-1]
        assert c.truncated == (c.ids[-1] != end)
        assert len(c.ids) == 30 if c.truncated else len(c.ids) <= 30


def test_a_completion_does_not_depend_on_how_long_its_neighbours_prompt_is(tiny):
    cold = {"temperature": 1e-4}  # as good as greedy
    alone = _sample(tiny, ["ab"], **cold)[0]
    beside = _sample(tiny, ["ab", "a much longer prompt"], **cold)[0]
    assert (alone.prompt_ids, alone.ids) == (beside.prompt_ids, beside.ids)


def test_the_same_seed_gives_the_same_completions(tiny):
    assert _sample(tiny, ["ab"] * 3) == _sample(tiny, ["ab"] * 3)
    assert _sample(tiny, ["ab"] * 3) != _sample(tiny, ["ab"] * 3, seed=1)


def test_a_chat_goes_through_the_template_and_a_text_stands_as_it_is(tiny):
    chat, text = _sample(tiny, [[{"role": "user", "content": "n1"}], "n1"])
    tokenizer = tiny[1]
    assert tokenizer.decode(chat.prompt_ids) == "<|user|>n1<|end|><|assistant|>"
    assert tokenizer.decode(text.prompt_ids) == "n1"


def test_rewards_are_called_like_trls():
    seen = {}

    def reward(completions, **columns):
        seen.update(columns, completions=completions)
        return [1.0, None]

    rows = [{"prompt": [{"role": "user", "content": "q"}], "answer": "4"}, {"prompt": "q", "answer": None}]
    completions = [Completion([1], [2, 3], "four", False), Completion([1], [2], "five", True)]
    assert score([NamedReward("right", 1.0, reward)], rows, completions) == {"right": [1.0, None]}
    assert seen == {
        "completions": [[{"role": "assistant", "content": "four"}], "five"],
        "prompts": [[{"role": "user", "content": "q"}], "q"],
        "completion_ids": [[2, 3], [2]],
        "answer": ["4", None],
    }


def test_rewards_that_do_not_apply_are_left_out_of_the_sum():
    rewards = [NamedReward("a", 2.0, None), NamedReward("b", 0.5, None)]
    scores = {"a": [1.0, None, None], "b": [3.0, 3.0, None]}
    assert weigh(rewards, scores, index=0) == 3.5  # 2 x 1 + 0.5 x 3
    assert weigh(rewards, scores, index=1) == 1.5
    assert math.isnan(weigh(rewards, scores, index=2))
