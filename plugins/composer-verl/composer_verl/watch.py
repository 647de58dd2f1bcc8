"""Whether verl's processes still live, asked while the driver waits for rollouts: verl itself would wait for ever.

Errors that reach the driver are put into words here too. Another process to watch is another handle for `Watch`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

_SECONDS = 1.0
"""Between two looks."""


class Watch:
    """Actors that must live.

    Args:
        actors: their handles.
    """

    def __init__(self, actors: Iterable[Any]) -> None:
        self._actors = list(actors)
        self._asked: dict[Any, Any] = {}
        self._looked = 0.0

    def look(self) -> None:
        """Take the answers to what was asked the last time, and ask again; at most once a second, and never waiting.

        Raises:
            RayError: an actor is gone.
        """
        now = time.monotonic()
        if now - self._looked < _SECONDS:
            return
        self._looked = now
        # a busy one answers later, and is not asked twice
        for actor in self._actors:
            if actor not in self._asked.values():
                self._asked[actor.__ray_ready__.remote()] = actor
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for answer in answered:
            del self._asked[answer]
        ray.get(answered)


def gone(error: RayError) -> str:
    """Which process an error of Ray's is about, in one sentence; where it names none, the first line of it."""
    text = str(error).strip()
    name, process = (re.search(rf"^\s*{field}: (\S+)$", text, re.M) for field in ("class_name", "pid"))
    if name is None or process is None:
        return f"Ray failed: {type(error).__name__}: {text.partition(chr(10))[0]}"
    return f"one of verl's processes is gone: {name[1]}, process {process[1]}"
