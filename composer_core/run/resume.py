"""Going on with a run: what is checked before it starts again, and what happens to lines after its checkpoint.

The run's own plan is the truth, not the spec file, which may have changed since. Overrides may only touch what leaves
it the same run (`HARMLESS`); anything else is refused with the difference. `plan_resume` and `write_resume` run in
the control process, `checkpoint_of`, `set_lines_aside` and `spent_seconds` in the worker. What a checkpoint holds is
its backend's business.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import RunFailed, UsageError
from composer_core.run.context import Checkpoint
from composer_core.run.directory import STARTS, RunDirectory
from composer_core.run.files import JsonLines, marker, read_jsonl, write_lines
from composer_core.run.provenance import versions
from composer_core.run.ranks import rank
from composer_core.spec.model import PLUG_POINTS, WEIGHTED
from composer_core.spec.resolved import leaves, values

if TYPE_CHECKING:
    from composer_core.plugins.contributions import Kind
    from composer_core.plugins.registry import Registry
    from composer_core.spec.model import RunSpec
    from composer_core.spec.plan import Plan

HARMLESS = ("train.steps", "train.log_every", "train.sample_rollouts", "checkpoint", "limits", "sinks", "executor")
"""Keys and sections that an override may change: none of them reaches the weights."""
CHANGED = "changed"
"""The event of an override; the command writes it, while no worker runs."""


@dataclass(frozen=True)
class PlannedResume:
    """A run that can go on."""

    spec: RunSpec
    plan: Plan
    step: int
    """Of the checkpoint it goes on from."""
    changes: Mapping[str, tuple[Any, Any]]
    """Dotted key -> value before and now."""
    notes: tuple[str, ...]
    """What the user should know."""


def plan_resume(directory: RunDirectory, registry: Registry, overrides: Sequence[str]) -> PlannedResume:
    """Check that a run can go on. Writes nothing.

    Args:
        directory: the run.
        registry: what is installed; the plan's local plugin files are added to it.
        overrides: `key=value` texts, laid over the run's spec.

    Raises:
        UsageError: it still runs, has no complete checkpoint, has nothing left to do, or would become another run.
    """
    from composer_core.spec.load import load_spec
    from composer_core.spec.plan import Plan, make_plan

    state = directory.state()
    if state.state == "running":
        raise UsageError(f"run {directory.name} is running", fix=f"composer-run stop {directory.name}")
    before = Plan.from_json(directory.read_json("plan.json"))
    written = _as_written(before.spec)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{directory.name}.json")
        file.write_text(json.dumps(written), encoding="utf-8")
        loaded = load_spec(file, registry, overrides=overrides)
    plan = replace(make_plan(loaded, registry), spec_path=before.spec_path)
    changes = dict(_differences(dict(leaves(written)), values(loaded.spec)))
    _refuse_another_run({**_other_plugins(before, plan), **changes}, before)
    step, broken = _newest(directory)
    _refuse_nothing_left(directory, step, before=before.spec["train"]["steps"], now=loaded.spec.train.steps)
    _refuse_stretched_schedule(loaded.spec, changes)
    return PlannedResume(loaded.spec, plan, step, changes, notes=(*broken, *_notes(directory, before)))


def _as_written(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's spec as a spec file would say it. From the plan's text, so that placeholders stay placeholders."""
    written: dict[str, Any] = json.loads(json.dumps(spec))
    written.pop("extends", None)  # what the base file said is in here already
    for path, point in PLUG_POINTS.items():
        container = written
        for part in path[:-1]:
            container = container[part]

        def block(found: Mapping[str, Any], kind: Kind = point.kind) -> dict[str, Any]:
            weight = {"weight": found["weight"]} if kind in WEIGHTED else {}
            return {"use": found["use"], **weight, **found["settings"]}

        if (found := container.pop(path[-1])) is not None:
            container[path[-1]] = point.map(block, found)
    return written


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in dict.fromkeys([*before, *now]):
        if key != "extends" and before.get(key) != now.get(key):
            yield key, (before.get(key), now.get(key))


def _other_plugins(before: Plan, now: Plan) -> dict[str, tuple[Any, Any]]:
    """Plugins of both plans that are not the same; another executor may bring one of its own."""
    then, today = ({plugin.name: plugin.sha256[:12] or plugin.version for plugin in p.plugins} for p in (before, now))
    common = then.keys() & today.keys()
    return {f"plugin {name}": (then[name], today[name]) for name in sorted(common) if then[name] != today[name]}


