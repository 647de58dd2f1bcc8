"""What a launch puts into a run's store, and how a worker takes it out: the run directory and what its plan names.

    input=ID/run/...      the run directory as it is: plan, spec, lines so far; the checkpoint to go on from
    input=ID/files/...    data, models, local plugin files and functions that the plan names by a path of this machine
    input=ID/done.json    written last: all of it with sizes and sha256, and which path each file stands for
    input=ID/STOP         a wish of the control side, for `composer-run stop`

Nothing else of the machine travels: no package (the worker's interpreter must have them), no secret (a plan has none),
no file that a shipped one imports or reads by itself. Paths in the plan are changed where it is taken out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import RunFailed, UsageError
from composer_core.jobs import LEDGER, Job
from composer_core.plugins.contributions import Contribution
from composer_core.plugins.registry import Registry
from composer_core.plugins.settings import PathKind
from composer_core.run.control import STOP_FILE
from composer_core.run.directory import RunDirectory
from composer_core.run.files import read_json, write_json
from composer_core.spec.model import PATH_KEYS, PLUG_POINTS, REPLAY_ONLY
from composer_executors.journal import Reader, checkpoints
from composer_executors.ledger import REPLICAS
from composer_executors.store import Store, files_of, stamps_as_json, stamps_of_json

BOOTSTRAP = "composer_executors.bootstrap"
LEFT = ("checkpoints", "model", "scratch", "logs", "lock.json", "report.html", STOP_FILE, LEDGER, REPLICAS)
"""Of a run directory: made by workers and kept in the store by them, or of this machine alone."""
_INPUT = "input.json"
_ELSEWHERE = ("executor", *REPLAY_ONLY)
"""Sections of a spec whose paths are the control side's. Teachers that score for a channel are servers."""


def ship(job: Job) -> None:
    """Put what a worker of this job needs into its store; later calls of `input_of` name it.

    Raises:
        UsageError: a path of the plan is not there.
        MissingError: the store does not let us in.
        RunFailed: it fails.
    """
    store, identity = Store(job.store), secrets.token_hex(8)
    directory = RunDirectory(job.run_dir)
    files = {f"run/{name}": path for name, path in _of_run(directory).items()}
    files |= {f"run/{name}": path for name, path in _to_resume(store, job).items()}
    paths = {}
    for number, path in enumerate(dict.fromkeys(paths_of(directory.read_json("plan.json"), Registry.discover()))):
        paths[str(path)] = f"files/{number}/{path.name}"
        files |= _named(path, paths[str(path)])
    stamps = store.put_tree(_prefix(identity), files)
    store.create_json(f"{_prefix(identity)}/done.json", {"files": stamps_as_json(stamps), "paths": paths})
    folder = job.run_dir / REPLICAS
    folder.mkdir(exist_ok=True)
    write_json(folder / _INPUT, {"input": identity})


def input_of(job: Job) -> str:
    """Under which name the last `ship` of a run put it."""
    return str(read_json(job.run_dir / REPLICAS / _INPUT)["input"])


def bootstrap_argv(job: Job, identity: str) -> tuple[str, ...]:
    """What a replica of a job with a store runs in place of the job's own arguments."""
    options = job.argv[job.argv.index(str(RunDirectory(job.run_dir).plan)) + 1 :]
    return ("-m", BOOTSTRAP, job.store, "--input", identity, "--", *options)


def paths_of(plan: Mapping[str, Any], registry: Registry) -> Iterator[Path]:
    """Files and folders of this machine that the worker of a plan reads.

    Args:
        plan: what plan.json holds.
        registry: what is installed; the plan's local plugin files are added to it.
    """
    for plugin in plan["plugins"]:
        if plugin["file"]:
            yield Path(plugin["file"])
            registry.add_file(Path(plugin["file"]))
    for keys, kind in PATH_KEYS.items():
        if keys[0] not in _ELSEWHERE:
            yield from _paths_in(_at(plan["spec"], keys), kind)
    for keys, point in PLUG_POINTS.items():
        if keys[0] in _ELSEWHERE:
            continue
        blocks: list[Mapping[str, Any]] = []
        point.map(blocks.append, _at(plan["spec"], keys))
        for block in blocks:
            _, contribution = registry.get(point.kind, block["use"])
            yield from _paths_of_block(contribution, block["settings"])


