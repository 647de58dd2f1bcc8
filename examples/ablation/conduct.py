"""Runs arms and watches them: a spec becomes a plan, Composer's own worker trains it, its checkpoints are measured.

Importing torch and a trainer takes longer than some runs, so a few processes call the worker for one run after the
other. This process only looks on: every checkpoint is measured exactly, and at the goal it writes the run's STOP file,
as `composer-run stop` does. The steps that a run makes until it notices that do not count.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from prepare import ANSWERS_PER_KEY
from results import GOAL, Outcome, Sizes, costs_of
from safetensors.torch import load_file
from task import Measures, Texts, make_task

from composer_core.data.preflight import preflight
from composer_core.errors import RunFailed, Stopped
from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.plugins.registry import Registry
from composer_core.run import worker
from composer_core.run.control import PARENT_VARIABLE, STOP_FILE
from composer_core.run.directory import RunDirectory, create_run
from composer_core.run.files import find_complete, read_jsonl
from composer_core.run.inline import QUIET_LIBRARIES
from composer_core.spec.load import LoadedSpec, load_spec
from composer_core.spec.model import RunSpec
from composer_core.spec.plan import Plan, make_plan
from composer_core.spec.resolved import values

ARMS = Path(__file__).parent / "arms"
POLL_S = 0.1


@dataclass(frozen=True)
class Job:
    """One arm on one seed."""

    arm: str
    seed: int
    data: Path
    """The seed's folder (`prepare.py`)."""
    overrides: Sequence[str] = ()
    """`key=value` texts, as on the command line of `composer-run`."""

    @property
    def name(self) -> str:
        """Of the run."""
        return f"{self.arm}-seed-{self.seed}"


@dataclass(frozen=True)
class Planned:
    """A job whose spec has been read and checked."""

    job: Job
    loaded: LoadedSpec
    plan: Plan

    @property
    def fingerprint(self) -> str:
        """Of all that the spec says, defaults left out: a result belongs to exactly that."""
        said = {key: value for key, value in values(self.loaded.spec).items() if self.loaded.sources[key] != "default"}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def plan_job(job: Job, registry: Registry) -> Planned:
    """The arm's spec with the seed's own paths in it.

    Raises:
        SpecError, UsageError: the spec, or what it points at, is wrong.
    """
    file = ARMS / f"{job.arm}.yaml"
    pairs = load_spec(file, registry).spec.data.pairs
    paths = {"model.path": job.data / "model", "data.prompts.path": job.data / "prompts.jsonl"}
    if pairs is not None:
        paths["data.pairs.path"] = job.data / Path(pairs.path).name
    own = [f"seed={job.seed}", f"name={job.name}", *(f"{key}={path.absolute()}" for key, path in paths.items())]
    loaded = load_spec(file, registry, overrides=[*own, *job.overrides])
    preflight(loaded.spec, registry)
    return Planned(job, loaded, make_plan(loaded, registry))


