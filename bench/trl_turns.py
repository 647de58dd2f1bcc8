"""Trainers that take their optimiser steps in turn, in one process, and what a step costs each of them.

Every trainer runs `train()` in a thread of its own, which waits before each step until it is its turn. So step i of one
is measured right beside step i of another, and a machine that gets slower in between slows down both. All of them draw
from one random generator, which is set to the same state at each turn. Nothing here knows which trainers they are.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, Trainer, TrainerCallback

WARM_UP = 1
"""Steps that are not counted."""


@dataclass(frozen=True)
class Seconds:
    """From the beginning of one optimiser step to that of the next, logging included."""

    wall: float
    cpu: float
    """Processor time of the trainer's thread: the same while other programs run, as long as torch has one thread."""


class _Stepper(TrainerCallback):
    """Holds a trainer back before each step."""

    def __init__(self, trainer: Trainer) -> None:
        self._turn, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._seconds: Seconds | None = None
        self._start: tuple[float, float] | None = None
        self._error: BaseException | None = None
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        self._thread = threading.Thread(target=self._train, args=(trainer,), daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> Seconds:
        """Let it take one step."""
        self._turn.release()
        self._wait()
        assert self._seconds is not None
        return self._seconds

    def on_step_begin(self, args, state, control, **_):
        self._stop_clock()
        self._waits.release()
        self._turn.acquire()
        torch.manual_seed(state.global_step)
        self._start = time.perf_counter(), time.thread_time()

    def on_train_end(self, args, state, control, **_):
        self._stop_clock()

    def _stop_clock(self) -> None:
        if self._start is not None:
            wall, cpu = self._start
            self._seconds = Seconds(time.perf_counter() - wall, time.thread_time() - cpu)

    def _train(self, trainer: Trainer) -> None:
        try:
            trainer.train()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        self._waits.release()

    def _wait(self) -> None:
        self._waits.acquire()
        if self._error is not None:
            raise self._error


def in_turn(trainers: Mapping[str, Trainer], steps: int) -> dict[str, list[Seconds]]:
    """Seconds of `steps` steps of each; they must be made to train for that many and `WARM_UP` more."""
    steppers = {name: _Stepper(trainer) for name, trainer in trainers.items()}
    taken: dict[str, list[Seconds]] = {name: [] for name in trainers}
    names = list(trainers)
    for number in range(WARM_UP + steps):
        # there and back again: whoever comes second finds the caches of the first
        for name in names if number % 2 == 0 else reversed(names):
            seconds = steppers[name].step()
            if number >= WARM_UP:
                taken[name].append(seconds)
    return taken


class _Peak(TrainerCallback):
    """Counts tensor bytes during the first step."""

    def __init__(self) -> None:
        self.bytes = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_step_begin(self, args, state, control, **_):
        gc.collect()
        self._profile.start()

    def on_step_end(self, args, state, control, **_):
        self._profile.stop()
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        alive = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            alive += event.nbytes()
            self.bytes = max(self.bytes, alive)


def peak_bytes(trainer: Trainer) -> int:
    """Most tensor bytes alive during a step beyond those before it: the model's weights.

    As the allocator counts them, so it is the same number in every process, whatever else runs and however the C
    library keeps freed memory. The trainer must be made to train for one step, at the end of which its optimiser makes
    its state.
    """
    peak = _Peak()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(peak)
    trainer.train()
    return peak.bytes
