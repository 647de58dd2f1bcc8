"""What a block of `teachers:` may hold. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from composer_core.plugins.settings import PathKind, Settings

OPENROUTER = "https://openrouter.ai/api/v1"
OPENROUTER_KEY = "${env:OPENROUTER_API_KEY}"
NO_PRICE = "limits.teacher_usd cannot be kept without this teacher's price"
PRICE_IT = "price: {input: 1.25, output: 10.0} in dollars per million tokens; {input: 0, output: 0} if free"
_NO_SCORES = frozenset({"openrouter.ai", "api.openai.com", "api.anthropic.com"})
_OWN_KEYS = frozenset({"model", "messages", "tools", "max_tokens", "temperature", "n", "stream"})


class Price(Settings):
    """Dollars per million tokens; both 0 for a server of your own."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)


class OpenAiTeacherSettings(Settings):
    """Any server that speaks OpenAI's chat completions: OpenRouter, vLLM, OpenAI itself."""

    preset: Literal["opus", "gpt", "deepseek"] | None = None
    """A model of OpenRouter with its price, and `key: "${env:OPENROUTER_API_KEY}"`; keys given beside it win."""
    base_url: str = Field(OPENROUTER, pattern=r"^(https?://|\$\{env:)\S+$")
    """Where it answers, up to `/v1`."""
    model: str = ""
    """As the server calls it; needed without a preset."""
    any_model: bool = False
    """Also use answers that name another model than was asked for: for a router, or a server's alias."""
    key: str | None = None
    """`${env:NAME}`; leave it out for a server without keys."""
    price: Price | None = None
    """Needed for a budget in dollars; a reply that names its own cost wins over it."""
    max_tokens: int = Field(1024, ge=1)
    """Longest answer; a longer one is cut off by the server, and then dropped."""
    temperature: float = Field(0.0, ge=0)
    concurrency: int = Field(8, ge=1)
    """Requests under way at a time."""
    requests_per_minute: int | None = Field(None, ge=1)
    timeout_s: float = Field(120.0, gt=0)
    """For one attempt."""
    attempts: int = Field(6, ge=1)
    """How often a request is sent before its state is given up."""
    scores: bool = False
    """The server gives log-probs of a text it is handed as token ids, as vLLM's completions do (`prompt_logprobs`);
    channels may then learn from them."""
    extra_body: dict[str, Any] = {}
    """Further keys of each request, as the server documents them."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        chosen = data.get("preset") if isinstance(data, Mapping) else None
        if not isinstance(chosen, str) or chosen not in DEFAULT_TEACHERS:
            return data
        ready = {key: value for key, value in DEFAULT_TEACHERS[chosen].items() if key != "use"}
        if "base_url" not in data:  # nobody else gets that key
            ready["key"] = OPENROUTER_KEY
        return ready | dict(data)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.model:
            raise ValueError(f"give model, or preset: one of {', '.join(DEFAULT_TEACHERS)}")
        if owned := sorted(_OWN_KEYS & self.extra_body.keys()):
            raise ValueError(f"extra_body cannot hold {', '.join(owned)}: budget and cache count on them")
        if self.scores and (host := urlsplit(self.base_url).hostname) in _NO_SCORES:
            raise ValueError(f"scores: {host} gives no log-probs of a text it is handed; a vLLM server does")
        return self


def has_price(settings: Settings) -> bool:
    """Whether the cost of a call is known before it is made."""
    return not isinstance(settings, OpenAiTeacherSettings) or settings.price is not None


class ScriptedSettings(Settings):
    """Answers from a file or by rules, for runs without a network."""

    path: Annotated[str | None, PathKind.ALWAYS] = None
    """JSONL, relative to the spec: `{"state_id": ..., "message": {"role": "assistant", ...}}`. A state is
    `<trace>::<turn, four digits>`, both as `composer-run traces show` prints them."""
    rules: dict[str, str] = {}
    """Regular expression -> answer; the first that is found in the last user or tool message gives the answer."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (not self.rules):
            raise ValueError("give either path or rules")
        return self


DEFAULT_TEACHERS: dict[str, dict[str, Any]] = {
    "opus": {"use": "openai", "model": "anthropic/claude-opus-4.7", "price": {"input": 5.0, "output": 25.0}},
    "gpt": {"use": "openai", "model": "openai/gpt-5", "price": {"input": 1.25, "output": 10.0}},
    "deepseek": {"use": "openai", "model": "deepseek/deepseek-v4-pro", "price": {"input": 0.44, "output": 0.87}},
}
"""Three teachers of different makers on OpenRouter; in a spec: `strong: {use: openai, preset: opus}`. Prices are only
the ceiling of the reservation: what OpenRouter reports per reply is what is counted."""
