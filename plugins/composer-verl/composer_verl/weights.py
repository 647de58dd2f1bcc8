"""Weights of a rollout's model, written over in place from what verl's trainer sends.

`buckets` cuts a stream of named tensors into parts of bounded size (the trainer's side); `Weights` writes them into a
model and checks that every name came (the rollout's side). Names are those of a Hugging Face state dict. A LoRA run
that does not merge sends the base model once and then the adapter alone, under peft's names. No Ray, no server here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_core.errors import RunFailed

Bucket = list[tuple[str, Tensor]]

BUCKET_BYTES = 256 * 2**20
"""What is under way at once at most, beside the model itself; a tensor that is larger travels alone."""


def buckets(named: Iterable[tuple[str, Tensor]], *, size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Parts of at most `size` bytes, on the CPU, in the tensors' own dtypes, each owning just its own memory."""
    part: Bucket = []
    filled = 0
    for name, tensor in named:
        if part and filled + tensor.nbytes > size:
            yield part
            part, filled = [], 0
        part.append((name, _packed(tensor)))
        filled += tensor.nbytes
    if part:
        yield part


def _packed(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without the rest of the storage that it may be a view into: that would travel too."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Weights:
    """Where each name that verl may send is kept in a model.

    Args:
        model: a `transformers` model; where an adapter arrives, it is wrapped in place by peft, once.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._adapted = False
        self._places: dict[str, Tensor] = {}
        self._left: set[str] = set()

    def begin(self, adapter: Mapping[str, Any] | None = None, *, whole: bool = True) -> None:
        """Expect the whole model, or (`whole` false) the adapter alone.

        `adapter` are the fields of peft's configuration; the first one is put on the model here.

        Raises:
            RunFailed: the model has an adapter already, of which a run without one could not know.
        """
        if adapter is None and self._adapted:
            raise RunFailed("the trainer sent weights without an adapter to a rollout that has one")
        if adapter is not None and not self._adapted:
            self._wrap(adapter)
        self._places = self._base() if whole else self._adapter()
        self._left = set(self._places)

    def write(self, bucket: Bucket) -> None:
        """Write a part, cast to the model's dtype.

        Raises:
            RunFailed: a name or a shape that the model does not have.
        """
        named = [(name.replace(".base_layer", ""), tensor) for name, tensor in bucket]
        unknown = [name for name, _ in named if name not in self._places]
        if unknown:
            raise RunFailed(_mismatch("sent weights that the rollout's model does not have", unknown))
        for name, tensor in named:
            place = self._places[name]
            if place.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, here {tuple(place.shape)}"
                raise RunFailed(f"the trainer sent {name} in the shape {shapes}")
            place.copy_(tensor)
        self._left -= {name for name, _ in named}

    def end(self) -> None:
        """Check that everything came. A name whose tensor is tied to one that came need not come itself.

        Raises:
            RunFailed: names that did not come.
        """
        came = {_memory(place) for name, place in self._places.items() if name not in self._left}
        missing = sorted(name for name in self._left if _memory(self._places[name]) not in came)
        if missing:
            raise RunFailed(_mismatch("did not send all weights of the rollout's model", missing))

    def _wrap(self, adapter: Mapping[str, Any]) -> None:
        from peft import PeftConfig, get_peft_model

        config = PeftConfig.from_peft_type(**adapter)  # type: ignore[no-untyped-call]
        # Without autocast: the adapter stays in the model's own dtype, as all that is written here.
        self.model = get_peft_model(self.model, config, autocast_adapter_dtype=False).eval()
        self._adapted = True

    def _base(self) -> dict[str, Tensor]:
        if not self._adapted:
            return dict(self.model.state_dict())
        state = self.model.get_base_model().state_dict()
        return {name.replace(".base_layer", ""): place for name, place in state.items() if "lora_" not in name}

    def _adapter(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(self.model))


def _memory(place: Tensor) -> tuple[int, torch.Size]:
    return place.data_ptr(), place.shape


def _mismatch(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the trainer {what}: {', '.join(names[:3])}{more}"
