"""One attempt at one request to an OpenAI-compatible server. Retries, money and cache are `asking.py`'s.

The rules: 408, 409, 429 and 5xx may be tried again; 401, 402, 403 and 404 end the teacher, because every further
request would meet the same; any other refusal costs one state. Where a connection breaks after the request was sent,
nobody knows whether it was billed, and that is said.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
from composer_core.protocols import Cost, ScoreRequest, TeacherReply, TeacherRequest
from composer_core.teachers.errors import Again, StateRefused, TeacherRefused

if TYPE_CHECKING:
    import httpx

_AGAIN = frozenset({408, 409, 429})
_ENDS_TEACHER = {
    401: "the key is not accepted",
    402: "the account is out of credits",
    403: "the key may not use this model",
    404: "there is no such model or address",
}
_TOKENS_PER_MESSAGE = 16
"""Roles, separators and the reply's header; generous."""
_ANSWER_GUESS = 300
"""Tokens of a typical answer, for estimates only."""
_CHARS_PER_TOKEN = 4
_TOOLS_PREAMBLE = 1024
"""Tokens that a service may write before tool definitions on its own account; generous."""
_SAID_CHARS = 300
_SECRET_CHARS = 8
"""A shorter key is a placeholder for a server without keys."""
_SCORE_ANSWER = 1
"""Tokens written behind a text that is scored: some servers refuse to write none."""
_ABOVE_ZERO = 1e-3
"""By how much rounding may lift a log-prob above 0."""
_SIZES = frozenset({"mini", "nano", "micro", "tiny", "small", "lite", "flash", "air"})
OTHER_MODEL = "other model"
"""`TeacherReply.finish` of an answer by another model than was asked for."""


