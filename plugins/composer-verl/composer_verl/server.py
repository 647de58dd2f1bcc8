"""The rollout's server: a transformers model that completes verl's requests, in batches, with the trainer's weights.

`HFServer` is an asynchronous Ray actor (rollout.py starts it) and works as well without Ray, in one event loop. One
thread owns the model: batches and weights go through it one after the other, and no batch starts while weights are
half new. How tokens are drawn stands in sampling.py, how weights are written in weights.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import TokenOutput

from composer_core.errors import RunFailed, UsageError
from composer_verl.sampling import Completion, Request, complete, read_sampling
from composer_verl.weights import Bucket, Weights

WINDOW_S = 0.02
"""How long a batch waits for company, in seconds: the agent loops of one step send their requests within it."""

Answer = tuple[Completion, int | None]
"""What a request drew, and the step of the weights it drew with."""
Waiting = tuple[Request, "asyncio.Future[Answer]"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server needs of verl's configuration."""

    model: str
    """A Hugging Face folder."""
    dtype: str
    """A torch dtype's name; what the trainer sends is cast to it."""
    load: bool
    """Whether the weights are read from the folder at start; the trainer sends all of them otherwise."""
    prompt_length: int
    response_length: int
    """Both in tokens; a request without a limit of its own ends where their sum does."""
    max_batch: int
    seed: int
    """The run's: the seed of a request is made of it where the request brings none."""
    window: int | None = None
    """The most tokens of prompt and response where that is less than the model's window."""
    ignore_eos: bool = False
    """For requests that do not say."""
    attention: str = "sdpa"
    """The attention of transformers to use."""
    trust_remote_code: bool = False
    override: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's configuration, the same as the trainer's."""


def load_model(settings: ServerSettings) -> Any:
    """The model in eval mode on the device of verl's platform. Its weights are random unless they are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.utils.model import update_model_config

    trust = settings.trust_remote_code
    config = AutoConfig.from_pretrained(settings.model, trust_remote_code=trust)
    update_model_config(config, override_config_kwargs=dict(settings.override))  # type: ignore[no-untyped-call]
    common: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": settings.attention,
        "trust_remote_code": trust,
    }
    if settings.load:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, **common)
    else:
        model = AutoModelForCausalLM.from_config(**common)  # type: ignore[no-untyped-call]
    return model.to(get_platform().device_name).eval()


def stopping_ids(settings: ServerSettings) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's, and all that the folder's generation config names."""
    from transformers import AutoTokenizer
    from verl.utils.model import get_generation_config

    trust = settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(settings.model, trust_remote_code=trust)
    generation = get_generation_config(settings.model, trust_remote_code=trust)
    named = generation.eos_token_id if generation is not None else None
    several = named if isinstance(named, list) else [named]
    return tuple(sorted({i for i in (*several, tokenizer.eos_token_id) if i is not None}))


class HFServer:
    """Completes requests in batches and takes the trainer's weights; verl calls its methods by name.

    `sleep`, `wake_up` and `clear_kv_cache` do nothing: the cache of a batch lives as long as the batch, and the
    weights stay where they are for the next update to be written over.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._weights = Weights(load_model(settings))
        self._eos = stopping_ids(settings)
        total = settings.prompt_length + settings.response_length
        bounds = (total, settings.window, getattr(self._weights.model.config, "max_position_embeddings", None))
        self._longest = min(bound for bound in bounds if bound is not None)
        self._global_steps: int | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="composer-hf")
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._fault: str = "" if settings.load else "the trainer has not sent any weights yet"
        self._settled.set()

    async def ready(self) -> None:
        """Return once the model is there: Ray answers no call before the constructor is through."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """Complete one prompt.

        `sampling_params["seed"]` makes the draw repeatable; without it the seed is made of the run's and of
        `request_id`, which verl draws at random.

        Raises:
            UsageError: images, a prompt that leaves no room, sampling parameters that are not known here.
            RunFailed: there are no whole weights to generate with.
        """
        if image_data or video_data:
            raise UsageError("composer_hf reads text only", at="rollout", fix="use rollout: vllm or sglang")
        request = self._request(request_id, prompt_ids, sampling_params)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((request, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        completion, step = await future
        return TokenOutput(
            token_ids=completion.tokens,
            log_probs=completion.logps,
            stop_reason="completed",  # what verl's own servers say, at a limit too
            extra_fields={"global_steps": step},
        )

    async def update_weights(
        self,
        bucket: Bucket,
        *,
        first: bool,
        last: bool,
        step: int | None,
        adapter: Mapping[str, Any] | None = None,
        whole: bool = True,
    ) -> None:
        """Write one part of the trainer's weights; requests wait from the first part to the last.

        Args:
            bucket: names and tensors.
            first: whether an update begins here.
            last: whether it ends here.
            step: the optimiser step that the weights come from.
            adapter: the fields of peft's configuration, for a LoRA that is not merged.
            whole: whether the update is of the whole model; of the adapter alone otherwise.

        Raises:
            RunFailed: names or shapes that do not fit. No request is answered then until a whole update came.
        """
        if first:
            self._settled.clear()
            self._fault = "an update of the rollout's weights broke off"
        try:
            await self._in_thread(self._write, bucket, first=first, last=last, adapter=adapter, whole=whole)
        except Exception:
            self._settled.set()
            raise
        if last:
            self._global_steps, self._fault = step, ""
            self._settled.set()

    async def sleep(self) -> None:
        """Nothing to free."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to load."""

    async def clear_kv_cache(self) -> None:
        """Nothing is kept between batches."""

    def _request(self, request_id: str, prompt_ids: list[int], params: Mapping[str, Any]) -> Request:
        settings = self._settings
        room = self._longest - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise UsageError(
                f"a prompt of {len(prompt_ids)} tokens: it must be 1 to {self._longest - 1}",
                at="rollout",
                fix="shorten it, or raise data.max_tokens",
            )
        params = {"ignore_eos": settings.ignore_eos, **params}
        seed = _seed(settings.seed, request_id)
        sampling = read_sampling(params, max_tokens=settings.response_length, room=room, seed=seed)
        return Request(tuple(prompt_ids), sampling)

    async def _serve(self) -> None:
        while True:
            batch = await self._next_batch()
            await self._settled.wait()
            batch = [waiting for waiting in batch if not waiting[1].done()]  # done: its caller went away
            step = self._global_steps  # now: an update may follow before the answers are out
            try:
                completions = await self._completed([request for request, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), completion in zip(batch, completions, strict=True):
                    if not future.done():
                        future.set_result((completion, step))

    async def _next_batch(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        await asyncio.sleep(WINDOW_S)
        while not self._queue.empty() and len(batch) < self._settings.max_batch:
            batch.append(self._queue.get_nowait())
        return batch

    async def _completed(self, requests: list[Request]) -> list[Completion]:
        if self._fault:
            raise RunFailed(f"no rollout: {self._fault}")
        if not requests:
            return []
        completions: list[Completion] = await self._in_thread(complete, self._weights.model, requests, eos=self._eos)
        return completions

    def _write(self, bucket: Bucket, *, first: bool, last: bool, adapter: Any, whole: bool) -> None:
        if first:
            self._weights.begin(adapter, whole=whole)
        self._weights.write(bucket)
        if last:
            self._weights.end()

    async def _in_thread(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))


def _seed(run: int, request_id: str) -> int:
    """63 bits of sha256: Python's own `hash` of a text differs from process to process."""
    return int.from_bytes(hashlib.sha256(f"{run}:{request_id}".encode()).digest()[:8], "big") >> 1
