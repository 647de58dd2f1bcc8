"""A GGUF file as an ordinary model folder: dequantised to fp32 once, kept in the cache under its content's hash."""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from composer_core.errors import MissingError, UsageError
from composer_core.hf.cache import cached_folder
from composer_core.hf.source import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Raise it when the conversion changes: cached folders carry it in their name."""

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""A tokenizer's attribute -> its name in a GGUF file's keys."""


def dequantised(folder: Path, gguf_file: str) -> Path:
    """The cached Hugging Face folder of `folder/gguf_file`, converted when it is not there yet.

    Takes about 20 s and 4 bytes of disk per parameter the first time, then as long as hashing the file.

    Raises:
        UsageError: transformers cannot read the file.
        MissingError: the package `gguf` is not installed, or the cache cannot be written.
    """
    import transformers

    file = folder / gguf_file
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", file.stem)
    name = f"{stem}-{file.stat().st_size}-{_sha256(file)[:16]}-tf{transformers.__version__}-v{FORMAT}"
    return cached_folder(name, make=partial(_convert, folder, gguf_file))


def gguf_tokenizer(source: Path, gguf_file: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, nothing written; raises whatever parsing hits."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    _use_own_special_tokens(tokenizer, source / gguf_file)
    return tokenizer


def _convert(source: Path, gguf_file: str, destination: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        tokenizer = gguf_tokenizer(source, gguf_file)
        # Without a dtype some versions keep the blocks packed, and a packed model can be neither trained nor saved.
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    except ImportError as error:
        raise MissingError(f"reading a GGUF file: {error}", fix="pip install 'composer-core[hf]'") from error
    except Exception as error:  # the reader raises whatever its parsing hits: struct.error, KeyError, IndexError, ...
        raise UsageError(
            f"transformers cannot read this GGUF file: {type(error).__name__}: {first_line(error)}",
            at=str(source / gguf_file),
            fix="download it again if it may be cut short; else take the model's safetensors folder",
        ) from error
    try:
        model.save_pretrained(destination)
        tokenizer.save_pretrained(destination)
    except SafetensorError as error:  # its writer's form of a full disk; the cache knows what to say about an OSError
        raise OSError(str(error)) from error


def _use_own_special_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Give the tokenizer the special tokens that the file names.

    transformers 5.10 guesses them instead: SmolLM2's end token becomes <|im_start|>, and with it no completion would
    ever count as ended.
    """
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    for attribute, key in _SPECIAL_TOKENS.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False  # its default here, True, eats the space before a full stop


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
