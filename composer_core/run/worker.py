"""What every executor starts: `python -m composer_core.run.worker [--quiet] RUN_DIRECTORY/plan.json`.

It runs in the trainer's own interpreter, reads everything from the plan, trains, and ends with the run's exit code.
A mistake of the user is one message on stderr; tracebacks go to logs/worker.log (and to stderr with COMPOSER_DEBUG=1).
Nothing heavy is imported here at the top, so that signals are caught from the first moments on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import ComposerError, MissingError, Stopped, UsageError
from composer_core.run.control import StopSignals
from composer_core.run.directory import DEBUG_VARIABLE, RunDirectory

if TYPE_CHECKING:
    from composer_core.loss.composite import CompositeLoss
    from composer_core.plugins.registry import Registry
    from composer_core.protocols import Backend, Objective, TrainResult
    from composer_core.run.session import RunSession
    from composer_core.spec.model import Plugged, RunSpec
    from composer_core.spec.plan import Plan

INTERNAL_ERROR = 4
logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run a plan; the exit code of the run."""
    parser = argparse.ArgumentParser(prog="composer_core.run.worker", description="Train what a plan describes.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    arguments = parser.parse_args(argv)
    if not arguments.plan.is_file():
        print(UsageError("no such plan", at=str(arguments.plan)), file=sys.stderr)
        return UsageError.exit_code
    directory = RunDirectory(arguments.plan.absolute().parent)
    with StopSignals() as signals, _log_file(directory):
        code = _run(directory, signals, quiet=arguments.quiet)
        if _is_main():
            _report(directory)
    return code


def _run(directory: RunDirectory, signals: StopSignals, *, quiet: bool) -> int:
    """Train, and say in events.jsonl and on stderr how it ended."""
    try:
        if _is_main():
            directory.lock()
            directory.event("started", pid=os.getpid())
        result = _train(directory, signals, quiet=quiet)
        if result.stopped:
            raise Stopped(result.stopped)
    except Stopped as stop:
        return _end(directory, "stopped", str(stop), stop.exit_code)
    except ComposerError as error:
        _show(error, str(error))
        return _end(directory, "failed", str(error), error.exit_code)
    except (Exception, SystemExit) as error:  # a trainer or a reward that calls sys.exit must not look like success
        reason = f"internal error: {type(error).__name__}: {error}"
        _show(error, f"{reason} (traceback in {directory.logs.name}/worker.log)")
        return _end(directory, "failed", reason, INTERNAL_ERROR)
    return _end(directory, "finished", "", 0)


def _end(directory: RunDirectory, event: str, reason: str, exit_code: int) -> int:
    if _is_main():
        directory.event(event, reason=reason, exit_code=exit_code)
    return exit_code


def _show(error: BaseException, message: str) -> None:
    logger.error(message, exc_info=error)
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    print(message, file=sys.stderr, flush=True)


def _train(directory: RunDirectory, signals: StopSignals, *, quiet: bool) -> TrainResult:
    """From plan.json to the trained model."""
    spec, plan, registry = _restore(directory)
    _seed(spec.seed)
    backend: Backend = _build(registry, spec.backend)
    problems = backend.check()
    if problems:
        raise MissingError(f"backend {spec.backend.use!r} cannot run here: " + "; ".join(problems))
    if _is_main():
        _record_provenance(directory, spec, plan)
    objective: Objective = _build(registry, spec.loss.objective)
    loss = _composite(spec, registry, objective)
    with closing(_session(directory, spec, plan, registry, objective, signals, quiet=quiet)) as session:
        if signals.reason is not None:
            raise Stopped(f"{signals.reason} before the first step")
        return backend.train(session, loss)


def _restore(directory: RunDirectory) -> tuple[RunSpec, Plan, Registry]:
    from composer_core.plugins.registry import Registry
    from composer_core.spec.plan import restore

    try:
        document = json.loads(directory.plan.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", at=str(directory.plan)) from error
    registry = Registry.discover()
    spec, plan = restore(document, registry)
    return spec, plan, registry


def _build(registry: Registry, plugged: Plugged) -> Any:
    """The object that runs, from a `use:` block."""
    _, contribution = registry.get(plugged.kind, plugged.use)
    return contribution.load()(plugged.settings)


def _composite(spec: RunSpec, registry: Registry, objective: Objective) -> CompositeLoss:
    from composer_core.loss.composite import ActiveChannel, CompositeLoss

    channels = [ActiveChannel(block.name, block.weight, _build(registry, block)) for block in spec.loss.channels]
    return CompositeLoss(channels, objective)


def _session(
    directory: RunDirectory,
    spec: RunSpec,
    plan: Plan,
    registry: Registry,
    objective: Objective,
    signals: StopSignals,
    *,
    quiet: bool,
) -> RunSession:
    from composer_core.data.rewards import build_rewards
    from composer_core.run.progress import display
    from composer_core.run.session import RunSession

    return RunSession(
        directory,
        spec,
        upstream=plan.upstream,
        rewards=build_rewards(spec, registry),
        objective=objective,
        signals=signals,
        display=display(spec.train.steps, sys.stderr, quiet=quiet or not _is_main()),
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
        directory.event("warning", reason=reason)
        print(f"warning: {reason}", file=sys.stderr)


@contextmanager
def _log_file(directory: RunDirectory) -> Iterator[None]:
    """Python's logging and warnings go to a file, so that the progress display keeps the console."""
    directory.logs.mkdir(exist_ok=True)
    name = "worker.log" if _is_main() else f"worker-{os.environ['RANK']}.log"
    handler = logging.FileHandler(directory.logs / name, encoding="utf-8")
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


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
