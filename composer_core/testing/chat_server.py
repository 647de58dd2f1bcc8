"""A double of an OpenAI-compatible server on loopback: real HTTP, answers by a function of the test's.

Make them with `answer` (chat) and `scored` (log-probs of a text).

with ChatServer(lambda body: Reply(answer("ok"))) as server:
... server.url, server.requests ...
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Reply:
    """What the server does with one request."""

    body: Mapping[str, Any] | bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang_up: bool = False
    """Close the connection instead of answering."""


Handler = Callable[[Mapping[str, Any]], Reply]


def answer(
    content: str | None = "ok",
    *,
    finish: str = "stop",
    tool_calls: list[dict[str, Any]] | None = None,
    model: str = "m",
    prompt_tokens: int = 10,
    completion_tokens: int = 5,
    cost: float | None = None,
) -> dict[str, Any]:
    """A chat completion's body."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if cost is not None:
        usage["cost"] = cost
    return {"model": model, "choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def scored(
    body: Mapping[str, Any], logp: Callable[[int], float], *, text: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """A completion's body with the log-prob of each token id of the prompt, as vLLM gives them; `text`: what it takes
    an id for.
    """
    listed: list[dict[str, Any] | None] = [None]
    for token in body["prompt"][1:]:
        entry = {"logprob": logp(token), "rank": 1} | ({} if text is None else {"decoded_token": text(token)})
        listed.append({str(token): entry})
    usage = {"prompt_tokens": len(listed), "completion_tokens": 1}
    return {"model": body["model"], "choices": [{"index": 0, "text": "", "prompt_logprobs": listed}], "usage": usage}


class ChatServer:
    """Serves in a thread of its own between `__enter__` and `__exit__`, on a free port of 127.0.0.1."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.requests: list[Mapping[str, Any]] = []
        """Bodies, in the order they came."""
        self.headers: list[Mapping[str, str]] = []
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        """Stop listening and end every connection, also one that waits for the next request."""
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                headers, body = request
                self.requests.append(body)
                self.headers.append(headers)
                reply = self._handler(body)
                await asyncio.sleep(reply.delay_s)
                if reply.hang_up:
                    break
                writer.write(_encode(reply))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, which some tests want
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> tuple[dict[str, str], dict[str, Any]] | None:
    if not await reader.readline():
        return None
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    return headers, json.loads(await reader.readexactly(length) or b"{}")


def _encode(reply: Reply) -> bytes:
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