def _refuse_another_run(changes: Mapping[str, tuple[Any, Any]], before: Plan) -> None:
    changed = {key: change for key, change in changes.items() if not _is_harmless(key)}
    if changed:
        lines = "".join(f"\n  {key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in changed.items())
        raise UsageError(
            f"this would be another run:{lines}",
            fix=f"leave it as it was; or start a new run of {before.spec_path}",
        )


def _is_harmless(key: str) -> bool:
    return any(key == part or key.startswith((f"{part}.", f"{part}[")) for part in HARMLESS)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _newest(directory: RunDirectory) -> tuple[int, list[str]]:
    """The step of the newest complete checkpoint, and a note for each newer one that is not."""
    complete = [step for step, _ in directory.complete_checkpoints()]
    if not complete:
        raise UsageError(
            f"run {directory.name} has no complete checkpoint to go on from",
            at=str(directory.checkpoints),
            fix="start it anew, with checkpoint.every=N for checkpoints on the way",
        )
    step = complete[-1]
    broken = [found for found in directory.checkpoint_steps() if found > step]
    return step, [f"step_{found} is incomplete, resuming from step_{step}" for found in broken]


def _refuse_nothing_left(directory: RunDirectory, step: int, *, before: int, now: int) -> None:
    finished = directory.state().state == "done" and now <= before
    if step < now and not finished:
        return
    done = f"run {directory.name} is done" if finished else f"the checkpoint is at step {step} of {now}"
    longer = max(step, before)
    raise UsageError(f"nothing is left to do: {done}", fix=f"train.steps={2 * longer} trains longer")


def _refuse_stretched_schedule(spec: RunSpec, changes: Mapping[str, tuple[Any, Any]]) -> None:
    if "train.steps" in changes and spec.train.schedule != "constant":
        raise UsageError(
            f"train.steps: a {spec.train.schedule} schedule stretches over all steps, so another number of them makes "
            "it another run",
            fix=f"keep train.steps={changes['train.steps'][0]}, or start a new run from the trained model",
        )


def _notes(directory: RunDirectory, before: Plan) -> Iterator[str]:
    with suppress(OSError, UnicodeDecodeError):  # the file may be gone or be another thing by now: nothing to compare
        given = (directory.path / "spec.yaml").read_text(encoding="utf-8")
        if Path(before.spec_path).read_text(encoding="utf-8") != given:
            yield f"note: {before.spec_path} has changed; the run goes on with the spec it was started with"
    facts = directory.read_json("provenance.json") or {}
    then, now = facts.get("worker", {}).get("versions", {}), versions()
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            yield f"note: {name} was {then[name]} and is {now[name]} now; the last digits may differ"


def write_resume(directory: RunDirectory, planned: PlannedResume) -> None:
    """Take away what the last part left (STOP file, scratch) and write the plan that the worker goes on with."""
    directory.stop_file.unlink(missing_ok=True)
    shutil.rmtree(directory.scratch, ignore_errors=True)
    if not planned.changes:
        return
    resolved = directory.read_json("resolved.json") or {}
    new = {key: {"value": value, "source": "command line"} for key, (_, value) in planned.changes.items()}
    directory.event(CHANGED, changes={key: list(change) for key, change in planned.changes.items()})
    directory.write_json("resolved.json", {**resolved, **new})
    directory.write_json("plan.json", planned.plan.to_json())


# -- the worker's end --------------------------------------------------------------------------------------------------


def checkpoint_of(directory: RunDirectory, step: int) -> Checkpoint:
    """The complete checkpoint of a step.

    Raises:
        RunFailed: it is not there, or not complete.
    """
    for found, folder in directory.complete_checkpoints():
        if found == step:
            return Checkpoint(step, folder, rank())
    raise RunFailed(f"checkpoint step_{step} is not there or not complete", at=str(directory.checkpoints))


def prompts_of(checkpoint: Checkpoint) -> str:
    """The fingerprint of the prompts that a checkpoint was made with; empty where it has none."""
    return str((marker(checkpoint.folder) or {}).get("prompts", ""))


def set_lines_aside(directory: RunDirectory, step: int) -> None:
    """Move lines about later steps from metrics.jsonl and rollouts.jsonl to `*.dropped.jsonl`: they come again."""
    for path in (directory.metrics, directory.rollouts):
        lines = read_jsonl(path)
        late = [line for line in lines if line["step"] > step]
        if not late:
            continue
        # first kept twice, then removed: a kill in between loses nothing
        dropped = JsonLines(path.with_suffix(".dropped.jsonl"))
        for line in late:
            dropped.write(line)
        dropped.close()
        write_lines(path, [line for line in lines if line["step"] <= step])


def spent_seconds(directory: RunDirectory) -> float:
    """How long the parts of a run took so far, each from its start to its last sign of life."""
    events = [event for event in read_jsonl(directory.events) if event["event"] != CHANGED]
    starts = [event["time"] for event in events if event["event"] in STARTS]
    files = (directory.metrics, directory.metrics.with_suffix(".dropped.jsonl"))
    signs = sorted([line["time"] for path in files for line in read_jsonl(path)] + [event["time"] for event in events])
    spent = 0.0
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        spent += max(sign for sign in signs if start <= sign < end or sign == start) - start
    return spent
