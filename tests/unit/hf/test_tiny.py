from __future__ import annotations

import hashlib
import string

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from composer_core.hf.tiny import make_tiny

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_each_character_is_one_token_and_comes_back(tokenizer):
    text = CHARACTERS + "two  spaces\n\n end "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_other_characters_are_unknown_not_dropped(tokenizer):
    assert tokenizer("aéb")["input_ids"] == [
        tokenizer.convert_tokens_to_ids("a"),
        tokenizer.unk_token_id,
        tokenizer.convert_tokens_to_ids("b"),
    ]


def test_the_model_has_one_embedding_per_token_and_the_stated_size(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, Qwen3ForCausalLM)
    # 96 characters + pad, end, unknown + 4 roles
    assert len(tokenizer) == model.config.vocab_size == 103
    # embedding 103*64, tied; per layer: q 64*64, k and v 64*32 each, o 64*64, mlp 3*64*128, norms 2*64 and 2*16;
    # final norm 64
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert model.num_parameters() == 103 * 64 + 2 * per_layer + 64


def test_padding_is_on_the_left_and_end_differs_from_padding(tokenizer):
    assert tokenizer(["a", "abc"], padding=True)["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "a"},
]


def test_the_chat_template_shows_every_role(tokenizer):
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        '<|system|>s<|end|><|user|>u<|end|><|assistant|>[{"name": "f"}]<|end|><|tool|>t<|end|><|assistant|>a<|end|>'
    )


def test_a_longer_chat_begins_with_the_shorter_one(tokenizer):
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    for turns in range(1, len(CHAT)):
        answered_next = CHAT[turns]["role"] == "assistant"
        part = tokenizer.apply_chat_template(CHAT[:turns], add_generation_prompt=answered_next, return_dict=False)
        assert whole[: len(part)] == part


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="no role wizard: system, user, assistant and tool are known"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_callers_randomness_alone(folder, tmp_path):
    import torch

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_tiny(tmp_path / "again", seed=0)
    make_tiny(tmp_path / "other", seed=1)
    assert torch.equal(torch.rand(3), expected)

    def digest(path):
        return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()

    assert digest(tmp_path / "again") == digest(folder)
    assert digest(tmp_path / "other") != digest(folder)


def test_an_existing_folder_is_not_written_over(folder):
    before = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(FileExistsError, match=f"^{folder} exists already$"):
        make_tiny(folder, seed=1)
    assert sorted(path.name for path in folder.parent.iterdir()) == before
