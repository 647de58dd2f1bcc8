"""`composer-run replay`: teachers answer the agent's recorded steps; where they agree against it, a pair is written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_core.cli.common import JsonOption, OverridesArgument, SpecArgument, build_registry, show_json
from composer_core.errors import UsageError

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry
    from composer_core.spec.model import RunSpec
    from composer_core.teachers.asking import Answer
    from composer_core.teachers.database import Database
    from composer_core.teachers.pairs import Pair
    from composer_core.teachers.replay import Progress, Replay
    from composer_core.traces.model import TraceState

SECONDS_BETWEEN_LINES = 2.0
FAILURES_SHOWN = 10
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where pairs go; default data.pairs.path of the spec.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Replay only the first N states.")]
ReferenceOption = Annotated[
    str | None, typer.Option("--ref-model", metavar="MODEL", help="Store this model's log-probs with each pair.")
]
EstimateOption = Annotated[bool, typer.Option("--estimate", help="Say what it would cost, and send nothing.")]


def replay(
    ctx: typer.Context,
    spec: SpecArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    limit: LimitOption = None,
    ref_model: ReferenceOption = None,
    estimate: EstimateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the spec's teachers what they would have done at each recorded step, and write preference pairs.

    What was answered is kept: a run that was interrupted goes on when it is started again.
    Example: composer-run replay spec.yaml --out pairs.jsonl --limit 20
    """
    from composer_core.spec.load import load_spec
    from composer_core.teachers.database import Database, default_database

    registry = build_registry(ctx)
    loaded = load_spec(spec, registry, overrides=tuple(overrides or ()))
    target = _target(loaded.spec, out)
    reference = None if ref_model is None else _reference_folder(ref_model, seed=loaded.spec.seed)
    database = Database(default_database())
    try:
        work = _replay(loaded.spec, registry, database, target=target, limit=limit)
        expected = _estimate(work, loaded.spec)
        if estimate:
            show_json(expected) if as_json else _say_estimate(expected)
            return
        if not as_json:
            _say_estimate(expected)
        answers = asyncio.run(work.run(on_answer=_display(quiet=as_json)))
        result = _finish(work, answers, loaded.spec, target=target, database=database, reference=reference)
    finally:
        database.close()
    show_json(result) if as_json else _say_result(result)


def _target(spec: RunSpec, out: Path | None) -> Path:
    if out is None and spec.data.pairs is None:
        raise UsageError("where should the pairs go?", fix="--out pairs.jsonl, or data.pairs: {path: pairs.jsonl}")
    return (out or Path(spec.data.pairs.path)).expanduser().absolute()  # type: ignore[union-attr]


def _replay(spec: RunSpec, registry: Registry, database: Database, *, target: Path, limit: int | None) -> Replay:
    from composer_core.teachers.asking import Asker
    from composer_core.teachers.budget import Budget
    from composer_core.teachers.named import named_teacher
    from composer_core.teachers.replay import Replay

    names = spec.replay.teachers or list(spec.teachers)
    unknown = [name for name in names if name not in spec.teachers]
    if unknown or not names:
        problem = f"no teacher is called {unknown[0]!r}" if unknown else "this spec has no teachers"
        raise UsageError(problem, at="replay.teachers", fix="name them under teachers:")
    if len(names) < spec.replay.agreement:
        fix = "add a teacher, or lower replay.agreement"
        raise UsageError(
            f"{len(names)} teachers cannot agree by {spec.replay.agreement}", at="replay.agreement", fix=fix
        )
    states, tools = _states(spec, registry, limit)
    _require_prices(spec, names)
    limits = spec.limits
    budget = Budget(database, str(target), usd=limits.teacher_usd, tokens=limits.teacher_tokens)
    askers = [Asker(name, named_teacher(spec, registry, name), database, budget) for name in names]
    return Replay(states, askers, spec.replay.samples, tools)


def _states(spec: RunSpec, registry: Registry, limit: int | None) -> tuple[list[TraceState], dict[str, Any]]:
    from composer_core.traces.files import find_traces
    from composer_core.traces.states import states

    traces = spec.data.traces
    if traces is None:
        raise UsageError("there is nothing to replay", at="data.traces", fix="data.traces: {path: FILE or FOLDER}")
    found: list[TraceState] = []
    tools: dict[str, Any] = {}
    options = {"system_prompt": spec.replay.system_prompt, "strip_thinking": spec.replay.strip_thinking}
    for trace in find_traces([Path(traces.path)], registry, format=traces.format).read():
        for state in states(trace, max_history_tokens=spec.replay.max_history_tokens, **options):  # type: ignore[arg-type]
            if limit is not None and len(found) == limit:
                return found, tools
            found.append(state)
            tools[state.state_id] = trace.tools
    if not found:
        raise UsageError("no turn of an agent in these traces", at=traces.path)
    return found, tools


def _require_prices(spec: RunSpec, names: Sequence[str]) -> None:
    """A budget means nothing where a teacher's price is not known before it is asked."""
    from composer_core.plugins.teacher_settings import NO_PRICE, PRICE_IT, has_price

    if spec.limits.teacher_usd is None:
        return
    for name in names:
        if not has_price(spec.teachers[name].settings):
            raise UsageError(NO_PRICE, at=f"teachers.{name}.price", fix=PRICE_IT)


