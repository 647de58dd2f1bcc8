"""What `composer-run doctor --deep` says about verl on this machine beside the check of its surface.

A finding is one function here; the step that is tried out is `probe.py`'s, in a process of its own, which may end as a
GPU's errors end a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from composer_core.run.doctor import Finding, Level

PACKAGES = ("ray", "tensordict", "TransferQueue", "vllm", "sglang", "flash_attn")
LIMIT_SECONDS = 300
"""For the step; most of it is the import of verl, and a first kernel on a GPU may be compiled."""
LOSS, GRADIENT = {"float32": 1e-3, "bfloat16": 0.05}, {"float32": 1e-3, "bfloat16": 0.1}
"""How far verl's engine may be from the core, relatively: what kernels round differently, several times over. Seen on
a CPU: 1e-6 and 0.014."""
PROGRAM = (sys.executable, "-m", "composer_verl.probe")


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """All of them.

    Args:
        environment: variables of a run's processes, so that what is tried out is what a run does.
    """
    yield _stack()
    yield from _steps(environment)


def _stack() -> Finding:
    return Finding("verl packages", Level.OK, ", ".join(_version(name) for name in PACKAGES))


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def _steps(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        done = subprocess.run(
            PROGRAM,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield _failed(f"a step of its engine did not end within {LIMIT_SECONDS} s")
        return
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        yield _failed(f"a step of its engine ended with {done.returncode}: {said[-1] if said else 'no word'}")
        return
    for outcome in json.loads(done.stdout.splitlines()[-1]):
        yield _step(outcome)


def _failed(problem: str) -> Finding:
    return Finding("verl engine", Level.FAIL, problem, "python -m composer_verl.probe shows all of it")


def _step(outcome: Mapping[str, Any]) -> Finding:
    """Whether a step gave the core's losses and gradient."""
    where = f"{outcome['layout']} sequences, {outcome['dtype']} on {outcome['device']}"
    name, dtype = f"verl engine, {outcome['layout']}", outcome["dtype"]
    for loss, (verl, core) in outcome["losses"].items():
        if not abs(verl - core) <= LOSS[dtype] * max(abs(core), 0.01):  # said so, a NaN is a difference
            return Finding(name, Level.FAIL, f"{where}: {loss} is {verl:.6g}, by the core {core:.6g}", _OTHER)
    gap = outcome["gradient"]
    if not gap <= GRADIENT[dtype]:
        return Finding(name, Level.FAIL, f"{where}: the gradient is off by {gap:.2g} of its norm", _OTHER)
    return Finding(name, Level.OK, f"{where}: the core's losses, and its gradient within {gap:.1g}")


_OTHER = "do not train here; report it with what `composer-run doctor --deep --json` prints"