def run_all(jobs: Sequence[Planned], root: Path, *, processes: int) -> Iterator[Outcome]:
    """Run the jobs, `processes` at a time, in folders under `root`; yields each outcome as its run ends.

    Raises:
        RunFailed: a run failed; its own message is on stderr.
    """
    # for the processes below: each run on one thread, and none that outlives this process
    os.environ.update({**QUIET_LIBRARIES, "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())})
    waiting, running = list(jobs), dict[Future[int], Watch]()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    watch = Watch(waiting.pop(0), root)
                    running[pool.submit(train, str(watch.directory.plan))] = watch
                done, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for watch in running.values():
                    watch.look()
                for future in done:
                    yield running.pop(future).end(future.result())
        finally:
            for watch in running.values():  # after Ctrl-C or a failed run: the pool waits for those under way
                watch.stop("the ablation was broken off")


def train(plan: str) -> int:
    """One run, in a process of the pool; its exit code."""
    code = worker.main([plan, "--quiet"])
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        os._exit(code)  # the command is gone: the run has ended early, and nobody would ever end this process
    return code


class Watch:
    """A run whose directory is ready for the worker, and its checkpoints, measured as they appear."""

    def __init__(self, planned: Planned, root: Path) -> None:
        self.directory = _write(planned, root)
        self._planned, spec = planned, planned.loaded.spec
        self._every = spec.checkpoint.every or spec.train.steps
        start = Path(str(spec.model.path))
        self._texts = Texts(load_tokenizer(start))
        self._measures = Measures(make_task(planned.job.seed), self._texts)
        self._model = load_policy(start, dtype="float32")
        self._before = self._measures.measure(self._model)
        self._curve = [(0, self._before.reward)]

    def look(self) -> None:
        """Measure what is new, and stop the run at the goal."""
        while not self._reached:
            step = self._curve[-1][0] + self._every
            folder = find_complete(self.directory.checkpoints / f"step_{step}")
            if folder is None:
                return
            # not strict: the head is the embeddings, and a file has tied weights only once
            self._model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            self._curve.append((step, self._measures.reward(self._model)))
        self.stop(f"the reward is {GOAL:g}")

    def stop(self, reason: str) -> None:
        """Ask the run to end; the first reason stays."""
        if not self.directory.stop_file.exists():
            self.directory.write_text(STOP_FILE, reason)

    @property
    def _reached(self) -> bool:
        return self._curve[-1][1] >= GOAL

    def end(self, exit_code: int) -> Outcome:
        """What the finished run came to; removes its checkpoints.

        Raises:
            RunFailed: it failed, or ended before its last step without being told to.
        """
        self.look()
        planned, spec, last = self._planned, self._planned.loaded.spec, self._curve[-1][0]
        complete = self._reached or (exit_code == 0 and last + self._every > spec.train.steps)
        if exit_code not in (0, Stopped.exit_code) or not complete:
            raise RunFailed(f"{planned.job.name} ended with {exit_code} after step {last}", at=str(self.directory.path))
        metrics = [line for line in read_jsonl(self.directory.metrics) if line["step"] <= last]
        asked = 0 if spec.data.pairs is None else ANSWERS_PER_KEY * _keys_with_pairs(Path(spec.data.pairs.path))
        shutil.rmtree(self.directory.checkpoints)
        return Outcome(
            arm=planned.job.arm,
            seed=planned.job.seed,
            fingerprint=planned.fingerprint,
            curve=self._curve,
            before=self._before,
            after=self._measures.measure(self._model),
            costs=costs_of(metrics, _sizes(spec, planned.job.data, self._texts), teacher_answers=asked),
        )


def _write(planned: Planned, root: Path) -> RunDirectory:
    """A run directory with all that the worker needs."""
    directory = create_run(root, planned.job.name)
    directory.write_text("spec.yaml", planned.loaded.text)
    directory.write_json("plan.json", planned.plan.to_json())
    return directory


def _keys_with_pairs(path: Path) -> int:
    return len({pair["messages"][0]["content"] for pair in read_jsonl(path)})


def _sizes(spec: RunSpec, data: Path, texts: Texts) -> Sizes:
    """Lengths that the metrics leave out; see `results.costs_of`."""
    blocks = {block.name: block.settings.model_dump() for block in spec.loss.channels}
    prompt = len(texts.prompt("A"))
    hint = 0.0
    if "sdpo" in blocks:
        column = blocks["sdpo"]["hints"]["column"]
        hints = [row[column] for row in read_jsonl(data / "prompts.jsonl") if row[column] is not None]
        hint = sum(len(texts.prompt("A", told)) - prompt for told in hints) / len(hints)
    replay = blocks.get("replay", {})
    objective = spec.loss.objective
    return Sizes(
        prompt=prompt,
        hint=hint,
        sequences=spec.train.sequences_per_step,
        pairs=replay.get("pairs_per_step", 0),
        sides=1 if replay.get("variant") == "imitate" else 2,
        kl=objective is not None and objective.settings.model_dump()["kl_coef"] > 0,
    )
