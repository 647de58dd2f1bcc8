"""What a run prepares before the first step: preference pairs for its channels, rows of recorded traces.

Rows of rollouts are not here: those come while it trains (`loss/composite.py`). A channel that wants something says so
by having the method (`loss/channel.py`: `TakesPairs`, `HintsTraces`); other plugins it has had from `rebuild.py`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from composer_core.errors import UsageError
from composer_core.loss.channel import LeavesOut, TakesPairs
from composer_core.loss.composite import CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.run.context import RunContext
from composer_core.run.control import agree
from composer_core.spec.rollouts import NONE
from composer_core.spec.sections import TracesSpec

if TYPE_CHECKING:
    from composer_core.protocols import Row


def feed(loss: CompositeLoss, run: RunContext, registry: Registry) -> None:
    """Hand over what the channels take; without rollouts, have the recorded traces ready.

    Raises:
        UsageError: a channel learns from pairs, and the spec has none or they are not usable; or no trace is.
    """
    if run.spec.rollouts == NONE and run.spec.data.traces is not None:
        if run.is_main and not run.recorded_file.is_file():
            _record(loss, run, run.spec.data.traces, registry)
        agree(None)  # the other processes read what the main one wrote
    takers = {active.name: active.channel for active in loss.active if isinstance(active.channel, TakesPairs)}
    if not takers:
        return
    if run.spec.data.pairs is None:
        raise UsageError(
            f"channel {next(iter(takers))!r} learns from preference pairs, and the spec names no file of them",
            at="data.pairs",
            fix="data: {pairs: {path: pairs.jsonl}}; `composer-run replay` writes one",
        )
    rows = _pair_rows(run, Path(run.spec.data.pairs.path))
    for channel in takers.values():
        channel.take_pairs(rows)


def _record(loss: CompositeLoss, run: RunContext, traces: TracesSpec, registry: Registry) -> None:
    from composer_core.hf.models import load_tokenizer
    from composer_core.run.recorded import Recorder

    tokenizer = load_tokenizer(run.model_folder(), trust_remote_code=run.spec.model.trust_remote_code)
    recorder = Recorder(loss, registry, tokenizer, run.spec.data.max_tokens)
    recorder.write(traces, run.recorded_file)
    run.event("traces", path=traces.path, **recorder.facts())


def report_left_out(loss: CompositeLoss, run: RunContext) -> None:
    """One event for each channel that left something out of this process's rollouts."""
    for active in loss.active:
        if isinstance(active.channel, LeavesOut) and active.channel.skipped:
            run.event("left-out", channel=active.name, reasons=dict(active.channel.skipped))


def _pair_rows(run: RunContext, path: Path) -> list[Row]:
    from composer_core.hf.models import load_tokenizer
    from composer_core.teachers.pair_rows import pair_rows
    from composer_core.teachers.pairs import load_pairs
    from composer_core.traces.chat_template import ChatTemplate

    pairs = load_pairs(path)
    tokenizer = load_tokenizer(run.model_folder(), trust_remote_code=run.spec.model.trust_remote_code)
    dropped: Counter[str] = Counter()
    limit = run.spec.data.max_tokens
    rows = list(pair_rows(pairs, ChatTemplate(tokenizer), max_tokens=limit, dropped=dropped))
    if run.is_main:
        run.event("pairs", path=str(path), read=len(pairs), kept=len(rows), dropped=dict(dropped))
    return rows
