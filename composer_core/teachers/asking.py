"""Everything around a teacher's attempt: cached answers, reserved money, limits, retries. The only caller of teachers.

The order of one question: cache; a place among the requests under way; the minute's quota; a reservation of the worst
case; the attempt; then reply and cost in one transaction. So no paid reply is lost by a kill, and no two processes
together spend more than the budget.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from composer_core.errors import Stopped, UsageError
from composer_core.protocols import Cost, ScoreRequest, Scores, TeacherReply, TeacherRequest, TeacherSource
from composer_core.teachers.budget import Budget
from composer_core.teachers.cache import ReplyCache, cache_key
from composer_core.teachers.database import Database
from composer_core.teachers.errors import Again, BudgetSpent, StateRefused

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0
_BUDGET_POLL_S = 0.05


@dataclass(frozen=True)
class Answer:
    """One teacher's answer to one state."""

    teacher: str
    state_id: str
    reply: TeacherReply | None
    """None where the state was given up."""
    error: str = ""
    cached: bool = False
    seconds: float = 0.0
    attempts: int = 1


@dataclass(frozen=True)
class _Call:
    """One question, whatever its kind."""

    state_id: str
    key: str
    """What the answer is found by; "" where it is not kept."""
    worst: Cost
    send: Callable[[], Awaitable[TeacherReply]]
    """One attempt."""


@dataclass
class Asker:
    """A teacher with everything around it."""

    name: str
    teacher: TeacherSource
    database: Database
    budget: Budget
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _under_way: asyncio.Semaphore = field(init=False)
    _next_start: float = 0.0
    stopping: bool = False
    """Nothing more is sent, not even again; what is under way may end."""

    def __post_init__(self) -> None:
        self._cache = ReplyCache(self.database)
        self._under_way = asyncio.Semaphore(self.teacher.concurrency)

    def key(self, request: TeacherRequest) -> str:
        """What the answer is found by; "" for a teacher that is never cached."""
        if not self.teacher.identity:
            return ""
        return cache_key(self.teacher.identity, json.loads(json.dumps(self.teacher.body(request))), request.sample)

    def cached(self, request: TeacherRequest) -> bool:
        """Whether the answer is there already."""
        key = self.key(request)
        return bool(key) and self._cache.get(key) is not None

    async def ask(self, request: TeacherRequest) -> Answer:
        """The answer, from the cache or the teacher.

        Raises:
            TeacherRefused: nothing that this teacher is asked will be answered.
            BudgetSpent: the call might cost more than is left.
            Stopped: it is `stopping`, and there is no answer yet.
        """
        send = partial(self.teacher.complete, request)
        return await self._answer(_Call(request.state_id, self.key(request), self.teacher.worst(request), send))

    async def score(self, request: ScoreRequest, *, anew: bool = False) -> Answer:
        """How likely the teacher finds a text (`protocols.Scores`), from the cache or the teacher; `anew`: not from the
        cache, and not for it.

        Raises:
            UsageError: this teacher does not score. Others as `ask`.
        """
        teacher: object = self.teacher
        if not isinstance(teacher, Scores):
            raise UsageError(f"teacher {self.name!r} does not score")
        key = ""
        if self.teacher.identity and not anew:
            key = cache_key(self.teacher.identity, {"score": list(request.ids), "start": request.start}, 0)
        send = partial(teacher.score, request)
        return await self._answer(_Call(request.state_id, key, teacher.worst_score(request), send))

    async def _answer(self, call: _Call) -> Answer:
        started = time.perf_counter()
        if call.key and (reply := self._cache.get(call.key)) is not None:
            return Answer(self.name, call.state_id, reply, cached=True)
        async with self._under_way:
            reply, error, attempts = await self._attempts(call)
        return Answer(self.name, call.state_id, reply, error, seconds=time.perf_counter() - started, attempts=attempts)

    async def _attempts(self, call: _Call) -> tuple[TeacherReply | None, str, int]:
        error = ""
        for attempt in range(1, self.teacher.attempts + 1):
            try:
                return await self._once(call), "", attempt
            except StateRefused as refusal:
                return None, str(refusal), attempt
            except Again as again:
                error = str(again)
                if self.stopping:
                    raise Stopped(f"not sent again after {error}") from again
                if attempt < self.teacher.attempts:
                    await self.sleep(_wait(attempt, again.after))
        return None, f"given up after {self.teacher.attempts} attempts: {error}", self.teacher.attempts

    async def _once(self, call: _Call) -> TeacherReply:
        await self._turn()
        if self.stopping:
            raise Stopped("not sent")
        reservation = await self._reserve(call.worst)
        try:
            reply = await call.send()
        except Again as again:
            (self.budget.doubt if again.billed else self.budget.release)(reservation)
            raise
        except asyncio.CancelledError:
            self.budget.doubt(reservation)  # it is on its way; nobody will hear what it cost
            raise
        except BaseException:
            self.budget.release(reservation)
            raise
        cost = Cost(usd=reply.usd, tokens=reply.prompt_tokens + reply.completion_tokens)
        with self.database.write() as transaction:
            self.budget.settle(reservation, cost, within=transaction)
            if call.key:
                self._cache.put(call.key, reply, within=transaction)
        return reply

    async def _turn(self) -> None:
        """Wait until the minute's quota allows one more request."""
        if self.teacher.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.teacher.requests_per_minute
        if start > now:
            await self.sleep(start - now)

    async def _reserve(self, worst: Cost) -> int:
        """Hold the worst case, waiting for calls under way to turn out cheaper than theirs.

        Raises:
            BudgetSpent: it does not fit, and nothing is under way.
        """
        while (reservation := self.budget.reserve(worst)) is None:
            if self.stopping or not self.budget.others_under_way():
                spent = self.budget.spent()
                raise BudgetSpent(
                    f"the next call of teacher {self.name!r} may cost ${worst.usd:.4f} or {worst.tokens} tokens, and "
                    f"${spent.usd:.4f} and {spent.tokens} tokens are spent",
                    fix="raise limits.teacher_usd and run the same command again: what was paid for is kept",
                )
            await self.sleep(_BUDGET_POLL_S)
        return reservation


def _wait(attempt: int, after: float | None) -> float:
    """Seconds before the next attempt: what the server asks, else exponential with full jitter."""
    if after is not None:
        return min(after, LONGEST_RETRY_AFTER_S)
    return random.uniform(0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)))
