"""What a checkpoint holds beside weights: state as JSON with its tensors in a safetensors file, and random generators.

For every backend; no pickle. State is mappings, sequences, numbers, texts, None and tensors, at any depth; sequences
come back as lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_TENSOR = "__tensor__"


def save_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write `<name>.json`, and `<name>.safetensors` with each tensor under its path in the state.

    Raises:
        TypeError: something in it is neither JSON nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    document = _without_tensors(state, path="", tensors=tensors)
    (folder / f"{name}.json").write_text(json.dumps(document, sort_keys=True), encoding="utf-8")
    save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """What `save_state` was given, on the CPU."""
    tensors = load_file(folder / f"{name}.safetensors")
    document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    restored: dict[str, Any] = _with_tensors(document, tensors)
    return restored


def capture_rng() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's global generators, on every device, as `save_state` takes it."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {"keys": torch.from_numpy(numpy.asarray(keys, dtype="int64")), "rest": [position, has_gauss, cached]},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back where `capture_rng` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys = state["numpy"]["keys"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, *state["numpy"]["rest"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _without_tensors(value: Any, *, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous().clone()  # clone: safetensors refuses shared memory
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, path=f"{path}/{key}", tensors=tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, path=f"{path}/{i}", tensors=tensors) for i, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value