def _estimate(work: Replay, spec: RunSpec) -> dict[str, Any]:
    expected = work.estimate()
    limit = spec.limits.teacher_usd
    spent = work.askers[0].budget.spent().usd
    if limit is not None and expected.usd and expected.usd + spent > limit:
        beside = f" beside the ${spent:.2f} already spent" if spent else ""
        raise UsageError(
            f"this is likely to cost ${expected.usd:.2f}{beside}, above the limit of ${limit:.2f}",
            at="limits.teacher_usd",
            fix="raise it, or use --limit for fewer states",
        )
    teachers = {name: {"usd": cost.usd, "tokens": cost.tokens} for name, cost in expected.by_teacher.items()}
    return {
        "states": len(work.states),
        "questions": expected.questions,
        "cached": expected.cached,
        "usd": expected.usd,
        "limit_usd": limit,
        "teachers": teachers,
    }


def _say_estimate(expected: dict[str, Any]) -> None:
    limit = "" if expected["limit_usd"] is None else f", limit ${expected['limit_usd']:.2f}"
    typer.echo(
        f"{expected['states']} states, {expected['questions']} questions, {expected['cached']} answered already; "
        f"likely cost ${expected['usd']:.2f}{limit}",
        err=True,
    )


def _display(*, quiet: bool) -> Callable[[Answer, Progress], None]:
    """A line now and then: answers, failures, money, time left."""
    started = last = time.monotonic()

    def show(answer: Answer, progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if quiet or (now - last < SECONDS_BETWEEN_LINES and progress.done < progress.total):
            return
        last = now
        asked = progress.done - progress.cached
        left = (progress.total - progress.done) * (now - started) / asked if asked else 0.0
        failed = f", {progress.failed} failed" if progress.failed else ""
        typer.echo(
            f"{progress.done}/{progress.total} answers{failed}, ${progress.usd:.4f}, {left:.0f} s left", err=True
        )

    return show


def _finish(
    work: Replay,
    answers: Sequence[Answer],
    spec: RunSpec,
    *,
    target: Path,
    database: Database,
    reference: tuple[str, Path] | None,
) -> dict[str, Any]:
    from composer_core.teachers.normalise import normalise
    from composer_core.teachers.pairs import extract_pairs, save_pairs

    found, summary = extract_pairs(work.states, answers, agreement=spec.replay.agreement)
    pairs, report = normalise(found, spec.replay.normalise)
    left_out: dict[str, int] = {}
    if reference is not None and pairs:
        pairs, left_out = _with_reference(pairs, reference, database)
    if pairs or not target.exists():  # pairs of an earlier replay are worth more than an empty file
        save_pairs(pairs, target)
    spent = work.askers[0].budget.spent()
    return {
        "pairs": len(pairs),
        "file": str(target),
        "usd": spent.usd,
        "in_doubt_usd": spent.doubt_usd,
        "tokens": spent.tokens,
        "agreement": summary.as_json(),
        "failures": dict(Counter(f"{a.teacher}: {a.error}" for a in answers if a.error)),
        "normalise": report.as_json(),
        "without_reference": left_out,
    }


def _reference_folder(model: str, *, seed: int) -> tuple[str, Path]:
    """The reference model's name and folder: looked for before any teacher is paid."""
    from composer_core.hf.models import model_folder
    from composer_core.spec.model import ModelSpec

    path = Path(model).expanduser()
    return model, model_folder(ModelSpec(path=str(path.absolute()) if path.exists() else model), seed=seed)


def _with_reference(
    pairs: list[Pair], reference: tuple[str, Path], database: Database
) -> tuple[list[Pair], dict[str, int]]:
    from composer_core.teachers.reference import with_reference

    name, folder = reference
    done, dropped = with_reference(pairs, folder, database, name=name)
    return done, dict(dropped)


def _say_result(result: dict[str, Any]) -> None:
    agreement, cleaned = result["agreement"], result["normalise"]
    typer.echo(
        f"{result['pairs']} pairs of {agreement['states']} states: {agreement['like_the_agent']} like the agent, "
        f"{agreement['disagreed']} without agreement, {agreement['tied']} tied, {agreement['unanswered']} unanswered"
    )
    for what, counts in (
        ("answers left out", agreement["dropped_answers"]),
        ("pairs dropped", cleaned["dropped"]),
        ("redacted", cleaned["redacted"]),
        ("pairs the reference cannot read", result["without_reference"]),
    ):
        if counts:
            typer.echo(f"{what}: " + ", ".join(f"{reason} {count}" for reason, count in counts.items()))
    for problem, count in sorted(result["failures"].items(), key=lambda item: -item[1])[:FAILURES_SHOWN]:
        typer.echo(f"teacher {problem} ({count} x)", err=True)
    doubt = f" (${result['in_doubt_usd']:.4f} of it may not have been billed)" if result["in_doubt_usd"] else ""
    typer.echo(f"spent: ${result['usd']:.4f}{doubt}, {result['tokens']} tokens")
    left = "" if result["pairs"] else " (no pair arose; what was there before is left as it was)"
    typer.echo(f"pairs: {result['file']}{left}")
