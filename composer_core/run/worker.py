"""What every executor starts: `python -m composer_core.run.worker [--quiet] [--resume STEP] RUN_DIRECTORY/plan.json`.

It runs in the trainer's own interpreter, reads everything from the plan, trains, and ends with the run's exit code.
Where the plan wants several processes, the first one starts the others (`ranks.py`); all of them run what stands here.
A mistake of the user is one message on stderr; tracebacks go to logs/worker.log (and to stderr with COMPOSER_DEBUG=1).
Nothing heavy is imported here at the top, so that signals are caught from the first moments on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import ComposerError, MissingError, RunFailed, Stopped, UsageError
from composer_core.run.control import Control, StopSignals, agree
from composer_core.run.directory import DEBUG_VARIABLE, RunDirectory
from composer_core.run.files import disk_full
from composer_core.run.ranks import Failure, Ranks, log_name, rank, started_by_rank_0
from composer_core.run.resume import checkpoint_of, set_lines_aside, spent_seconds

if TYPE_CHECKING:
    from composer_core.loss.composite import CompositeLoss
    from composer_core.plugins.registry import Registry
    from composer_core.protocols import Backend, TrainResult
    from composer_core.run.context import Checkpoint
    from composer_core.run.session import RunSession
    from composer_core.spec.model import RunSpec
    from composer_core.spec.plan import Plan

INTERNAL_ERROR = 4
logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run a plan; the exit code of the run."""
    parser = argparse.ArgumentParser(prog="composer_core.run.worker", description="Train what a plan describes.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    parser.add_argument("--resume", type=int, metavar="STEP", help="go on from the checkpoint of this step")
    arguments = parser.parse_args(argv)
    if not arguments.plan.is_file():
        print(UsageError("no such plan", at=str(arguments.plan)), file=sys.stderr)
        return UsageError.exit_code
    directory = RunDirectory(arguments.plan.absolute().parent)
    call = _Call(tuple(argv), arguments.quiet, arguments.resume)
    with StopSignals() as signals, _log_file(directory):
        signals.follow_parent(signal.SIGKILL if started_by_rank_0() else signal.SIGTERM)
        return _run(directory, signals, call)


@dataclass(frozen=True)
class _Call:
    """What this program was started with."""

    argv: tuple[str, ...]
    quiet: bool
    resume: int | None


def _run(directory: RunDirectory, signals: StopSignals, call: _Call) -> int:
    """Train, say in events.jsonl and on stderr how it ended, and draw the report."""
    try:
        if rank() == 0:
            directory.lock()
    except ComposerError as error:  # the directory belongs to somebody else: not a word in its files
        print(error, file=sys.stderr)
        return error.exit_code
    try:
        event, reason, code = _outcome(directory, signals, call)
        if rank() == 0:
            _finish(directory, event, reason, code)
    except RunFailed as error:  # the event cannot be written: a full disk
        print(error, file=sys.stderr)
        return error.exit_code
    return code


def _finish(directory: RunDirectory, event: str, reason: str, code: int) -> None:
    directory.event(event, reason=reason, exit_code=code)
    _report(directory)


def _outcome(directory: RunDirectory, signals: StopSignals, call: _Call) -> tuple[str, str, int]:
    """The event that ends the run, its reason, and the exit code."""

    def give_up(failure: Failure) -> None:
        _show(None, failure.reason)
        _finish(directory, "failed", failure.reason, failure.exit_code)

    ranks = Ranks(directory, give_up)
    try:
        result = _train(directory, signals, call, ranks)
        if result.stopped:
            raise Stopped(result.stopped)
        ranks.end(failed=False)
    except Stopped as stop:
        ranks.end(failed=False)
        return "stopped", str(stop), stop.exit_code
    except (Exception, SystemExit) as error:  # a trainer or a reward that calls sys.exit must not look like success
        failure, hint = ranks.blame(error), ""
        if failure is None:
            failure, hint = _own_failure(error, directory)
        ranks.tell(failure)
        ranks.end(failed=True)
        _show(error, failure.reason + hint)
        return "failed", failure.reason, failure.exit_code
    return "finished", "", 0


def _own_failure(error: BaseException, directory: RunDirectory) -> tuple[Failure, str]:
    """Reason and exit code, and what to say behind the reason on the console."""
    known = error if isinstance(error, ComposerError) else disk_full(error, directory.path)
    if known is not None:
        return Failure(str(known), known.exit_code), ""
    reason = f"internal error: {type(error).__name__}: {error}"
    return Failure(reason, INTERNAL_ERROR), f" (traceback in {directory.logs.name}/{log_name()})"


def _show(error: BaseException | None, message: str) -> None:
    logger.error(message, exc_info=error)
    if rank() != 0:
        return  # the other ranks found the same mistake, or rank 0 will hear of this one
    if error is not None and os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    print(message, file=sys.stderr, flush=True)


def _train(directory: RunDirectory, signals: StopSignals, call: _Call, ranks: Ranks) -> TrainResult:
    """From plan.json to the trained model."""
    started = time.monotonic()
    checkpoint = None if call.resume is None else checkpoint_of(directory, call.resume)
    spent = _begin(directory, checkpoint)
    document = _document(directory)
    ranks.start(document, call.argv)
    # torch comes with it, and reads the environment that was set here
    from composer_core.run.feeding import feed, report_left_out
    from composer_core.run.rebuild import build, composite, restored
    from composer_core.run.scoring import scoring_teachers

    spec, plan, registry = restored(document)
    ranks.join()
    _seed(spec.seed)
    backend: Backend = build(registry, spec.backend)
    problems = backend.check()
    if problems:
        raise MissingError(f"backend {spec.backend.use!r} cannot run here: " + "; ".join(problems))
    if rank() == 0:
        _record_provenance(directory, spec, plan)
    loss = composite(spec, plan, registry)
    control = _control(directory, spec, loss, signals, spent_s=spent + time.monotonic() - started)
    session = _session(
        directory, spec, plan, registry, loss=loss, control=control, checkpoint=checkpoint, quiet=call.quiet
    )
    with closing(session):
        if (reason := agree(control.reason())) is not None:
            raise Stopped(f"{reason} before the first step")
        for note in plan.notes:
            session.note(note)
        with scoring_teachers(loss, session, registry, scope=str(directory.path)):
            feed(loss, session, registry)
            result = backend.train(session, loss)
        report_left_out(loss, session)
    if checkpoint is not None and result.steps <= checkpoint.step and not result.stopped:
        raise RunFailed(f"backend {spec.backend.use!r} resumed after step {checkpoint.step} and trained no step")
    return result


def _begin(directory: RunDirectory, checkpoint: Checkpoint | None) -> float:
    """Say that it starts or goes on; how many seconds earlier parts of the run took."""
    if rank() != 0:
        return 0.0  # the main process keeps the time, and `agree` tells the others
    if checkpoint is None:
        directory.event("started", pid=os.getpid())
        return 0.0
    spent = spent_seconds(directory)
    set_lines_aside(directory, checkpoint.step)
    directory.event("resumed", pid=os.getpid(), step=checkpoint.step)
    return spent


def _document(directory: RunDirectory) -> Any:
    try:
        return json.loads(directory.plan.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", at=str(directory.plan)) from error


def _control(
    directory: RunDirectory, spec: RunSpec, loss: CompositeLoss, signals: StopSignals, *, spent_s: float
) -> Control:
    from composer_core.run.tripwires import tripwires

    def warn(reason: str) -> None:
        directory.event("warning", reason=reason)

    return Control(
        signals,
        stop_file=directory.stop_file,
        hours=spec.limits.hours,
        spent_s=spent_s,
        tripwires=tripwires(spec.limits, channels=[active.name for active in loss.active], warn=warn),
    )


def _session(
    directory: RunDirectory,
    spec: RunSpec,
    plan: Plan,
    registry: Registry,
    *,
    loss: CompositeLoss,
    control: Control,
    checkpoint: Checkpoint | None,
    quiet: bool,
) -> RunSession:
    from composer_core.data.rewards import build_rewards
    from composer_core.run.progress import display
    from composer_core.run.session import RunSession
    from composer_core.run.sinks import open_sinks

    return RunSession(
        directory,
        spec,
        upstream=plan.upstream,
        rewards=build_rewards(spec, registry),
        objective=loss.objective,
        control=control,
        channels=[active.name for active in loss.active],
        sinks=open_sinks(spec.sinks, directory, resumed=checkpoint is not None) if rank() == 0 else (),
        display=display(spec.train.steps, sys.stderr, quiet=quiet or rank() != 0),
        resume_from=checkpoint,
    )


def _record_provenance(directory: RunDirectory, spec: RunSpec, plan: Plan) -> None:
    """Add the worker's half to what the command wrote."""
    from composer_core.run.provenance import worker_facts

    facts = worker_facts(seed=spec.seed, plugins=[asdict(plugin) for plugin in plan.plugins])
    directory.write_json("provenance.json", {**(directory.read_json("provenance.json") or {}), "worker": facts})


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _report(directory: RunDirectory) -> None:
    """The page at the end. A page that cannot be drawn is worth a warning, not the run."""
    try:
        from composer_core.run.report import build_report

        build_report(directory)
    except Exception as error:
        logger.exception("the report failed")
        reason = f"report.html could not be made: {type(error).__name__}: {error}"
        print(f"warning: {reason}", file=sys.stderr)
        with suppress(RunFailed):  # a full disk: it is said above
            directory.event("warning", reason=reason)


class _LogFile(logging.FileHandler):
    """Without logging's own tracebacks on stderr when the disk is full: the run says that, in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: there is no room to say it in the file, and nothing else to say."""


@contextmanager
def _log_file(directory: RunDirectory) -> Iterator[None]:
    """Python's logging and warnings go to a file, so that the progress display keeps the console."""
    directory.logs.mkdir(exist_ok=True)
    handler = _LogFile(directory.logs / log_name(), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
