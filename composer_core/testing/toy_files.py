"""What a checkpoint of the toy trainer holds: model and tokenizer, the optimiser, the loss's own state. No pickle.

config.json, model.safetensors, tokenizer...   a Hugging Face folder
optimizer.safetensors                          "<parameter>.<exp_avg | exp_avg_sq | step>"
loss.json, loss.safetensors                    state of channels and objective: values, and tensors by path
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TENSOR = "__tensor__"


def save_model(folder: Path, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A folder that transformers loads."""
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_optimizer(folder: Path, policy: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Moments by the name of their parameter, so that an order of parameters is never relied on."""
    tensors = {
        f"{name}.{key}": value
        for name, parameter in policy.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(tensors, folder / "optimizer.safetensors")


def save_loss_state(folder: Path, state: Mapping[str, Any]) -> None:
    """JSON, with each tensor replaced by the name it has in the safetensors file beside it."""
    tensors: dict[str, Tensor] = {}
    document = _without_tensors(state, path="", tensors=tensors)
    (folder / "loss.json").write_text(json.dumps(document, sort_keys=True), encoding="utf-8")
    save_file(tensors, folder / "loss.safetensors")


def load_loss_state(folder: Path) -> dict[str, Any]:
    """What `save_loss_state` was given; sequences come back as lists."""
    tensors = load_file(folder / "loss.safetensors")
    document = json.loads((folder / "loss.json").read_text(encoding="utf-8"))
    restored: dict[str, Any] = _with_tensors(document, tensors)
    return restored


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