def _paths_of_block(contribution: Contribution[Any], settings: Mapping[str, Any]) -> Iterator[Path]:
    for name, field in contribution.settings.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, PathKind):
                yield from _paths_in(settings.get(name), mark)


def _paths_in(value: Any, kind: PathKind) -> Iterator[Path]:
    for text in [value] if isinstance(value, str) else value or []:
        path = Path(text.rpartition(":")[0] if kind is PathKind.FUNCTION else text)
        # the id of something on a hub and a function of an installed module are no paths; a loaded spec's are absolute
        if path.is_absolute() and kind is not PathKind.STORE:
            yield path


def _at(spec: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        spec = spec.get(key) if isinstance(spec, dict) else None
    return spec


def _of_run(directory: RunDirectory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for entry in sorted(directory.path.iterdir()):
        if entry.name in LEFT or entry.name.startswith("."):
            continue
        found |= _named(entry, entry.name)
    return found


def _named(path: Path, name: str) -> dict[str, Path]:
    if path.is_dir():
        return {f"{name}/{inner}": file for inner, file in files_of(path).items()}
    if not path.is_file():
        raise UsageError(f"no such file or folder: {path}", at="plan.json")
    return {name: path}


def _to_resume(store: Store, job: Job) -> dict[str, Path]:
    """The checkpoint to go on from, where no worker has put it into this store."""
    if "--resume" not in job.argv:
        return {}
    step = int(job.argv[job.argv.index("--resume") + 1])
    if step in checkpoints(Reader(store, 0).trees()):
        return {}
    folder = dict(RunDirectory(job.run_dir).complete_checkpoints())[step]
    return _named(folder, f"checkpoints/step_{step}")


def _prefix(identity: str) -> str:
    return f"input={identity}"


# -- the worker's end --------------------------------------------------------------------------------------------------


def unpack(store: Store, identity: str, directory: RunDirectory) -> None:
    """Fill a run directory with what was shipped; the plan's files stand in its folder `files`.

    Raises:
        RunFailed: something is gone or damaged.
    """
    done = store.read_json(f"{_prefix(identity)}/done.json")
    if done is None:
        raise RunFailed(f"nothing was put there as input {identity}", at=store.uri)
    stamps = stamps_of_json(done["files"])
    run = {name.removeprefix("run/"): stamp for name, stamp in stamps.items() if name.startswith("run/")}
    store.get_tree(f"{_prefix(identity)}/run", run, directory.path)
    rest = {name: stamp for name, stamp in stamps.items() if not name.startswith("run/")}
    store.get_tree(_prefix(identity), rest, directory.path)
    paths = {before: str(directory.path / name) for before, name in done["paths"].items()}
    directory.write_json("plan.json", _moved(json.loads(directory.plan.read_text(encoding="utf-8")), paths))


def _moved(value: Any, paths: Mapping[str, str]) -> Any:
    """A document with each path, and `path:function`, as it is here."""
    if isinstance(value, dict):
        return {key: _moved(inner, paths) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, paths) for inner in value]
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")
    if colon and file in paths:
        return f"{paths[file]}:{function}"
    return paths.get(value, value)


def wish_to_stop(store: Store, identity: str, reason: str) -> None:
    """Ask the worker to stop, as a STOP file does."""
    store.create(_wish(identity), reason.encode())


def wished_to_stop(store: Store, identity: str) -> bytes | None:
    """Whether somebody did; the reason."""
    return store.read(_wish(identity))


def _wish(identity: str) -> str:
    return f"{_prefix(identity)}/{STOP_FILE}"
