"""Decoding with a transformers model, each request by itself: what a request draws depends on its own seed alone.

`complete` runs requests in one batch (left padded, with a cache) and `choose` picks one token of one request. Which
requests share a batch only decides how fast they are served: the noise of a request comes from its own generator,
on the CPU whatever the model's device. (The logits themselves agree between batches up to rounding.)
No server, no Ray, no tokenizer here. A new sampling parameter is one field of `Sampling` and one line of `choose`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_core.errors import NonFinite, UsageError

NEUTRAL: Mapping[str, Sequence[Any]] = {"repetition_penalty": (1.0,), "logprobs": (True, False)}
"""Parameters that verl always sends, with the values that ask for nothing: log-probs are returned in any case."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request draws its tokens and when it ends."""

    seed: int
    max_tokens: int
    min_tokens: int = 0
    """Before so many tokens no stopping token is drawn."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = -1
    """The k most probable tokens; -1 or 0: all."""
    top_p: float = 1.0
    """The fewest most probable tokens that hold this mass."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = {
            "temperature": self.temperature < 0,
            "top_k": self.top_k < -1,
            "top_p": not 0 < self.top_p <= 1,
            "max_tokens": self.max_tokens < 1,
        }
        for name in (name for name, bad in wrong.items() if bad):
            raise UsageError(f"{name} cannot be {getattr(self, name)}", at=f"sampling_params.{name}")


def read_sampling(params: Mapping[str, Any], *, max_tokens: int, room: int, seed: int) -> Sampling:
    """The sampling parameters of one of verl's requests.

    Args:
        params: as the agent loop sends them; `max_new_tokens` is another name of `max_tokens`.
        max_tokens: the limit where the request names none.
        room: how many tokens the model's window has left after the prompt; a larger limit is cut to it.
        seed: the seed where the request names none.

    Raises:
        UsageError: a parameter that is not known here, or a value that cannot be.
    """
    given = {name: value for name, value in params.items() if value not in (None, *NEUTRAL.get(name, ()))}
    limit = given.pop("max_tokens", given.pop("max_new_tokens", max_tokens))
    unknown = sorted(set(given) - set(Sampling.__dataclass_fields__))
    if unknown:
        raise UsageError(
            f"composer_hf does not know {unknown[0]} = {given[unknown[0]]!r}",
            at=f"sampling_params.{unknown[0]}",
            fix="take it out, or use rollout: vllm or sglang",
        )
    stop = tuple(given.pop("stop_token_ids", ()))
    return Sampling(**{"seed": seed, **given}, max_tokens=min(limit, room), stop_token_ids=stop)


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, at least one, and how to go on from it."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """What one request drew: its tokens (T,), the stopping one included, and the log-prob of each (T,)."""

    tokens: list[int]
    logps: list[float]


def choose(logits: Tensor, sampling: Sampling, *, generator: torch.Generator, barred: Sequence[int] = ()) -> Tensor:
    """Draw one token from the logits (V,) of one request: its id, a scalar on the logits' device.

    The Gumbel-max trick: argmax of log p + g, with g = -log(-log u) drawn per token of the vocabulary, is a draw from
    p (Gumbel 1954; Maddison et al. 2014, 1411.0030, section 2). `barred` tokens are never drawn.
    """
    scores = logits.float()
    if barred:
        scores = scores.index_fill(0, torch.tensor(barred, device=scores.device), -torch.inf)
    if sampling.temperature == 0:
        return scores.argmax()
    scores = _top_p(_top_k(scores / sampling.temperature, sampling.top_k), sampling.top_p)
    # In fp32 one uniform in 2^24 is zero, and its infinite noise would draw any token at all: once in a hundred steps
    # at a vocabulary of 150,000.
    exponential = torch.empty(len(scores), dtype=torch.float64).exponential_(generator=generator)
    gumbel = -exponential.clamp_min(torch.finfo(torch.float64).tiny).log()
    return (scores + gumbel.to(scores.device)).argmax()


def _top_k(scores: Tensor, k: int) -> Tensor:
    if k <= 0 or k >= len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[-1], -torch.inf)


def _top_p(scores: Tensor, p: float) -> Tensor:
    if p == 1:
        return scores
    ordered, order = scores.softmax(-1).sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # The mass in front of a token, not up to it: the token that crosses p belongs to the set, so it is never empty.
    return scores.index_fill(0, order[before >= p], -torch.inf)


def logp_of(logits: Tensor, token: Tensor, *, temperature: float) -> Tensor:
    """Log-prob, fp32 scalar, of a token under softmax(logits / temperature), (V,).

    That is what verl's actor recomputes: neither top-k nor top-p enters, and temperature 0 counts as 1.
    """
    return (logits.float() / (temperature or 1.0)).log_softmax(-1)[token]


class _Draft:
    """One request on its way: what it has drawn, its generator, and whether it is over."""

    def __init__(self, request: Request, *, eos: Sequence[int]) -> None:
        self.sampling = request.sampling
        self.generator = torch.Generator().manual_seed(request.sampling.seed)
        self.stops = {*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else eos)}
        self.tokens: list[int] = []
        self.logps: list[float] = []

    @property
    def over(self) -> bool:
        """It drew a stopping token, or all it may draw."""
        return len(self.tokens) >= self.sampling.max_tokens or (bool(self.tokens) and self.tokens[-1] in self.stops)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token and its log-prob, scalars, from the logits (V,)."""
        barred = sorted(self.stops) if len(self.tokens) < self.sampling.min_tokens else ()
        token = choose(logits, self.sampling, generator=self.generator, barred=barred)
        return token, logp_of(logits, token, temperature=self.sampling.temperature)


@torch.no_grad()
def complete(model: Any, requests: Sequence[Request], *, eos: Sequence[int]) -> list[Completion]:
    """Complete all requests (S of them) in one batch with a causal Hugging Face model in eval mode.

    The model is called with a cache and asked for the logits of the last position only. `eos` are the ids that end a
    completion, unless its request ignores them.

    Raises:
        NonFinite: NaN among the logits.
    """
    drafts = [_Draft(request, eos=eos) for request in requests]
    ids, mask = _left_padded([request.prompt for request in requests], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = None
    while True:
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        chosen = _draw_all(drafts, output.logits[:, -1])
        alive = torch.tensor([[not draft.over] for draft in drafts], device=model.device)
        if not alive.any():
            return [Completion(draft.tokens, draft.logps) for draft in drafts]
        ids = chosen[:, None]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        # A request that is over is carried along in place: it must not walk out of the model's window.
        positions = positions[:, -1:] + alive


def _draw_all(drafts: Sequence[_Draft], logits: Tensor) -> Tensor:
    """Let every request that is not over draw from its row of the logits (S, V); the next inputs, (S,)."""
    chosen = torch.zeros(len(drafts), dtype=torch.long, device=logits.device)
    logps = torch.zeros(len(drafts), device=logits.device)
    going = [i for i, draft in enumerate(drafts) if not draft.over]
    for i in going:
        chosen[i], logps[i] = drafts[i].draw(logits[i])
    tokens, values = chosen.tolist(), logps.tolist()  # one wait for the device, not one per request
    if any(math.isnan(value) for value in values):
        raise NonFinite("the rollout model's logits are not finite", fix="lower train.learning_rate")
    for i in going:
        drafts[i].tokens.append(tokens[i])
        drafts[i].logps.append(values[i])
    return chosen


def _left_padded(prompts: Sequence[Sequence[int]], *, device: Any) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both (S, longest). Padded on the left, so that all requests go on at one place."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
