"""What a block of `teachers:` may hold. Light."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from composer_core.plugins.settings import Settings

OPENROUTER = "https://openrouter.ai/api/v1"


class Price(Settings):
    """Dollars per million tokens; both 0 for a server of your own."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)


class OpenAiTeacherSettings(Settings):
    """Any server that speaks OpenAI's chat completions: OpenRouter, vLLM, OpenAI itself."""

    base_url: str = Field(OPENROUTER, pattern=r"^https?://\S+$")
    model: str = Field(min_length=1)
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
    """The server gives log-probs of a text it is handed (vLLM's `prompt_logprobs`)."""
    extra_body: dict[str, Any] = {}
    """Further keys of each request, as the server documents them."""


class ScriptedSettings(Settings):
    """Answers from a file or by rules, for runs without a network."""

    path: str | None = None
    """JSONL: `{"state_id": ..., "message": {"role": "assistant", ...}}`."""
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
"""Three teachers of different makers on OpenRouter, for `teachers:`; add `key: "${env:OPENROUTER_API_KEY}"`. Prices
are only the ceiling of the reservation: what OpenRouter reports per reply is what is counted."""
