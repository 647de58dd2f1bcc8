"""Which language models are "hidden states times a head", taken apart for the losses that project in chunks.

Only model types in `HEADS` are taken apart: a test compares each with its own logits. Another type is computed from
its logits, which is exact and needs more memory. To add one, add its row and run that test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from composer_core.loss.head import Head

Reading = Callable[[Any], dict[str, float]]
"""From a model's config to the numbers of `Head` beside weight and bias."""


def _plain(config: Any) -> dict[str, float]:
    return {}


def _softcap(config: Any) -> dict[str, float]:
    cap = config.final_logit_softcapping
    return {} if cap is None else {"softcap": float(cap)}


def _times(name: str) -> Reading:
    return lambda config: {"logit_scale": float(getattr(config, name))}


def _over(name: str) -> Reading:
    return lambda config: {"logit_scale": 1 / float(getattr(config, name))}


_PLAIN_TYPES = """
apertus deepseek_v3 ernie4_5 exaone4 gemma glm glm4 gpt2 gpt_neox gpt_oss llama ministral mistral mixtral olmo olmo2
olmo3 phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
"""

HEADS: Mapping[str, Reading] = {
    **dict.fromkeys(_PLAIN_TYPES.split(), _plain),
    **dict.fromkeys(("gemma2", "gemma3_text", "nanochat"), _softcap),
    **dict.fromkeys(("cohere", "cohere2"), _times("logit_scale")),
    "falcon_h1": _times("lm_head_multiplier"),
    # hyperclovax MULTIPLIES by a number of this name, which is why this is a table and no rule
    **dict.fromkeys(("granite", "granitemoe"), _over("logits_scaling")),
}
"""By `config.model_type`, as transformers 5 computes them."""


@dataclass(frozen=True)
class Parts:
    """A causal LM taken apart: its logits are `head` of the last hidden state of `backbone`."""

    backbone: nn.Module
    head: Head


def take_apart(network: nn.Module) -> Parts | None:
    """Backbone and head of a Hugging Face causal LM, also inside a LoRA model; None for one that is not known.

    The head must be a plain linear layer: an adapter on it would be left out.
    """
    model: Any = network
    if hasattr(network, "peft_config"):
        if any(str(getattr(c.peft_type, "value", c.peft_type)) != "LORA" for c in model.peft_config.values()):
            return None  # prompt tuning and its like change the input, in the wrapper's forward
        model = model.get_base_model()
    reading = HEADS.get(getattr(getattr(model, "config", None), "model_type", ""))
    if reading is None or not hasattr(model, "get_output_embeddings"):
        return None
    linear, backbone = model.get_output_embeddings(), model.base_model
    if type(linear) is not nn.Linear or backbone is model:
        return None
    return Parts(backbone, Head(linear.weight, linear.bias, **reading(model.config)))
