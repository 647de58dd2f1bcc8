"""A local plugin: a backend of several processes that trains nothing, and ends the way its settings say.

Each rank leaves its process id in `<scratch folder of the run>/../pids/<rank>`.
"""

import os
import signal
import time

import torch.distributed as dist

from composer_core.errors import UsageError
from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import Settings
from composer_core.protocols import TrainResult
from composer_core.run.control import agree


class RankSettings(Settings):
    do: str = "finish"
    processes: int = 2


class RankBackend:
    def __init__(self, settings):
        self.do = settings.do

    def check(self):
        return []

    def train(self, run, loss):
        number = dist.get_rank()
        pids = run.scratch.parents[1] / "pids"
        pids.mkdir(exist_ok=True)
        (pids / str(number)).write_text(str(os.getpid()))
        first = 1 if run.resume_from is None else run.resume_from.step + 1
        if run.resume_from is not None:  # each finds what it left
            assert (run.resume_from.own / "mine").read_text() == f"{number} at {run.resume_from.step}"
        for step in range(first, run.spec.train.steps + 1):
            run.log_step(step, {"reward/mean": step / 10})
            with run.checkpoint(step) as folder:
                (folder / "mine").write_text(f"{number} at {step}")
            self.go_wrong(number)
            while self.do == "wait" and (reason := agree(run.stop_reason())) is None:
                time.sleep(0.01)
            if self.do == "wait":
                return TrainResult(step, reason)
        with run.trained_model() as folder:
            (folder / "weights").write_text(f"trained by {number}")
        return TrainResult(step)

    def go_wrong(self, number):
        if self.do == "all-wrong":
            raise UsageError("no column 'answer'", at="tasks.jsonl:3", fix="add it")
        if number == 1 and self.do.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1 and self.do == "one-wrong":
            raise UsageError("no column 'answer'", at="tasks.jsonl:7", fix="add it")
        if number == 1 and self.do == "one-broken":
            raise KeyError("x")
        if self.do in ("killed", "one-wrong", "one-broken"):
            dist.barrier()  # which rank 0 comes out of with an error of gloo's
        if self.do == "killed-unheard":
            time.sleep(300)  # as NCCL would wait


@hookimpl
def composer_backends():
    yield BackendPlugin(
        name="ranks",
        summary="Trains nothing, in several processes",
        target=f"{__name__}:RankBackend",
        settings=RankSettings,
        native_objectives=frozenset({"grpo"}),
        processes=lambda settings: settings.processes,
    )
