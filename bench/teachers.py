"""Asking teachers, against bare httpx: two figures of `data.py`. The server is a process of its own on loopback."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_FLIGHT = 64
ASKING_TARGET = 0.8
CACHED_TARGET = 10.0
Figure = dict[str, object]

_SERVER = """
import itertools, sys
from composer_core.testing.chat_server import ChatServer, Reply, answer
turn = itertools.count()
good, busy = Reply(answer("ok", cost=0.0001)), Reply(status=429, headers={"retry-after": "0"})
with ChatServer(lambda body: busy if next(turn) % 3 == 2 else good) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server() -> Iterator[str]:
    """One request in three is answered 429 with Retry-After 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


async def bare(url: str, count: int) -> float:
    """Answered requests per second of httpx alone, which asks again after a 429."""
    import httpx

    texts = iter(range(count))

    async def worker(client: httpx.AsyncClient) -> None:
        for n in texts:
            message = {"role": "user", "content": f"question {n}"}
            body = {"model": "m", "messages": [message], "max_tokens": 16, "temperature": 0.0}
            while (await client.post("chat/completions", json=body)).status_code != 200:
                pass

    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    async with httpx.AsyncClient(base_url=url + "/", limits=limits, timeout=60) as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(IN_FLIGHT)))
        return count / (time.perf_counter() - start)


async def ours(url: str, count: int, database: Path) -> float:
    """The same with cache, budget and retries."""
    from composer_core.plugins.teacher_settings import OpenAiTeacherSettings, Price
    from composer_core.teachers.client import OpenAiTeacher
    from composer_core.teachers.replay import replay_trace
    from composer_core.traces.model import TraceState

    settings = OpenAiTeacherSettings(
        base_url=url, model="m", max_tokens=16, concurrency=IN_FLIGHT, attempts=50, price=Price(input=1, output=1)
    )
    states = [
        TraceState(str(n), [{"role": "user", "content": f"question {n}"}], {"role": "assistant", "content": "x"}, n)
        for n in range(count)
    ]
    start = time.perf_counter()
    answers = await replay_trace(states, {"t": OpenAiTeacher(settings)}, 1000.0, database=database)
    seconds = time.perf_counter() - start
    assert all(answer.reply is not None for answer in answers)
    return count / seconds


def asking(folder: Path, *, quick: bool) -> Figure:
    """Answered requests per second, over those of bare httpx; contenders in turn."""
    count, rounds = (400, 3) if quick else (1500, 5)
    speeds: dict[str, list[float]] = {"composer": [], "httpx": []}
    with server() as url:
        asyncio.run(bare(url, 200))
        for number in range(rounds):
            speeds["httpx"].append(asyncio.run(bare(url, count)))
            speeds["composer"].append(asyncio.run(ours(url, count, folder / f"asking{number}.sqlite")))
    ratio = statistics.median(a / b for a, b in zip(speeds["composer"], speeds["httpx"], strict=True))
    return {
        "figure": "teachers' answers per second, over bare httpx",
        "ratio": round(ratio, 3),
        "target": ASKING_TARGET,
        "met": ratio >= ASKING_TARGET,
        "peers": {name: round(statistics.median(values)) for name, values in speeds.items()},
        "n": count * rounds,
    }


def cached(folder: Path, *, quick: bool) -> Figure:
    """A second run that finds every answer, over the first."""
    count, rounds = (400, 3) if quick else (1500, 5)
    ratios = []
    with server() as url:
        for number in range(rounds):
            database = folder / f"cached{number}.sqlite"
            first = asyncio.run(ours(url, count, database))
            ratios.append(asyncio.run(ours(url, count, database)) / first)
    ratio = statistics.median(ratios)
    return {
        "figure": "a replay that is fully cached, over the first",
        "ratio": round(ratio, 1),
        "target": CACHED_TARGET,
        "met": ratio >= CACHED_TARGET,
        "peers": {},
        "n": count * rounds,
    }
