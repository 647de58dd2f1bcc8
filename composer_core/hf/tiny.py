"""The built-in model: a random two-layer Qwen3 that reads and writes characters, made offline in a second.

It knows nothing, and learns a visible rule (write digits) in some thirty GRPO steps on a laptop's CPU; that is what
it is for. Its tokenizer has one token per printable ASCII character, so tests can count tokens by counting letters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer_core.hf.cache import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

FORMAT = 1
"""Raise it when anything here changes what is written: cached folders carry it in their name."""

ROLES = ("system", "user", "assistant", "tool")
PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('no role ' + message.role + ': system, user, assistant and tool are known') -}}"
    "{%- endif -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Each message stands alone, so a chat's text is a prefix of the text of every longer chat that begins with it."""


def make_tiny(folder: Path, *, seed: int) -> None:
    """Write the model and its tokenizer to `folder`, all or nothing. The same seed gives the same weights, bit by bit.

    Raises:
        FileExistsError: `folder` is there already and is not an empty folder.
    """
    with new_folder(folder) as part:
        write_tiny(part, seed=seed)


def write_tiny(folder: Path, *, seed: int) -> None:
    """`make_tiny` into a folder whose completeness the caller looks after."""
    tokenizer = tiny_tokenizer()
    _model(len(tokenizer), seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The built-in model's tokenizer alone, nothing written."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    roles = [f"<|{role}|>" for role in ROLES]
    characters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *roles, *characters, "\n"])}
    # BPE without a merge never joins characters, and unlike a word model it needs no pre-tokenizer that eats spaces.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=roles,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _model(vocabulary_size: int, *, seed: int) -> Qwen3ForCausalLM:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Qwen3, not Qwen2: for a folder that says qwen2, AutoTokenizer builds its byte-level tokenizer and drops spaces.
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's own random numbers stay as they were
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
