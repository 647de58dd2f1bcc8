"""provenance.json: with what, on what and from which code a run was made.

Two halves, because the interpreter that plans may not be the one that trains: `control` (command line, git, host)
and `worker` (versions, plugins, seed, host). Values of environment variables never go in.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

UPSTREAM = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "pydantic", "pluggy")
DIFF_LIMIT = 1_000_000
"""Bytes of `git diff` kept."""


def control_facts(argv: list[str], folder: Path) -> dict[str, Any]:
    """What the command knows: its own line, and the git state of the folder that the spec stands in."""
    return {"time": time.time(), "argv": argv, "cwd": os.getcwd(), "git": git_state(folder), "host": host()}


def worker_facts(*, seed: int, plugins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the worker knows; `plugins` are the plan's, local files with their sha256."""
    return {"time": time.time(), "versions": versions(), "plugins": list(plugins), "seed": seed, "host": host()}


def versions() -> dict[str, str]:
    """Python, Composer's packages and their upstreams, from metadata."""
    found = {"python": platform.python_version()}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in UPSTREAM or name.startswith("composer-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def host() -> dict[str, Any]:
    """The machine; graphics cards only when torch is loaded already, as asking would load it."""
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None  # a system without these names


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the repository around a folder; None without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    # a configured diff driver is a program of the repository's; it has no business here
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or b""
    return {
        "commit": commit.decode().strip(),
        "dirty": bool(diff),
        "diff": diff[:DIFF_LIMIT].decode("utf-8", "replace"),
        "diff_bytes": len(diff),
        "diff_cut": len(diff) > DIFF_LIMIT,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    command = ["git", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
