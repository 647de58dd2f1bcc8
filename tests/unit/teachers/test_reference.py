"""Pairs as token ids, and a reference model's log-probs of them, on the built-in tiny model."""

from collections import Counter

import pytest
import torch

from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.teachers import reference
from composer_core.teachers.pair_rows import pair_ids, pair_rows
from composer_core.teachers.pairs import Pair
from composer_core.teachers.reference import with_reference
from composer_core.traces.chat_template import ChatTemplate


def pair(chosen, rejected, prompt="go", ref=None):
    def message(content):
        return {"role": "assistant", "content": content}

    return Pair(prompt, [{"role": "user", "content": prompt}], message(chosen), message(rejected), 2, ["t"], ref)


@pytest.fixture
def template(tiny_model_folder):
    return ChatTemplate(load_tokenizer(tiny_model_folder))


def test_answers_begin_where_the_prompt_ends_and_hold_their_end_token(template, tiny_model_folder):
    tokenizer = load_tokenizer(tiny_model_folder)
    (ids,) = pair_ids([pair("yes", "no")], template, max_tokens=None, dropped=Counter())
    assert tokenizer.decode(ids.prompt).endswith("<|assistant|>")
    assert tokenizer.convert_ids_to_tokens(ids.chosen) == ["y", "e", "s", tokenizer.eos_token]
    assert tokenizer.convert_ids_to_tokens(ids.rejected) == ["n", "o", tokenizer.eos_token]


def test_pairs_that_are_too_long_are_counted(template):
    dropped = Counter()
    rows = list(pair_rows([pair("yes", "no"), pair("x" * 50, "no")], template, max_tokens=30, dropped=dropped))
    assert len(rows) == 1
    assert dropped == {"too long": 1}


def test_stored_log_probs_travel_with_the_row(template):
    ref = {"model": "m", "chosen": -1.5, "rejected": -2.5}
    (row,) = pair_rows([pair("yes", "no", ref=ref)], template, max_tokens=None, dropped=Counter())
    assert (row["ref_chosen"], row["ref_rejected"]) == (-1.5, -2.5)


def test_the_sums_are_those_of_a_plain_forward(tiny_model_folder, database, template):
    pairs = [pair("yes", "no"), pair("a long answer", "b", "another prompt")]
    done, dropped = with_reference(pairs, tiny_model_folder, database, name="tiny")
    assert dropped == {}
    model = load_policy(tiny_model_folder, dtype="float32").eval()
    for one, ids in zip(done, pair_ids(pairs, template, max_tokens=None, dropped=Counter()), strict=True):
        assert one.ref["model"] == "tiny"
        for side, answer in (("chosen", ids.chosen), ("rejected", ids.rejected)):
            tokens = torch.tensor([ids.prompt + answer])
            with torch.no_grad():
                logps = model(input_ids=tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
            # the answer's tokens are predicted from the prompt's last one on
            assert one.ref[side] == pytest.approx(float(logps[len(ids.prompt) - 1 :].sum()), abs=1e-4)


def test_a_second_pass_finds_what_the_first_one_made(tiny_model_folder, database, monkeypatch):
    pairs = [pair("yes", "no")]
    first, _ = with_reference(pairs, tiny_model_folder, database, name="tiny")

    def no_forward(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(reference, "_sums", no_forward)
    assert with_reference(pairs, tiny_model_folder, database, name="tiny")[0] == first


def test_long_lists_are_cut_into_batches_of_like_length(tiny_model_folder, database, monkeypatch):
    seen = []
    real = reference._sums
    monkeypatch.setattr(reference, "BATCH_TOKENS", 120)
    monkeypatch.setattr(reference, "_sums", lambda model, batch: seen.append(len(batch)) or real(model, batch))
    pairs = [pair("a" * n, "b", f"p{n}") for n in (40, 2, 3, 41, 4)]
    done, _ = with_reference(pairs, tiny_model_folder, database, name="tiny")
    assert [one.state_id for one in done] == [one.state_id for one in pairs]
    assert sum(seen) == 5
    assert len(seen) >= 3


def test_pairs_beyond_the_models_positions_have_no_log_probs(tiny_model_folder, database):
    from composer_core.hf.tiny import MAX_POSITIONS

    pairs = [pair("yes", "no"), pair("y" * MAX_POSITIONS, "no")]
    done, dropped = with_reference(pairs, tiny_model_folder, database, name="tiny")
    assert [one.chosen["content"] for one in done] == ["yes"]
    assert dropped == {"too long": 1}
