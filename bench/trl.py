"""What Composer adds to a step of TRL, against the stock trainer with the same GRPOConfig.

    python bench/trl.py [--quick] [--json]

Contender: ComposerGRPOTrainer with the run listener writing metrics and samples into a run directory. Peer:
trl.GRPOTrainer with the same configuration, model, prompts and seed. Blocks of steps alternate in one process
(A B B A A B ...). Both are bit-equal, so step i of one block does the same work as step i of the next: steps are
compared in pairs, and the median of the pairs is quoted. Targets: at most 3 ms a step on the tiny model, at most 2 % on
SmolLM2-135M with LoRA (left out by --quick, which must end within a minute).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # else this file is what `import trl` finds
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

EXAMPLES = Path(__file__).parents[1] / "examples"
SMOL = ["train.steps=4", "train.max_completion_tokens=24", "train.prompts_per_step=1"]
TINY = ["train.steps=30", "checkpoint.every=null"]


@contextmanager
def open_run(spec_path: Path, overrides: list[str], root: Path) -> Iterator[object]:
    """A run session as the worker makes it, without a display."""
    from composer_core.data.rewards import build_rewards
    from composer_core.plugins.registry import Registry
    from composer_core.run.control import Control, StopSignals
    from composer_core.run.directory import create_run
    from composer_core.run.progress import Silent
    from composer_core.run.session import RunSession
    from composer_core.run.tripwires import tripwires
    from composer_core.spec.load import load_spec
    from composer_core.spec.plan import make_plan

    registry = Registry.discover()
    loaded = load_spec(spec_path, registry, overrides=overrides)
    plan = make_plan(loaded, registry)
    objective = loaded.spec.loss.objective
    with StopSignals() as signals:
        directory, limits = create_run(root, loaded.spec.name), loaded.spec.limits
        wires = tripwires(limits, channels=[], warn=print)
        session = RunSession(
            directory,
            loaded.spec,
            upstream=plan.upstream,
            rewards=build_rewards(loaded.spec, registry),
            objective=registry.get(objective.kind, objective.use)[1].load()(objective.settings),
            control=Control(signals, stop_file=directory.stop_file, hours=limits.hours, tripwires=wires),
            display=Silent(),
        )
        with closing(session):
            yield session


def block(kind: str, spec: Path, overrides: list[str]) -> list[float]:
    """Train one block; wall-clock seconds of each optimiser step, logging included."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    from composer_core.hf.models import load_policy, load_tokenizer
    from composer_core.loss.composite import CompositeLoss
    from composer_trl.backend import RunListener, config_of, lora_config, rows_dataset
    from composer_trl.trainer import ComposerGRPOTrainer

    ticks = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            ticks.append(time.perf_counter())

        def on_train_end(self, args, state, control, **_):
            ticks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as root, open_run(spec, overrides, Path(root)) as run:
        folder = run.model_folder()
        listener = RunListener(run, CompositeLoss([], run.objective))
        ours = {"callbacks": [Clock(), listener], "on_generation": listener.on_generation}
        trainer = (ComposerGRPOTrainer if kind == "composer" else GRPOTrainer)(
            load_policy(folder, dtype="float32"),
            [reward.score for reward in run.rewards],
            config_of(run),
            train_dataset=rows_dataset(run.prompts()),
            processing_class=load_tokenizer(folder),
            peft_config=lora_config(run.spec.model.lora),
            **(ours if kind == "composer" else {"callbacks": [Clock()]}),
        )
        listener.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [after - before for before, after in pairwise(ticks)]


def compare(spec: Path, overrides: list[str], rounds: int) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Pairs (composer, stock) of the same step, the first of each block left out, and both medians."""
    pairs = []
    for number in range(rounds):
        order = ("composer", "stock") if number % 2 == 0 else ("stock", "composer")
        seconds = {kind: block(kind, spec, overrides) for kind in order}
        pairs += list(zip(seconds["composer"][1:], seconds["stock"][1:], strict=True))
    medians = {kind: statistics.median(pair[i] for pair in pairs) for i, kind in enumerate(("composer", "stock"))}
    return pairs, medians


def figures(quick: bool) -> Iterator[dict[str, object]]:
    pairs, medians = compare(EXAMPLES / "quickstart.yaml", TINY, rounds=4 if quick else 10)
    added = statistics.median(ours - stock for ours, stock in pairs)
    yield {
        "figure": "added to a step, tiny model (s)",
        "ratio": round(added / 0.003, 3),
        "target": 1.0,
        "met": added <= 0.003,
        "peers": {"added": round(added, 5)} | {kind: round(value, 4) for kind, value in medians.items()},
        "n": len(pairs),
    }
    if quick:
        return
    pairs, medians = compare(EXAMPLES / "smollm2-math.yaml", SMOL, rounds=6)
    ratio = statistics.median(ours / stock for ours, stock in pairs)
    yield {
        "figure": "step, SmolLM2-135M LoRA, composer / stock",
        "ratio": round(ratio, 4),
        "target": 1.02,
        "met": ratio <= 1.02,
        "peers": {kind: round(value, 3) for kind, value in medians.items()},
        "n": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    for figure in figures(options.quick):
        if options.json:
            print(json.dumps(figure), flush=True)
        else:
            met = "met" if figure["met"] else "MISSED"
            print(f"{figure['figure']}: ratio {figure['ratio']}, target {figure['target']}: {met} {figure['peers']}")


if __name__ == "__main__":
    main()
