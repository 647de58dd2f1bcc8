"""What a checkpoint of the toy trainer holds: model and tokenizer, the optimiser, its place, the loss's state.

config.json, model.safetensors, tokenizer...   a Hugging Face folder
optimizer.safetensors                          "<parameter>.<exp_avg | exp_avg_sq | step>"
toy.json, toy.safetensors                      generators, place among the prompts, unused rollouts (`toy_state.py`)
loss.json, loss.safetensors                    state of channels and objective
rank1/, rank2/, ...                            toy.json, toy.safetensors of the other ranks
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLACE, LOSS = "toy", "loss"
"""Names of the two states."""
_OPTIMIZER = "optimizer.safetensors"


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
    save_file(tensors, folder / _OPTIMIZER)


def load_optimizer(folder: Path, policy: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_optimizer` wrote."""
    parameters = dict(policy.named_parameters())
    for key, value in load_file(folder / _OPTIMIZER).items():
        name, _, what = key.rpartition(".")
        optimizer.state[parameters[name]][what] = value
