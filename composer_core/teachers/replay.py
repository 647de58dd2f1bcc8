"""Every state to every teacher: the loop, its estimate before, and its end on Ctrl-C, an empty budget or a refusal.

Nothing is kept in memory that the database does not hold already, so a killed replay goes on by being run again: what
was answered is found, what was not is asked. Not here: what the answers mean (`pairs.py`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from composer_core.errors import ComposerError, Stopped, UsageError
from composer_core.protocols import Cost, TeacherRequest, TeacherSource
from composer_core.teachers.asking import Answer, Asker
from composer_core.teachers.budget import Budget
from composer_core.teachers.database import Database, default_database
from composer_core.teachers.normalise import NormaliseReport, normalise
from composer_core.teachers.pairs import Pair, extract_pairs
from composer_core.traces.model import TraceState

Question = tuple[Asker, TeacherRequest]


@dataclass(frozen=True)
class Estimate:
    """What a replay is likely to need, answers that are there already left out."""

    questions: int
    cached: int
    by_teacher: Mapping[str, Cost]

    @property
    def usd(self) -> float:
        """Dollars over all teachers."""
        return sum(cost.usd for cost in self.by_teacher.values())


@dataclass
class Progress:
    """How far a replay is; handed to a display after each answer."""

    total: int
    done: int = 0
    cached: int = 0
    failed: int = 0
    usd: float = 0.0


@dataclass
class Replay:
    """A set of states and teachers.

    `tools` are the definitions that the traces of the states have, by state id; a teacher then answers with calls.
    """

    states: Sequence[TraceState]
    askers: Sequence[Asker]
    samples: int = 1
    tools: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)

    def questions(self) -> Iterator[Question]:
        """State by state, so that an early end leaves whole states."""
        for state, sample, asker in product(self.states, range(self.samples), self.askers):
            tools = self.tools.get(state.state_id, ())
            yield asker, TeacherRequest(state.messages, tools, sample, state.state_id)

    def estimate(self) -> Estimate:
        """What is still to be paid; sends nothing."""
        costs = {asker.name: Cost(0.0, 0) for asker in self.askers}
        asked = cached = 0
        for asker, request in self.questions():
            asked += 1
            if asker.cached(request):
                cached += 1
                continue
            one, so_far = asker.teacher.estimate(request), costs[asker.name]
            costs[asker.name] = Cost(so_far.usd + one.usd, so_far.tokens + one.tokens)
        return Estimate(asked, cached, costs)

    async def run(self, *, on_answer: Callable[[Answer, Progress], None] | None = None) -> list[Answer]:
        """All answers, in the order of the questions; failed ones among them.

        The first Ctrl-C (or SIGTERM) asks nothing more and waits for the answers under way, which are paid for; the
        second waits no longer.

        Raises:
            Stopped: it was interrupted before the last answer, or the budget is spent (`BudgetSpent`); what was
                answered is kept.
            TeacherRefused: a teacher answers nobody; what the others answered is kept.
        """
        total = len(self.states) * self.samples * len(self.askers)
        loop = _Loop(Progress(total), on_answer, self.askers)
        workers = [self._worker(asker, loop) for asker in self.askers for _ in range(asker.teacher.concurrency)]
        under_way = asyncio.gather(*workers)
        try:
            with _until_interrupted(loop, under_way):
                await under_way
        except asyncio.CancelledError:
            if loop.ended is None:
                raise
        finally:
            for asker in self.askers:
                await asker.teacher.aclose()
        if loop.ended is not None and loop.progress.done < total:
            raise loop.ended
        return [loop.answers[key] for key in sorted(loop.answers)]

    async def _worker(self, asker: Asker, loop: _Loop) -> None:
        questions = loop.questions_of(asker, self.questions())
        for place, request in questions:
            if loop.ended is not None:
                return
            try:
                loop.take(place, await asker.ask(request))
            except ComposerError as error:
                loop.end(error)


class _Loop:
    """What the workers share."""

    def __init__(
        self, progress: Progress, on_answer: Callable[[Answer, Progress], None] | None, askers: Sequence[Asker]
    ) -> None:
        self.progress = progress
        self._askers = askers
        self.answers: dict[int, Answer] = {}
        self.ended: ComposerError | None = None
        self._on_answer = on_answer
        self._queues: dict[int, Iterator[tuple[int, TeacherRequest]]] = {}

    def questions_of(self, asker: Asker, questions: Iterator[Question]) -> Iterator[tuple[int, TeacherRequest]]:
        """One queue per teacher, shared by its workers."""
        mine = ((place, request) for place, (other, request) in enumerate(questions) if other is asker)
        return self._queues.setdefault(id(asker), mine)

    def take(self, place: int, answer: Answer) -> None:
        """An answer came."""
        self.answers[place] = answer
        progress = self.progress
        progress.done += 1
        progress.cached += answer.cached
        progress.failed += answer.reply is None
        if answer.reply is not None and not answer.cached:
            progress.usd += answer.reply.usd
        if self._on_answer is not None:
            self._on_answer(answer, progress)

    def end(self, error: ComposerError) -> None:
        """Ask nothing more; the first reason counts."""
        self.ended = self.ended or error
        for asker in self._askers:
            asker.stopping = True

    def interrupt(self) -> None:
        """What a signal does."""
        done, total = self.progress.done, self.progress.total
        self.end(
            Stopped(
                f"interrupted after {done} of {total} answers", fix="run the same command again to go on from there"
            )
        )


@contextmanager
def _until_interrupted(loop: _Loop, under_way: asyncio.Future[Any]) -> Iterator[None]:
    events, caught = asyncio.get_running_loop(), []

    def interrupt() -> None:
        if loop.ended is not None:
            under_way.cancel()
        loop.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: its owner has the signals
            events.add_signal_handler(number, interrupt)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            events.remove_signal_handler(number)


# -- without a spec ----------------------------------------------------------------------------------------------------


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Mapping[str, TeacherSource],
    max_total_usd: float = 5.0,
    *,
    database: Path | None = None,
    scope: str = "replay_trace",
) -> list[Answer]:
    """Ask every teacher about every state, within a budget that all calls of the same scope share.

    Raises:
        UsageError: there are no states or no teachers.
        Stopped, TeacherRefused: as `Replay.run`.
    """
    if not states or not teachers:
        raise UsageError("there are no states to replay" if teachers else "there are no teachers to ask")
    file = Database(database or default_database())
    try:
        budget = Budget(file, scope, usd=max_total_usd)
        askers = [Asker(name, teacher, file, budget) for name, teacher in teachers.items()]
        return await Replay(states, askers).run()
    finally:
        file.close()


async def replay_and_normalize(
    states: Sequence[TraceState],
    teachers: Mapping[str, TeacherSource],
    *,
    agreement_threshold: int = 2,
    max_total_usd: float = 5.0,
    database: Path | None = None,
) -> tuple[list[Pair], NormaliseReport]:
    """`replay_trace`, then pairs, then `normalise` with its defaults."""
    answers = await replay_trace(states, teachers, max_total_usd, database=database)
    pairs, _ = extract_pairs(states, answers, agreement=agreement_threshold)
    return normalise(pairs)
