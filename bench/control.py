"""What a run's own bookkeeping costs per step: metrics, rollouts, events, tripwires, progress, the question to stop.

    python bench/control.py [--quick] [--json]

A `RunSession` logs steps as a backend would, with 40 metrics, two channels, four rollouts and all limits set; between
them a bare loop writes the same line with `json.dumps` alone. Contenders run interleaved in one process, figures are
medians of wall times. `ratio` is milliseconds over the target, `peers` holds the milliseconds of all contenders.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from composer_core.plugins.builtin_settings import InlineSettings, ToySettings
from composer_core.plugins.contributions import Kind
from composer_core.plugins.settings import NoSettings
from composer_core.run.context import RolloutSample
from composer_core.run.control import Control, StopSignals
from composer_core.run.directory import RunDirectory, create_run
from composer_core.run.progress import display
from composer_core.run.session import RunSession
from composer_core.run.tripwires import tripwires
from composer_core.spec.model import LimitsSpec, Plugged, RunSpec

FIGURE = "bookkeeping per step"
WATCHING = "tripwires per step"
TARGET_MS = {FIGURE: 2.0, WATCHING: 0.1}
LIMITS = LimitsSpec(hours=10.0, kl=1e9, reward_drop=1.0, allow_dead=True)
SAMPLES = [RolloutSample("a prompt " * 40, "a completion " * 60, {"exact-match": 1.0}, 0.5)] * 4


def metrics(step: int) -> dict[str, float]:
    """A line as a run with two channels logs it."""
    names = ("loss", "weight", "active", "grad_norm", "tokens")
    channels = {f"{name}/{channel}": 0.5 for name in names for channel in ("sdpo", "replay")}
    fixed = {"reward/mean": 0.5, "reward/std": 0.1, "loss/total": 0.1, "loss/policy": 0.2, "policy/kl": 0.01}
    upstream = {f"upstream/metric_{index}": step / 3 + index for index in range(25)}
    return {**fixed, **channels, "tokens_per_s": 1e3, "step_time": 0.1, **upstream}


def spec() -> RunSpec:
    """Any spec: the session asks it for numbers only."""

    def plugged(kind: Kind, use: str, settings: object) -> Plugged:
        return Plugged(kind, use, "bench", settings)  # type: ignore[arg-type]

    return RunSpec(
        version=1,
        name="bench",
        model={"builtin": "tiny"},
        data={"prompts": {"builtin": "digits"}, "rewards": [plugged(Kind.REWARD, "regex", NoSettings())]},
        loss={"objective": plugged(Kind.OBJECTIVE, "grpo", NoSettings())},
        train={"steps": 10_000},
        backend=plugged(Kind.BACKEND, "toy", ToySettings()),
        executor=plugged(Kind.EXECUTOR, "inline", InlineSettings()),
        limits=LIMITS,
    )


def session(directory: RunDirectory) -> RunSession:
    """As the worker makes it."""
    wires = tripwires(LIMITS, channels=["sdpo", "replay"], warn=lambda reason: None)
    return RunSession(
        directory,
        spec(),
        upstream={},
        rewards=[],
        objective=None,  # type: ignore[arg-type]
        control=Control(StopSignals(), stop_file=directory.stop_file, hours=LIMITS.hours, tripwires=wires),
        display=display(10_000, io.StringIO(), quiet=False),
    )


def measure(folder: Path, *, rounds: int) -> dict[str, float]:
    """Median milliseconds of each contender, run in turn."""
    directory = create_run(folder, "bench")
    run = session(directory)
    wires = tripwires(LIMITS, channels=["sdpo", "replay"], warn=lambda reason: None)
    bare = (folder / "bare.jsonl").open("w")

    def everything(step: int) -> None:
        run.log_step(step, metrics(step))
        run.log_rollouts(step, SAMPLES)
        run.stop_reason()
        if step % 10 == 0:
            run.event("note", step=step)

    def watching(step: int) -> None:
        line = metrics(step)
        for wire in wires:
            wire.check(step, line)

    def json_alone(step: int) -> None:
        bare.write(json.dumps(metrics(step)) + "\n")
        bare.flush()

    contenders: dict[str, Callable[[int], None]] = {FIGURE: everything, WATCHING: watching, "json alone": json_alone}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(1, rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender(step)
            seconds[name].append(time.perf_counter() - start)
    run.close()
    bare.close()
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def main() -> int:
    """Print the figures; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args()
    rounds = 500 if options.quick else 5000
    with tempfile.TemporaryDirectory() as folder:
        peers = {name: round(value, 4) for name, value in measure(Path(folder), rounds=rounds).items()}
    missed = 0
    for figure, target in TARGET_MS.items():
        ratio = peers[figure] / target
        missed += ratio > 1
        measured = {"figure": f"{figure} (ms)", "ratio": round(ratio, 3), "target": 1.0, "met": ratio <= 1}
        line = {**measured, "peers": peers, "n": rounds}
        print(json.dumps(line) if options.json else f"{figure}: {peers[figure]:.3f} ms, target {target:g} ms")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
