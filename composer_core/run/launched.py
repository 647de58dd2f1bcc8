"""Executors as commands meet them: made for `run`, made again for status, logs, stop, resume, reap; examined.

A run that an executor with a ledger launched has a file `jobs.json`; what it holds is the executor's business. The
executor is made again from the block in plan.json, and asked through the protocols of `jobs.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_core.errors import RunFailed, Stopped, UsageError
from composer_core.jobs import LEDGER, Attaches, Examines, Executor, JobHandle, JobState, JobStatus, Reaps
from composer_core.plugins.contributions import Contribution, Kind
from composer_core.plugins.registry import Registry
from composer_core.plugins.settings import Settings
from composer_core.run.directory import ENDS, STARTS, RunDirectory
from composer_core.run.doctor import Finding, Level
from composer_core.run.files import read_jsonl
from composer_core.run.status import UNFINISHED
from composer_core.spec.environment import fill
from composer_core.spec.yaml import parse

LAST_MOMENTS_S = 120.0
"""After its end a worker draws the report; only what is still there later is left over."""
Replicas = list[tuple[JobHandle, JobStatus]]


def make_executor(contribution: Contribution[Any], settings: Settings) -> Executor:
    """The executor of these settings, `${env:NAME}` filled in.

    Raises:
        MissingError: its package or a variable is missing.
    """
    executor: Executor = contribution.load()(fill(settings, os.environ, key="executor"))
    return executor


def executor_block(directory: RunDirectory) -> tuple[str, Mapping[str, Any]]:
    """`use` and settings of the executor in a run's plan."""
    block = directory.read_json("plan.json")["spec"]["executor"]
    return block["use"], block["settings"]


def executor_of(directory: RunDirectory, registry: Registry) -> Executor:
    """The executor that a run's plan names.

    Raises:
        MissingError: it is not installed.
    """
    use, settings = executor_block(directory)
    _, contribution = registry.get(Kind.EXECUTOR, use)
    return make_executor(contribution, contribution.settings.model_validate(settings))


def was_launched(directory: RunDirectory) -> bool:
    """Whether an executor that later commands can ask launched it."""
    return (directory.path / LEDGER).is_file()


def launcher_of(directory: RunDirectory, registry: Registry) -> Attaches:
    """The executor of a run that `was_launched`.

    Raises:
        UsageError: the run has no ledger.
    """
    executor = executor_of(directory, registry) if was_launched(directory) else None
    if not isinstance(executor, Attaches):
        raise UsageError(
            f"run {directory.name} was launched by an executor that no later command can ask",
            fix="executor: {use: local}, or another one of `composer-run plugins list`",
        )
    return executor


def replicas_of(directory: RunDirectory, registry: Registry) -> Replicas:
    """Where the replicas of a run stand; of one that ended without a word, the run's events say so from now on."""
    if not was_launched(directory):
        return []
    found = launcher_of(directory, registry).attach(directory.path)
    _conclude(directory, found)
    return found


def said_how_it_ended(directory: RunDirectory) -> bool:
    """Whether the run's events have an end for its last start."""
    kinds = [event["event"] for event in read_jsonl(directory.events)]
    return next((kind in ENDS for kind in reversed(kinds) if kind in ENDS or kind in STARTS), False)


def _conclude(directory: RunDirectory, found: Replicas) -> None:
    """Say for workers which could not how they ended."""
    over = bool(found) and all(status.state.over for _, status in found)
    if not over or said_how_it_ended(directory):
        return
    failed = [(handle, status) for handle, status in found if status.state is JobState.FAILED]
    cancelled = [(handle, status) for handle, status in found if status.state is JobState.CANCELLED]
    for handle, status in (failed or cancelled)[:1]:
        reason = f"replica {handle.rank} {status.in_words()}"
        event, code = ("failed", RunFailed.exit_code) if failed else ("stopped", Stopped.exit_code)
        directory.event(event, reason=reason, exit_code=code)


def why_left_over(handle: JobHandle, runs: Path, executor: Reaps) -> str | None:
    """Why a replica that runs should not; "" where its run goes on, None where its run is not in this folder."""
    directory = RunDirectory(runs / handle.facts["job"])
    if not directory.plan.is_file():
        return None
    state = directory.state().state
    if state not in UNFINISHED and time.time() - directory.events.stat().st_mtime > LAST_MOMENTS_S:
        return f"its run is over: {state}"
    if isinstance(executor, Attaches):
        current = [(one.rank, one.attempt) for one, _ in executor.attach(directory.path)]
        if (handle.rank, handle.attempt) not in current:
            return "another one was started in its place"
    return "the command that waited for it is gone" if executor.deserted(directory.path) else ""


def reaping(registry: Registry, directories: Iterable[RunDirectory], use: str | None) -> list[tuple[str, Reaps]]:
    """Executors to ask for leftovers: those of runs, each block once; with `use`, that one alone, as it is by default
    too.
    """
    blocks = [executor_block(directory) for directory in directories if was_launched(directory)]
    if use is not None:
        _, contribution = registry.get(Kind.EXECUTOR, use)
        defaults = contribution.settings().model_dump(mode="json")
        blocks = [(use, defaults), *(block for block in blocks if block[0] == use)]
    found: list[tuple[str, Reaps]] = []
    for name, settings in [block for place, block in enumerate(blocks) if block not in blocks[:place]]:
        _, contribution = registry.get(Kind.EXECUTOR, name)
        executor = make_executor(contribution, contribution.settings.model_validate(settings))
        if isinstance(executor, Reaps):
            found.append((name, executor))
        elif use is not None:
            raise UsageError(f"executor {name!r} leaves nothing that could be found", at="--executor")
    return found


def examine_executor(registry: Registry, use: str, assignments: Iterable[str]) -> list[Finding]:
    """What an executor finds about the place it starts jobs at.

    Args:
        registry: what is installed.
        use: its name.
        assignments: `key=value` texts, settings other than the defaults.

    Raises:
        UsageError: a setting is wrong.
        MissingError: no such executor.
    """
    _, contribution = registry.get(Kind.EXECUTOR, use)
    values: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not KEY=VALUE", at="--set")
        values[key] = parse(value, f"--set {text}").data
    try:
        executor = make_executor(contribution, contribution.settings.model_validate(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["executor", *map(str, first["loc"])])
        raise UsageError(f"{where}: {first['msg']}", at="--set") from None
    if isinstance(executor, Examines):
        return list(executor.examine())
    return [Finding(f"executor {use}", Level.OK, "loads and can be made; it has nothing of its own to look at")]
