"""What `plan --data` says about a tokenizer, on tokenizers whose answers are known by construction."""

from __future__ import annotations

import json

import pytest

from composer_core.data.tokenizer_check import check_tokenizer
from composer_core.hf.tiny import CHAT_TEMPLATE, tiny_tokenizer
from composer_core.plugins.contributions import Kind
from composer_core.plugins.settings import NoSettings
from composer_core.spec.model import DataSpec, LossSpec, ModelSpec, Plugged, PromptsSpec, RunSpec, TrainSpec

ROWS = [{"prompt": [{"role": "user", "content": "x" * length}], "answer": "7"} for length in (3, 5, 4)]
# <|user|> xxx <|end|> <|assistant|>: a token per letter and three more
LENGTHS = {"min": 6, "median": 7, "max": 8, "measured": 3, "of": 3}


def spec(model, *, chat=True):
    def block(kind, use):
        return Plugged(kind=kind, use=use, owner="x", settings=NoSettings())

    return RunSpec(
        version=1,
        name="test",
        model=model,
        data=DataSpec(prompts=PromptsSpec(builtin="digits", chat=chat), rewards=[block(Kind.REWARD, "regex")]),
        loss=LossSpec(objective=block(Kind.OBJECTIVE, "grpo")),
        train=TrainSpec(steps=1, max_completion_tokens=20),
        backend=block(Kind.BACKEND, "toy"),
        executor=block(Kind.EXECUTOR, "inline"),
    )


@pytest.fixture
def folder(tmp_path):
    """`folder(template=..., config={...}, generation={...})`: a model folder with the tiny tokenizer and no weights."""

    def _make(*, template=CHAT_TEMPLATE, config=None, generation=None, pad=None):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        if pad is not None:
            tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 103, "model_type": "qwen3", **(config or {})}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelSpec(path=str(tmp_path))

    return _make


def test_the_built_in_tokenizer_is_described_whole():
    found = check_tokenizer(spec(ModelSpec(builtin="tiny")), ROWS)
    assert found.lines() == {
        "tokenizer": f"{found.kind}, 103 tokens",
        "special tokens": "bos none, eos <|end|> (1), pad <pad> (0), unk <unk> (2)",
        "a completion ends at": "<|end|> (1)",
        "chat template": "a chat's text begins the text of every chat that goes on from it",
        "prompt and answer": "the prompt's ids begin those of prompt and answer in 3 samples",
        "prompt tokens": "min 6, median 7, max 8 (3 prompts)",
    }
    assert found.lengths == LENGTHS
    assert json.loads(json.dumps(found.to_json()))["lengths"] == LENGTHS


def test_ends_come_from_the_tokenizer_and_the_generation_config(folder):
    found = check_tokenizer(spec(folder(generation={"eos_token_id": [1, 4]})), ROWS)
    assert found.ends == ("<|end|> (1)", "<|user|> (4)")
    assert not found.pad_is_end


def test_padding_with_the_end_token_is_noted(folder):
    found = check_tokenizer(spec(folder(pad="<|end|>")), ROWS)
    assert found.pad_is_end
    assert found.lines()["padding"] == "the end token pads: only positions tell padding from an end, never ids"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # the number of messages stands in front: every longer chat begins otherwise
        ("{{ messages | length }}" + CHAT_TEMPLATE, "earlier turns are rendered differently once a chat goes on"),
        # thinking is kept in the last message only
        (
            "{%- for message in messages -%}{{- '<|' + message.role + '|>' -}}"
            "{%- if loop.last -%}{{- message.content -}}{%- else -%}{{- message.content.split('</think>')[-1] -}}"
            "{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
            "stable, but thinking in earlier turns is left out once a chat goes on",
        ),
        ("{{ raise_exception('no') }}", None),
    ],
    ids=["counts-messages", "drops-thinking", "refuses"],
)
def test_a_template_that_changes_what_was_said_is_told(folder, template, said):
    rows = ROWS if said else []
    found = check_tokenizer(spec(folder(template=template)), rows)
    assert found.template == (said or "it does not render a plain conversation: no")


def test_a_template_that_writes_more_before_an_answer_than_it_promised_is_told(folder):
    template = CHAT_TEMPLATE.replace(
        "'|>' + (message.content or '')",
        "'|>' + ('#' if message.role == 'assistant' else '') + (message.content or '')",
    )
    assert template != CHAT_TEMPLATE
    found = check_tokenizer(spec(folder(template=template)), ROWS)
    assert found.prefix == ()  # '#' comes after the prompt's last token: the prompt itself is still a prefix
    template = CHAT_TEMPLATE.replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|>!' -}}")
    found = check_tokenizer(spec(folder(template=template)), ROWS[:1])
    assert found.prefix == (
        "with an answer the prompt's own tokens change from token 6 of 7 on: '!' became '7<|end|>'",
    )


def test_a_raw_prompt_whose_last_token_merges_with_the_answer_is_told(tmp_path):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # "1" and "17" are tokens, and merging is greedy: 1 | 7 never stays apart
    backend = Tokenizer(models.BPE(vocab={"<e>": 0, "1": 1, "7": 2, "17": 3}, merges=[("1", "7")]))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", pad_token="<e>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4, "model_type": "qwen3"}))
    rows = [{"prompt": "1", "answer": "7"}, {"prompt": "7", "answer": "7"}]
    found = check_tokenizer(spec(ModelSpec(path=str(tmp_path)), chat=False), rows)
    assert found.prefix == ("with an answer the prompt's own tokens change from token 0 of 1 on: '1' became '17'",)
    assert found.template == ""


def test_prompts_too_long_for_the_model_are_told(folder):
    found = check_tokenizer(spec(folder(config={"max_position_embeddings": 27})), ROWS)
    assert found.too_long == "the longest prompt and max_completion_tokens are 28 tokens, the model has 27 positions"
    assert check_tokenizer(spec(folder(config={"max_position_embeddings": 28})), ROWS).too_long == ""


def test_a_model_that_is_not_on_this_machine_is_left_to_the_run():
    found = check_tokenizer(spec(ModelSpec(path="acme/model")), ROWS)
    assert found.to_json() == {"unknown": "acme/model is not on this machine: looked at when the run starts"}


def test_data_that_is_read_later_leaves_the_rest():
    found = check_tokenizer(spec(ModelSpec(builtin="tiny")), [])
    assert (found.samples, found.lengths, found.vocabulary) == (0, {}, 103)


def test_many_prompts_are_measured_evenly():
    rows = [{"prompt": [{"role": "user", "content": "x" * (1 + index // 1000)}]} for index in range(5000)]
    lengths = check_tokenizer(spec(ModelSpec(builtin="tiny")), rows).lengths
    assert lengths == {"min": 4, "median": 6, "max": 8, "measured": 1667, "of": 5000}
