"""How long a user waits for `composer-run --help` and `composer-run check`, in fresh processes, and for a long spec.

    python bench/cli.py [--quick] [--json]

Contenders run interleaved; figures are medians of wall times. `ratio` is seconds over the target, `peers` holds the
seconds of all contenders, a bare interpreter among them. A spec of 300 lines is loaded and planned in this process,
between parsing the same text with PyYAML alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
VALIDATION = "load and plan 300 lines"
TARGETS = {"composer-run --help": 0.6, "composer-run check": 1.0, VALIDATION: 0.05}


def contenders(spec: Path) -> dict[str, list[str]]:
    """Name -> argv; all start the same interpreter."""
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "composer-run --help": [*program, "--help"],
        "composer-run check": [*program, "check", str(spec)],
    }


def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each contender, run in turn."""
    programs = contenders(SPEC)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, argv in programs.items():
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "100"})
            if number:  # the first round fills the file cache
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def long_spec(lines: int = 300) -> str:
    """A right spec of this many lines: many rewards, one option a line."""
    head = """\
version: 1
name: long
model: {builtin: tiny}
loss: {objective: {use: grpo}}
train: {steps: 5}
backend: {use: toy}
data:
  prompts: {builtin: digits}
  rewards:
"""
    reward = "    - use: length\n      weight: 0.5\n      target: {}\n      tolerance: 40\n      unit: words\n"
    count, rest = divmod(lines - head.count("\n"), reward.count("\n"))
    return head + "".join(reward.format(index + 1) for index in range(count)) + "# the end\n" * rest


def measure_long_spec(rounds: int) -> dict[str, float]:
    """Median seconds to load and plan a spec of 300 lines, and to parse it alone."""
    import yaml

    from composer_core.plugins.registry import Registry
    from composer_core.spec.load import load_spec
    from composer_core.spec.plan import make_plan

    registry, text = Registry.discover(), long_spec()
    seconds: dict[str, list[float]] = {VALIDATION: [], "yaml.safe_load": []}
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "long.yaml"
        spec.write_text(text)
        for number in range(rounds + 1):
            start = time.perf_counter()
            make_plan(load_spec(spec, registry), registry)
            middle = time.perf_counter()
            yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            if number:
                seconds[VALIDATION].append(middle - start)
                seconds["yaml.safe_load"].append(time.perf_counter() - middle)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    rounds = 5 if options.quick else 25
    medians = measure(rounds) | measure_long_spec(rounds)
    for name, target in TARGETS.items():
        figure = {
            "figure": f"{name} (s)",
            "ratio": round(medians[name] / target, 3),
            "target": 1.0,
            "met": medians[name] < target,
            "peers": {peer: round(seconds, 4) for peer, seconds in medians.items()},
            "n": rounds,
        }
        if options.json:
            print(json.dumps(figure))
        else:
            met = "met" if figure["met"] else "MISSED"
            bare = medians["python -c pass"]
            print(f"{name}: {medians[name]:.3f} s, target < {target} s: {met} (python alone {bare:.3f} s)")


if __name__ == "__main__":
    main()
