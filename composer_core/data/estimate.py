"""What a run will need of memory and money, as far as that can be known before it starts. Without torch.

Memory is a lower bound: weights, gradients, optimiser, reference and logits. Activations of the layers, a generation
cache, and the framework itself come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_core.data.model_size import ModelSize, measure, size_of
from composer_core.errors import ComposerError
from composer_core.hf.source import check_folder, local_folder
from composer_core.plugins.contributions import ExecutorPlugin
from composer_core.plugins.registry import Registry
from composer_core.spec.environment import has_placeholder
from composer_core.spec.model import ModelSpec, RunSpec
from composer_core.spec.rollouts import NONE

_BYTES = {"float32": 4, "bfloat16": 2}
_ADAPTER_BYTES = 4  # peft keeps adapters in float32 whatever the base is
_MOMENTS = 2  # AdamW: a mean and a mean square per trained parameter


@dataclass(frozen=True)
class Memory:
    """Bytes in one process; `unknown` says why nothing else is known."""

    parameters: int = 0
    trained: int = 0
    """Parameters that learn: the adapters', or all."""
    parts: Mapping[str, int] | None = None
    """What takes memory -> bytes."""
    unknown: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `plan --json`."""
        if self.parts is None:
            return {"unknown": self.unknown}
        parts = {name: size for name, size in self.parts.items() if size}
        return {"parameters": self.parameters, "trained": self.trained, "bytes": parts, "total": sum(parts.values())}

    def lines(self) -> dict[str, str]:
        """What it is -> how much, for people."""
        if self.parts is None:
            return {"unknown": self.unknown}
        shown = {"parameters": f"{self.parameters:,}, of which {self.trained:,} learn"}
        shown |= {name: in_bytes(size) for name, size in self.parts.items() if size}
        total = in_bytes(sum(self.parts.values()))
        return {**shown, "at least": f"{total} per process, plus activations"}


def memory(spec: RunSpec) -> Memory:
    """The memory of one training process; unknown for a model that is not on this machine."""
    try:
        size = _size(spec.model)
    except ComposerError as error:
        return Memory(unknown=error.problem)
    if isinstance(size, str):
        return Memory(unknown=size)
    train, model, lora = spec.train, spec.model, spec.model.lora
    width = _BYTES[model.dtype]
    trained, trained_width = size.parameters, width
    if lora is not None:
        targets = None if lora.targets == "all-linear" else lora.targets
        trained, trained_width = size.adapter_parameters(lora.rank, targets), _ADAPTER_BYTES
    objective = getattr(spec.loss.objective, "settings", None)
    full_reference = lora is None and getattr(objective, "kl_coef", 0.0) > 0
    # The head's output for the completions of one micro-batch, and its gradient; recorded data is projected in chunks.
    completions = 0 if spec.rollouts == NONE else train.micro_batch_size * train.max_completion_tokens
    logits = 2 * completions * size.vocabulary * width
    parts = {
        "weights": size.parameters * width,
        "adapters": trained * trained_width if lora is not None else 0,
        "gradients": trained * trained_width,
        "optimiser (AdamW)": _MOMENTS * trained * trained_width,
        "reference model (KL)": size.parameters * width if full_reference else 0,
        "logits of a micro-batch": logits,
    }
    return Memory(size.parameters, trained, parts)


def cost(spec: RunSpec, registry: Registry) -> dict[str, Any]:
    """What the executor's machines cost: `usd_per_hour`, and `usd` at most where there is a limit; else `unknown`."""
    block = spec.executor
    _, executor = registry.get(block.kind, block.use)
    assert isinstance(executor, ExecutorPlugin)
    price = executor.usd_per_hour(block.settings)
    if price is None:
        return {"unknown": f"executor {block.name!r} has no known price"}
    replicas = spec.replicas.count if spec.replicas is not None else 1
    per_hour = price * replicas
    limits = [spec.limits.usd] if spec.limits.usd is not None else []
    if spec.limits.hours is not None:
        limits.append(per_hour * spec.limits.hours)
    return {"usd_per_hour": round(per_hour, 4), **({"usd": round(min(limits), 2)} if limits else {})}


def in_bytes(size: int) -> str:
    """`1.3 GB`: decimal units, two digits."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.{0 if size >= 10 * factor else 1}f} {unit}"
    return f"{size} bytes"


def _size(model: ModelSpec) -> ModelSize | str:
    """The model's size, or why it is not known."""
    if model.builtin is not None:
        return measure(_tiny_shapes())
    if has_placeholder(model.path):
        return "model.path comes from the environment"
    folder = local_folder(model)
    if folder is None:
        return f"{model.path} is not a folder on this machine"
    check_folder(folder, gguf_file=model.gguf_file)
    return size_of(folder, gguf_file=model.gguf_file)


def _tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the built-in model (`hf/tiny.py`)."""
    layer: dict[str, tuple[int, ...]] = {
        "q_proj": (64, 64),
        "k_proj": (32, 64),
        "v_proj": (32, 64),
        "o_proj": (64, 64),
        "gate_proj": (128, 64),
        "up_proj": (128, 64),
        "down_proj": (64, 128),
        "q_norm": (16,),
        "k_norm": (16,),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    layers = {f"layers.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    return {"embed_tokens.weight": (103, 64), **layers, "norm.weight": (64,)}
