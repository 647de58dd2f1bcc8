"""What a user sees while a run goes on: a bar on a terminal, plain lines in a file or pipe. On stderr both times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from composer_core.run.metrics import LOSS, REWARD, TOKENS_PER_S

SECONDS_BETWEEN_LINES = 2.0


class Display(Protocol):
    """Shows steps as they are logged."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was logged; steps count from 1."""
        ...

    def note(self, text: str) -> None:
        """Something to know about the run, in a sentence."""
        ...

    def close(self) -> None:
        """The run is over: show what was held back, give the terminal back."""
        ...


def display(total: int, stream: TextIO, *, quiet: bool) -> Display:
    """The display that fits the stream."""
    if quiet:
        return Silent()
    return Bar(total, Console(file=stream)) if stream.isatty() else Lines(total, stream)


class Silent:
    """Shows nothing (`--quiet`, and every process but the main one)."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Bar:
    """Step, reward, losses, tokens per second and time left, redrawn in place."""

    def __init__(self, total: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn(
                "{task.fields[figures]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("left"),
            expand=True,
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=total, figures="starting")
        self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, figures="  ".join(figures(metrics)))

    def note(self, text: str) -> None:
        """Above the bar."""
        self._progress.console.print(f"note: {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen and show the cursor again."""
        self._progress.stop()


class Lines:
    """One line for the first step, the last, and between them at most every two seconds."""

    def __init__(self, total: int, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._printed = 0.0
        self._held = ""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, or hold it back."""
        now = self._clock()
        self._held = "  ".join([f"step {step}/{self._total}", *figures(metrics), *self._left(step, now)])
        if self._first is None or step >= self._total or now - self._printed >= SECONDS_BETWEEN_LINES:
            self._first = self._first or (step, now)
            self._printed = now
            self.close()

    def note(self, text: str) -> None:
        """A line of its own."""
        print(f"note: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Print the line held back."""
        if self._held:
            print(self._held, file=self._stream, flush=True)
        self._held = ""

    def _left(self, step: int, now: float) -> list[str]:
        if self._first is None or step <= self._first[0] or step >= self._total:
            return []
        per_step = (now - self._first[1]) / (step - self._first[0])
        return [f"{duration(per_step * (self._total - step))} left"]


def figures(metrics: Mapping[str, float]) -> list[str]:
    """Reward, total loss, the loss of each part, tokens per second; those that were logged."""
    parts = [name for name in metrics if name.startswith("loss/") and name != LOSS]
    parts = parts if len(parts) > 1 else []  # a single part is the total
    named = [(REWARD, "reward"), (LOSS, "loss"), *((name, name.removeprefix("loss/")) for name in parts)]
    shown = [f"{label} {metrics[name]:.4g}" for name, label in named if name in metrics]
    speed = [f"{metrics[TOKENS_PER_S]:.0f} tokens/s"] if TOKENS_PER_S in metrics else []
    return shown + speed


def duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
