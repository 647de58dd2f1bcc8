"""Does each channel of the loss help, and what does not? One command:

    python examples/ablation/run.py                        five main arms, five seeds: some minutes on two cores
    python examples/ablation/run.py --arms every           with half coverage and controls
    python examples/ablation/run.py --arms sdpo --seeds 11 --out /tmp/try --set train.steps=100

Makes the data of each seed (`prepare.py`), trains every arm with Composer's worker (`conduct.py`), writes report.html
and report.md. Data and outcomes stay in --out: what is there is not made again, and an arm whose spec has changed is.
The README says what the arms are and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

# before torch is imported: tiny models are fastest on one thread, and nothing here needs a network
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

if TYPE_CHECKING:
    from conduct import Planned
    from results import Outcome

MAIN = ("grpo-2e-4", "grpo-4e-4", "sdpo", "replay", "all")
HALF = ("half-sdpo", "half-replay", "half-all")
CONTROLS = ("wrong-hint", "void-hint", "never-right", "imitate")
GROUPS = {"main": MAIN, "half": HALF, "controls": CONTROLS, "every": (*MAIN, *HALF, *CONTROLS)}
SEEDS = (11, 12, 13, 14, 15)
"""Fixed before any of them was run; everything was tuned on seeds 1 to 5."""


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 when all targets that could be checked are met, 1 when not, Composer's own after an error."""
    from composer_core.errors import ComposerError

    options = _options(argv)
    try:
        prepare_seeds(options.seeds, options.out, processes=options.processes)
        outcomes = run_arms(options)
    except ComposerError as error:
        _say(str(error))
        return error.exit_code
    return report_on(outcomes, options)


def report_on(outcomes: Sequence[Outcome], options: argparse.Namespace) -> int:
    """Write the report, print the table; `main`'s exit code."""
    from report import markdown, write_report
    from results import checks, rows

    machine = f"{_versions()}; {options.processes} processes of one thread; seeds {', '.join(map(str, options.seeds))}"
    write_report(outcomes, options.out, machine=machine)
    found = checks(outcomes)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows(outcomes)], "checks": [asdict(c) for c in found]}))
    else:
        print(markdown(outcomes, machine=machine))
        print(f"report: {options.out / 'report.html'}")
    return 0 if all(check.met for check in found) else 1


def prepare_seeds(seeds: Sequence[int], out: Path, *, processes: int) -> None:
    """Make the data folders that are not there yet, several at a time."""
    missing = [seed for seed in seeds if not seed_folder(out, seed).is_dir()]
    if missing:
        _say(f"start models for seeds {', '.join(map(str, missing))}: half a minute each")
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(partial(prepare_seed, out), missing))


def prepare_seed(out: Path, seed: int) -> None:
    """One of them, in a process of its own."""
    from prepare import prepare

    prepare(seed_folder(out, seed), seed=seed)


def seed_folder(out: Path, seed: int) -> Path:
    """Where a seed's data is."""
    return out / f"seed-{seed}"


def run_arms(options: argparse.Namespace) -> list[Outcome]:
    """Every arm on every seed, in this order; those with an outcome of the same spec are not run again."""
    from conduct import Job, plan_job, run_all

    from composer_core.plugins.registry import Registry

    registry = Registry.discover()
    jobs = [
        plan_job(Job(arm, seed, seed_folder(options.out, seed), options.set), registry)
        for arm in options.arms
        for seed in options.seeds
    ]
    found = {job.fingerprint: outcome for job in jobs if (outcome := _kept(options.out, job)) is not None}
    missing = [job for job in jobs if job.fingerprint not in found]
    for number, outcome in enumerate(run_all(missing, options.out / "runs", processes=options.processes), 1):
        outcome.save(_file(options.out, outcome.arm, outcome.seed))
        found[outcome.fingerprint] = outcome
        _say(f"{number}/{len(missing)} {outcome.arm}, seed {outcome.seed}: {_summary(outcome)}")
    return [found[job.fingerprint] for job in jobs]


def _kept(out: Path, job: Planned) -> Outcome | None:
    from results import Outcome

    file = _file(out, job.job.arm, job.job.seed)
    outcome = Outcome.load(file) if file.is_file() else None
    return outcome if outcome is not None and outcome.fingerprint == job.fingerprint else None


def _file(out: Path, arm: str, seed: int) -> Path:
    return out / "outcomes" / f"{arm}-seed-{seed}.json"


def _summary(outcome: Outcome) -> str:
    from report import steps
    from results import GOAL, HALF_WAY

    half_way, goal = steps(outcome.steps_to(HALF_WAY)), steps(outcome.steps_to(GOAL))
    return f"{HALF_WAY:g} after {half_way} steps, {GOAL:g} after {goal}; best {outcome.best:.2f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _versions() -> str:
    packages = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "composer-core"))
    return f"{packages}; Python {platform.python_version()}, {platform.machine()}"


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description="The ablation; see the README beside it.")
    groups = f"{', '.join(GROUPS)}, or names by commas; default main"
    parser.add_argument("--arms", type=_arms, default=MAIN, help=groups)
    parser.add_argument("--seeds", type=_seeds, default=SEEDS, help="by commas; default those of the README's table")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder for everything")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every arm's spec")
    parser.add_argument("--json", action="store_true", help="print the table and the targets as JSON")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    return options


def _arms(text: str) -> tuple[str, ...]:
    named = GROUPS.get(text) or tuple(text.split(","))
    unknown = [arm for arm in named if arm not in GROUPS["every"]]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm {unknown[0]!r}; there are {', '.join(GROUPS['every'])}")
    return named


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(seed) for seed in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
