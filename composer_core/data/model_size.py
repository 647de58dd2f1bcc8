"""How large a model is, from the headers of its weight files: names and shapes, no weights, no torch.

Formats: safetensors (8 bytes of length, then JSON) and GGUF (https://github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_core.errors import UsageError
from composer_core.hf.source import json_object

Shapes = Mapping[str, tuple[int, ...]]

_EMBEDDING = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings|token_embd)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
_GGUF_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF type of a value -> its bytes; 8 is text and 9 an array."""


@dataclass(frozen=True)
class ModelSize:
    """Counts of one model."""

    parameters: int
    vocabulary: int
    linear: tuple[tuple[str, int, int], ...]
    """(name, rows, columns) of each matrix that an adapter can go to: embedding and head left out."""

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Parameters of LoRA adapters (Hu et al. 2021), rank x (rows + columns) each; `targets` None: on all."""
        chosen = [one for one in self.linear if targets is None or one[0].rpartition(".")[2] in targets]
        return sum(rank * (rows + columns) for _, rows, columns in chosen)


def size_of(folder: Path, *, gguf_file: str | None = None) -> ModelSize:
    """The size of the model in a folder.

    Raises:
        UsageError: a weight file is not readable as what its name says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if gguf_file is not None:
        shapes = dict(_read(folder / gguf_file, _gguf_shapes))
    else:
        for file in _shards(folder):
            shapes |= _read(file, _safetensors_shapes)
    return measure(shapes)


def measure(shapes: Shapes) -> ModelSize:
    """Counts from tensor names and shapes."""
    embedding = [shape for name, shape in shapes.items() if _EMBEDDING.search(name)]
    linear = tuple(
        (name.removesuffix(".weight"), *shape)
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and not (_EMBEDDING.search(name) or _HEAD.search(name) or "norm" in name)
    )
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return ModelSize(parameters, embedding[0][0] if embedding else 0, linear)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json_object(index).get("weight_map", {}).values()})
    return sorted(folder.glob("*.safetensors"))


def _read(file: Path, reader: Callable[[mmap.mmap], Shapes]) -> Shapes:
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return reader(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"the header of this weight file is not readable: {error}", at=str(file)) from error


def _safetensors_shapes(data: mmap.mmap) -> Shapes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _gguf_shapes(data: mmap.mmap) -> Shapes:
    magic, _, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    at = 24
    for _ in range(pairs):
        at = _skip_value(data, _skip_text(data, at))
    shapes = {}
    for _ in range(tensors):
        end = _skip_text(data, at)
        name = data[at + 8 : end].decode()
        (dimensions,) = struct.unpack_from("<I", data, end)
        shape = struct.unpack_from(f"<{dimensions}Q", data, end + 4)
        shapes[_hugging_face_name(name)] = shape[::-1]  # GGUF puts the fastest dimension first
        at = end + 4 + 8 * dimensions + 12
    return shapes


def _hugging_face_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    block, _, part = stem.rpartition(".")
    return f"{block}.{_GGUF_NAMES.get(part, part)}.{end}".lstrip(".")


def _skip_text(data: mmap.mmap, at: int) -> int:
    (length,) = struct.unpack_from("<Q", data, at)
    return at + 8 + int(length)


def _skip_value(data: mmap.mmap, at: int) -> int:
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind == 8:
        return _skip_text(data, at)
    if kind != 9:
        return at + _SCALARS[kind]
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item in _SCALARS:
        return at + _SCALARS[item] * int(count)
    if item != 8:
        raise ValueError(f"an array of type {item}")
    for _ in range(count):
        at = _skip_text(data, at)
    return at
