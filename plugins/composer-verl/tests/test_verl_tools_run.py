"""A run whose rollouts call a tool: two turns, and what went wrong in the first is taught by `sdpo`."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROGRAM = "import sys; from composer_core.cli.main import main; sys.exit(main())"
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """
{%- if tools -%}{{- '<|im_start|>system\\nTools:' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
CALLS = [f'<tool_call>{{"name": "look", "arguments": {{"key": "{key}"}}}}</tool_call>' for key in "ab?!"]
"""Each is one token; the tool fails for the last two."""
SPEC = """\
version: 1
name: tools
model: {path: ./model}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: contains, column: answer}]
rollout: {max_turns: 2, tools: ["./tools.py:look"]}
loss:
  objective: {use: grpo}
  channels: [{use: sdpo, weight: 1.0, success: 2.0}]
train: {steps: 2, prompts_per_step: 2, group_size: 4, max_completion_tokens: 200, learning_rate: 1.0e-3}
backend: {use: verl}
executor: {use: inline, threads: 1}
"""
TOOLS = '''\
def look(key: str) -> str:
    """Look up.

    Args:
        key: What.
    """
    if key in "?!":
        raise KeyError("nothing is called so")
    return key.upper()
'''


def save_model(folder):
    """A policy that calls the tool in nearly every turn: its layers pass on only which token was the last."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: i for i, token in enumerate(["<pad>", END, "<unk>", START, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, unk_token="<unk>", padding_side="left",
        extra_special_tokens=[START], clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.add_tokens(CALLS)
    calls = tokenizer.convert_tokens_to_ids(CALLS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for silent in (layer.self_attn.o_proj, layer.mlp.down_proj, model.lm_head, model.model.embed_tokens):
            silent.weight.zero_()
        model.model.embed_tokens.weight[:, 1] = 1  # normalised to 4
        model.model.embed_tokens.weight[calls] = torch.eye(16)[0]
        model.lm_head.weight[calls, 1] = 2  # logit 8 against 0
        model.lm_head.weight[1, 0] = 4  # behind a call its turn ends: logit 16
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_errors_of_tools_are_taught_where_they_happened(tmp_path):
    save_model(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"Upper case of {c}?"}], "answer": c.upper()} for c in "abab"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "spec.yaml").write_text(SPEC)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "spec.yaml"], cwd=tmp_path, env=environment, text=True, capture_output=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["upstream/training/rollout_probs_diff_max"] < 1e-6 for line in lines] == [True, True]
    # half of the calls fail, and a failed one is two tokens: the call and the end of its turn
    assert sum(line["tokens/sdpo"] for line in lines) > 0
    assert all(line["tokens/sdpo"] % 2 == 0 for line in lines)
    assert all(0 < line["active/sdpo"] <= 1 for line in lines)
    said = (run / "rollouts.jsonl").read_text()
    assert "nothing is called so" in said
