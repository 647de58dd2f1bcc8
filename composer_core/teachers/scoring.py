"""A named teacher that reads texts for a channel: `Asker` for code that is not async.

Its connections, database and event loop live in one thread, so it can be asked from anywhere, also where a trainer runs
a loop of its own. Nothing here ends a run: a text that was not scored is None, counted by reason, and said once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from composer_core.errors import ComposerError
from composer_core.protocols import ScoreRequest, TeacherSource
from composer_core.teachers.asking import Answer, Asker
from composer_core.teachers.budget import Budget
from composer_core.teachers.database import Database, default_database

REASONS_TOLD = 10
T = TypeVar("T")
logger = logging.getLogger(__name__)


class TeacherScorer:
    """Implements `loss.channel.Scorer`; close it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], TeacherSource],
        *,
        scope: str,
        usd: float | None = None,
        tokens: int | None = None,
        database: Path | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Make the teacher; nothing is sent.

        Args:
            name: of the teacher, for messages.
            make: called once, in the thread that will own the connections.
            scope: whose money it spends; all processes with the same one share it.
            usd: limit of the scope.
            tokens: limit of the scope.
            database: replies and money; default: that of this user.
            sleep: between attempts.
            warn: told once, when the first text was not scored.

        Raises:
            ComposerError: what `make` raises, or the database cannot be used.
        """
        self.name = name
        self.scored, self.cached = 0, 0
        self.failed: Counter[str] = Counter()
        """Why texts were not scored: reason -> how often."""
        self._warn = warn
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"teacher-{name}", daemon=True)
        self._thread.start()

        async def open_() -> tuple[Database, Asker]:
            teacher = make()
            file = Database(database or default_database())
            return file, Asker(name, teacher, file, Budget(file, scope, usd=usd, tokens=tokens), sleep=sleep)

        try:
            self._database, self._asker = self._wait(open_())
        except BaseException:
            self._end_thread()
            raise

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float] | None]:
        """See `loss.channel.Scorer`; as many at a time as the teacher's `concurrency` allows."""
        return [self._logps(request, answer) for request, answer in zip(requests, self._answers(requests), strict=True)]

    def try_out(self, request: ScoreRequest) -> Answer:
        """Ask the server itself, whatever is cached.

        Raises:
            ComposerError: as `Asker.score`.
        """
        return self._wait(self._asker.score(request, anew=True))

    def facts(self) -> dict[str, Any]:
        """What came of it so far, for an event; money and tokens are those of the whole scope."""

        async def spent() -> dict[str, Any]:
            now = self._asker.budget.spent()
            return {"usd": now.usd, "tokens": now.tokens}

        failed = dict(self.failed.most_common(REASONS_TOLD))
        return {"teacher": self.name, "scored": self.scored, "cached": self.cached, "failed": failed} | self._wait(
            spent()
        )

    def close(self) -> None:
        """End connections, database and thread."""

        async def close() -> None:
            self._asker.stopping = True
            await self._asker.teacher.aclose()
            self._database.close()

        try:
            self._wait(close())
        finally:
            self._end_thread()

    def _answers(self, requests: Sequence[ScoreRequest]) -> list[Answer]:
        async def one(request: ScoreRequest) -> Answer:
            try:
                return await self._asker.score(request)
            except ComposerError as error:  # no budget, no key, no such model: it is for the channel to be idle then
                return Answer(self.name, request.state_id, None, error.problem)

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*map(one, requests))

        return self._wait(all_of_them()) if requests else []

    def _logps(self, request: ScoreRequest, answer: Answer) -> list[float] | None:
        logps = [] if answer.reply is None or answer.reply.message is None else answer.reply.message["logps"]
        wanted = len(request.ids) - request.start
        error = answer.error or ("" if len(logps) == wanted else f"{len(logps)} log-probs for {wanted} tokens")
        if error:
            if not self.failed:
                self._warn(
                    f"teacher {self.name!r} did not score rollout {request.state_id}: {error}; such rollouts are left "
                    "out, the event `teacher` counts them at the end of the run"
                )
            self.failed[error] += 1
            return None
        self.scored += 1
        self.cached += answer.cached
        return list(map(float, logps))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
