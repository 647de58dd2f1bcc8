"""What a rank of verl's engine holds: its shards of what is trained, the optimiser's, and the model as a folder.

verl's own checkpoints are pickles; these are JSON and safetensors, one folder per rank, and only fit the same number of
ranks. Weights that are not trained come from the model's folder again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_core.errors import RunFailed
from composer_core.run.collectives import process_index, world_size
from composer_core.run.context import rank_folder
from composer_core.run.state import capture_rng, load_state, restore_rng, save_state
from composer_verl.engine import ComposerEngine

ENGINE, LOSS = "engine", "loss"
"""States in a rank's folder."""


def save_engine(engine: ComposerEngine, checkpoint: Path) -> None:
    """Write this rank's part into the folder of a checkpoint, between two optimiser steps."""
    folder = rank_folder(checkpoint, process_index())
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "ranks": world_size(),
        "trained": {name: local(p) for name, p in _trained(engine)},
        "optimizer": [{key: local(value) for key, value in own.items()} for own in _optimizer(engine)],
        "schedule": {name: value for name, value in engine.lr_scheduler.state_dict().items() if name != "lr_lambdas"},
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "rng": capture_rng(),
    }
    save_state(folder, ENGINE, state)
    save_state(folder, LOSS, engine.composition_state())


@torch.no_grad()
def load_engine(engine: ComposerEngine, checkpoint: Path) -> None:
    """Go back to where `save_engine` was called.

    Raises:
        RunFailed: it was saved by another number of ranks, or its model has other trained weights.
    """
    folder = rank_folder(checkpoint, process_index())
    state = load_state(folder, ENGINE)
    if state["ranks"] != world_size():
        raise RunFailed(
            f"the checkpoint was saved by {state['ranks']} ranks, and this run has {world_size()}",
            at=str(checkpoint),
            fix="resume with the same backend.processes and backend.nodes",
        )
    trained = dict(_trained(engine))
    if trained.keys() != state["trained"].keys():
        differing = sorted(trained.keys() ^ state["trained"].keys())
        raise RunFailed(f"the checkpoint has other trained weights: {differing[0]} and {len(differing) - 1} more")
    for name, parameter in trained.items():
        local(parameter).copy_(state["trained"][name])
    for parameter, own in zip(trained.values(), state["optimizer"], strict=True):
        engine.optimizer.state[parameter] = {key: _like(parameter, value) for key, value in own.items()}
    engine.lr_scheduler.load_state_dict(
        {**state["schedule"], "lr_lambdas": engine.lr_scheduler.state_dict()["lr_lambdas"]}
    )
    for group, rate in zip(engine.optimizer.param_groups, state["rates"], strict=True):
        group["lr"] = rate
    engine.load_composition(load_state(folder, LOSS))
    restore_rng(state["rng"])


def local(value: Any) -> Any:
    """Of a tensor this rank's part, sharing its memory; anything else as it is."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value.detach() if isinstance(value, Tensor) else value


def _trained(engine: ComposerEngine) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)


def _optimizer(engine: ComposerEngine) -> list[Mapping[str, Any]]:
    """The optimiser's state of each trained parameter, in their order."""
    return [engine.optimizer.state.get(parameter, {}) for _, parameter in _trained(engine)]


def _like(parameter: Tensor, value: Any) -> Any:
    """A part that was saved as the optimiser has it: sharded as its parameter, if it is of its shape."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    whole = torch.zeros_like(parameter, dtype=value.dtype)
    local(whole).copy_(value)
    return whole


def export_model(engine: ComposerEngine, folder: Path, *, dtype: torch.dtype, merge: bool) -> None:
    """Write the policy as a Hugging Face folder; a collective, of which rank 0 writes.

    Args:
        engine: holds it.
        folder: gets the whole model, or of a LoRA the adapter as peft reads it.
        dtype: of the weights written.
        merge: write the whole model with the adapter in it.
    """
    # of a LoRA these are the adapter's alone; gathered as they are asked for, on every rank
    weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
    whole: dict[str, Tensor] = {}
    for name, value in weights:
        if process_index() == 0:
            whole[name] = value.to("cpu", dtype)
    if process_index() != 0:
        return
    engine.model_config.tokenizer.save_pretrained(folder)
    if adapter is None:
        _write_model(engine, folder, whole, dtype=dtype)
    elif merge:
        _write_merged(engine, folder, whole, dtype=dtype)
    else:
        _write_adapter(engine, folder, whole)


def _write_model(engine: ComposerEngine, folder: Path, weights: dict[str, Tensor], *, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # only for how the folder is laid out
        model = AutoModelForCausalLM.from_config(engine.model_config.hf_config, dtype=dtype)
    model.generation_config = engine.model_config.generation_config or model.generation_config
    model.save_pretrained(folder, state_dict=weights)


def _write_merged(engine: ComposerEngine, folder: Path, weights: dict[str, Tensor], *, dtype: torch.dtype) -> None:
    """The adapter on the model that the run began with, whose own weights were not trained."""
    from peft import get_peft_model, set_peft_model_state_dict

    from composer_core.hf.models import load_policy

    own = engine.model_config
    # summed in float32, as the policy was: in bfloat16 a small adapter would vanish beside the weight
    base = load_policy(Path(own.local_path), dtype="float32", trust_remote_code=own.trust_remote_code)
    model = get_peft_model(base, copy(_adapter_config(engine)))
    set_peft_model_state_dict(model, weights)
    model.merge_and_unload().to(dtype).save_pretrained(folder)


def _write_adapter(engine: ComposerEngine, folder: Path, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    config = copy(_adapter_config(engine))
    config.inference_mode = True  # as peft writes it
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def _adapter_config(engine: ComposerEngine) -> Any:
    return engine.module.peft_config["default"]
