"""Hints of real rollouts with the tiny model's tokenizer: one id per character, chat markers as single tokens."""

import logging

import pytest

from composer_core.channels.hinting import Hinting
from composer_core.channels.settings import HintSettings
from composer_core.errors import RunFailed, UsageError
from composer_core.hf.models import load_tokenizer
from composer_core.protocols import RolloutText


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder):
    return load_tokenizer(tiny_model_folder)


PROMPT = [{"role": "user", "content": "a?"}]


def _rollout(tokenizer, answer="no", *, reward=0.0, give_tokenizer=True, **columns):
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return RolloutText(
        uid="u1",
        prompt_ids=list(prompt),
        completion_ids=completion,
        action=[True] * len(completion),
        reward=reward,
        columns={"prompt": PROMPT, **columns},
        tokenizer=tokenizer if give_tokenizer else None,
    )


def _row(rollout, **hints):
    return Hinting(HintSettings(**hints), success=1.0).row(rollout)


@pytest.mark.parametrize("at", ["prompt-end", "turn", "system"])
def test_a_columns_hint_stands_before_the_answer_whose_tokens_are_all_taught(tokenizer, at):
    prompt = [{"role": "system", "content": "s"}, *PROMPT]
    rollout = _rollout(tokenizer, tip="say b")
    rollout = RolloutText(
        **{
            **vars(rollout),
            "prompt_ids": tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False),
            "columns": {"prompt": prompt, "tip": "say b"},
        }
    )
    row = _row(rollout, column="tip", at=at)
    whole = [*rollout.prompt_ids, *rollout.completion_ids]
    text = tokenizer.decode(row["teacher_ids"])
    assert "say b" in text
    assert text.replace("say b", "").count("no") == 1
    answer = range(len(rollout.prompt_ids), len(whole))
    assert row["student"] == list(answer)
    assert [row["teacher_ids"][i] for i in row["teacher"]] == [whole[i] for i in answer]
    assert text.index("say b") < text.index("no")
    assert (row["kind"], row["site"]) == ("column", [-1])


@pytest.mark.parametrize("text", [None, ""])
def test_a_row_without_a_hint_gets_none(tokenizer, text):
    assert _row(_rollout(tokenizer, tip=text), column="tip") is None


def test_without_a_column_the_errors_of_the_rollout_are_hinted(tokenizer):
    row = _row(_rollout(tokenizer, answer="7"), at="turn")
    assert row is None  # nothing is known of what a right answer is
    row = _row(_rollout(tokenizer, answer="7"), at="turn", templates={"low_reward": "try b"})
    assert "try b" in tokenizer.decode(row["teacher_ids"])
    assert row["kind"] == "low_reward"


def test_a_rollout_that_names_its_sites_gets_a_hint_for_each(tokenizer):
    site = {"turn": 0, "kind": "timeout", "evidence": "slow", "context": {}}
    row = _row(_rollout(tokenizer, error_sites=[site]), templates={"timeout": "be quick"})
    assert (row["kind"], row["site"]) == ("timeout", [0])


def test_why_a_hint_found_no_place_is_said_once(tokenizer, caplog):
    hinting = Hinting(HintSettings(column="tip", at="prompt-end"), success=1.0)
    rollout = _rollout(tokenizer, tip="say b")
    broken = RolloutText(**{**vars(rollout), "prompt_ids": rollout.prompt_ids[:-1]})
    with caplog.at_level(logging.WARNING):
        assert hinting.row(broken) is None
        assert hinting.row(broken) is None
    assert caplog.messages == [
        "sdpo: rollout u1 is not hinted, and others like it: the prompt does not end with a user message as the chat "
        "template writes it"
    ]


def test_a_missing_column_names_those_there_are(tokenizer):
    with pytest.raises(UsageError) as caught:
        _row(_rollout(tokenizer, tip="x"), column="hnt")
    assert str(caught.value) == "sdpo.hints.column: the data has no column 'hnt' with hints; there are: prompt, tip"


def test_a_hint_that_is_no_text_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"^sdpo\.hints\.column: column 'tip' must hold text or null, got 3$"):
        _row(_rollout(tokenizer, tip=3), column="tip")


def test_a_trainer_without_a_tokenizer_is_refused(tokenizer):
    with pytest.raises(RunFailed) as caught:
        _row(_rollout(tokenizer, tip="x", give_tokenizer=False), column="tip")
    assert str(caught.value) == (
        "channel 'sdpo' puts hints into prompts and needs a tokenizer: this trainer gives none"
    )