class OpenAiTeacher:
    """Implements `protocols.TeacherSource` and `Scores`; the connections are kept and reused until `aclose`."""

    def __init__(self, settings: OpenAiTeacherSettings) -> None:
        """Make the client; nothing is sent.

        Raises:
            MissingError: httpx is not installed.
            UsageError: the key cannot be sent, as one with a line break in it; it is not shown.
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingError("a teacher needs httpx", fix="pip install 'composer-core[data]'") from error
        self.settings = settings
        self.concurrency = settings.concurrency
        self.requests_per_minute = settings.requests_per_minute
        self.attempts = settings.attempts
        self.identity = f"{settings.base_url.rstrip('/')} {settings.model}"
        self._key = (settings.key or "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # httpx would quote it in its message
            raise UsageError("the key holds characters that no header can carry", at="key", fix="check the variable")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        self._client = httpx.AsyncClient(
            base_url=settings.base_url.rstrip("/") + "/", headers=headers, timeout=settings.timeout_s, limits=limits
        )

    def body(self, request: TeacherRequest) -> dict[str, Any]:
        """The request as it is sent."""
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": list(request.messages),
            "max_tokens": self.settings.max_tokens,
            "temperature": self.settings.temperature,
            **self.settings.extra_body,
        }
        return body | {"tools": list(request.tools)} if request.tools else body

    def worst(self, request: TeacherRequest) -> Cost:
        """An upper bound: no tokenizer makes more tokens than a text has bytes."""
        text = json.dumps([request.messages, request.tools], ensure_ascii=False, default=list)
        prompt = len(text.encode("utf-8", "surrogatepass")) + _TOKENS_PER_MESSAGE * (len(request.messages) + 1)
        return self._cost(prompt + (_TOOLS_PREAMBLE if request.tools else 0), self.settings.max_tokens)

    def estimate(self, request: TeacherRequest) -> Cost:
        """What a request is likely to cost."""
        text = json.dumps([request.messages, request.tools], ensure_ascii=False, default=list)
        return self._cost(len(text) // _CHARS_PER_TOKEN, min(_ANSWER_GUESS, self.settings.max_tokens))

    async def complete(self, request: TeacherRequest) -> TeacherReply:
        """Send once.

        Raises:
            Again: it may be tried again, with how long the server asks to wait and whether it may have been billed.
            TeacherRefused: nothing this teacher is asked will work.
            StateRefused: this request will not.
        """
        data = await self._post("chat/completions", self.body(request))
        choice = _first(data.get("choices"))
        message = choice.get("message")
        return self._reply(
            data,
            _assistant(message) if isinstance(message, dict) else None,
            finish=str(choice.get("finish_reason") or "") if self._wanted(data) else OTHER_MODEL,
            worst=self.worst(request),
            answer=self.settings.max_tokens,
        )

    def worst_score(self, request: ScoreRequest) -> Cost:
        """The ids are sent as they are; a server may put its own mark in front."""
        return self._cost(len(request.ids) + _TOKENS_PER_MESSAGE, _SCORE_ANSWER)

    async def score(self, request: ScoreRequest) -> TeacherReply:
        """Send once, to an endpoint that reads token ids (vLLM's `prompt_logprobs`).

        Raises:
            UsageError: the settings do not say that this server `scores`.
            TeacherRefused: the server gives no log-probs of a text it is handed, or another model answers.
            StateRefused: they are of other tokens, or no log-probs. Others as `complete`.
        """
        if not self.settings.scores:
            raise UsageError(f"{self.identity} is not said to score", at="scores", fix="scores: true, for vLLM")
        ids, start = list(request.ids), request.start
        body = {
            "model": self.settings.model,
            "prompt": ids,
            "max_tokens": _SCORE_ANSWER,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        data = await self._post("completions", body)
        if not self._wanted(data):
            raise TeacherRefused(f"{self.identity}: {data['model']} answered", at="any_model", fix="any_model: true")
        listed = _first(data.get("choices")).get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise TeacherRefused(
                f"{self.identity} gives no log-probs of a text it is handed", at="scores", fix="leave scores out"
            )
        message = _scored(ids[start:], listed[start:])
        return self._reply(data, message, finish="", worst=self.worst_score(request), answer=_SCORE_ANSWER)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _wanted(self, data: Mapping[str, Any]) -> bool:
        """Whether the model that was asked for answered."""
        return self.settings.any_model or same_model(self.settings.model, str(data.get("model") or ""))

    def _reply(
        self, data: Mapping[str, Any], message: dict[str, Any] | None, *, finish: str, worst: Cost, answer: int
    ) -> TeacherReply:
        """With what it cost; `answer` tokens of `worst` are those of the longest answer."""
        usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
        prompt, completion = (_count(usage.get(f"{side}_tokens")) for side in ("prompt", "completion"))
        if not usage:  # what nobody counted is booked at its worst
            usd, prompt, completion = worst.usd, worst.tokens - answer, answer
        else:
            usd = _dollars(usage.get("cost"), self._cost(prompt, completion).usd)
        return TeacherReply(
            message=message,
            finish=finish,
            prompt_tokens=prompt,
            completion_tokens=completion,
            usd=usd,
            model=str(data.get("model") or ""),
        )

    def _cost(self, prompt: int, completion: int) -> Cost:
        price = self.settings.price
        usd = 0.0 if price is None else (prompt * price.input + completion * price.output) / 1e6
        return Cost(usd=usd, tokens=prompt + completion)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        import httpx

        try:
            response = await self._client.post(path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Again(f"{type(error).__name__}: {error}", billed=False) from error
        except httpx.RequestError as error:  # sent, or partly: only the server knows what came of it
            raise Again(f"{type(error).__name__}: {error}", billed=True) from error
        except httpx.InvalidURL as error:
            raise TeacherRefused(f"{self.identity}: {error}", at="base_url") from error
        return self._checked(response)

    def _said(self, response: httpx.Response) -> str:
        """What the service said: it is the best message there is. Never the request, which holds the session."""
        text = " ".join(response.text.split())
        if len(self._key) >= _SECRET_CHARS:
            text = text.replace(self._key, "<key>")  # some quote it
        return f": {text[:_SAID_CHARS]}" if text else ""

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        status = response.status_code
        if status in _AGAIN or status >= 500:
            raise Again(f"HTTP {status}{self._said(response)}", billed=False, after=_retry_after(response))
        if status in _ENDS_TEACHER:
            raise TeacherRefused(f"{self.identity}: {_ENDS_TEACHER[status]} (HTTP {status}{self._said(response)})")
        if status != 200:
            raise StateRefused(f"HTTP {status}{self._said(response)}")
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            raise TeacherRefused(f"{self.identity} streams although it was not asked to", fix="use another address")
        try:
            data = response.json()
        except ValueError as error:
            raise Again(f"the reply is not JSON: {error}", billed=True) from error
        if not isinstance(data, dict) or (isinstance(data.get("error"), dict) and not data.get("choices")):
            raise Again(f"the reply holds no answer{self._said(response)}", billed=True)
        return data


def _first(choices: Any) -> dict[str, Any]:
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """What of a reply's message belongs into a chat; without an answer where its tool calls are none."""
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return {"role": "assistant", "content": None}
    kept = {key: message[key] for key in ("content", "tool_calls", "reasoning_content") if message.get(key)}
    return {"role": "assistant", "content": None, **kept}


def _scored(ids: Sequence[int], listed: Sequence[Any]) -> dict[str, Any]:
    """Log-prob and text of each token, from the entries that a server gives by token id.

    Raises:
        StateRefused: an entry is not of its token, or not a log-prob.
    """
    try:
        entries = [entry[str(token)] for token, entry in zip(ids, listed, strict=True)]
        logps = [float(entry["logprob"]) for entry in entries]
        tokens = [text if isinstance(text := entry.get("decoded_token"), str) else None for entry in entries]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateRefused(f"log-probs of other tokens than were sent: {error}") from error
    wrong = next((logp for logp in logps if not (math.isfinite(logp) and logp <= _ABOVE_ZERO)), None)
    if wrong is not None:
        raise StateRefused(f"{wrong} is no log-prob")
    return {"logps": logps, "tokens": tokens}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def same_model(asked: str, answered: str) -> bool:
    """Whether a reply's model may be the one that was asked for.

    Services add makers, dates and variants, and change the order (`openai/gpt-5` -> `gpt-5-2025-08-07`); so one name's
    words must be among the other's, and a size (`mini`) stand in both or neither. A reply may name none.
    """
    one, other = (set(re.findall(r"[a-z]+|[0-9]+", _own_name(name))) for name in (asked, answered))
    return not answered or ((one <= other or other <= one) and one & _SIZES == other & _SIZES)


def _own_name(model: str) -> str:
    """Without its maker, and without a variant such as `:free`."""
    return model.lower().rstrip("/").rpartition("/")[2].partition(":")[0]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _dollars(reported: Any, else_: float) -> float:
    """A cost that a reply names, where it is one."""
    usable = isinstance(reported, int | float) and not isinstance(reported, bool)
    return float(reported) if usable and math.isfinite(reported) and reported >= 0 else else_


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, from either form of the header."""
    value = response.headers.get("retry-after", "")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time()) if value else None
    except (TypeError, ValueError):
        return None
