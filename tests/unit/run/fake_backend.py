"""A local plugin: a backend that trains nothing and ends the way its settings say."""

import os
import signal
import sys
import time

from composer_core.errors import RunFailed, UsageError
from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import Settings
from composer_core.protocols import TrainResult
from composer_core.run.context import RolloutSample


class FakeSettings(Settings):
    do: str = "finish"
    series: dict[str, list[float]] = {}
    """Metrics of the first steps, beside or instead of the usual ones."""


class FakeBackend:
    def __init__(self, settings):
        self.do = settings.do
        self.series = settings.series

    def check(self):
        return ["acme 1.2 has no Trainer", "acme needs a GPU"] if self.do == "check" else []

    def train(self, run, loss):
        if self.do == "usage":
            raise UsageError("no column 'answer'", at="tasks.jsonl:3", fix="add it")
        if self.do == "fail":
            raise RunFailed("the loss is not finite")
        if self.do == "divide":
            return 1 / 0
        if self.do == "exit":
            sys.exit(0)
        first = 1 if run.resume_from is None or self.do == "forget" else run.resume_from.step + 1
        if run.resume_from is not None and self.do == "idle":
            return TrainResult(run.resume_from.step)
        if run.resume_from is not None:  # it finds there what it had left
            assert (run.resume_from.folder / "weights").read_text() == str(run.resume_from.step)
        for step in range(first, run.spec.train.steps + 1):
            own = {name: values[step - 1] for name, values in self.series.items() if step <= len(values)}
            if self.do == "nan" and step == 2:
                own["loss/total"] = float("nan")
            run.log_step(step, {"reward/mean": step / 10, "loss/total": 1.0 / step, **own})
            run.log_rollouts(step, [RolloutSample("2+2?", f"<script>alert({step})</script>", {"regex": 0.5}, 0.1)])
            with run.checkpoint(step) as folder:
                (folder / "weights").write_text(str(step))
                if self.do == "fill" and step == 2:
                    (folder / "ballast").write_bytes(b"x" * 4_000_000)
            if self.do == "die" and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            while self.do == "wait" and run.stop_reason() is None:
                time.sleep(0.01)
            if run.stop_reason() is not None:
                return TrainResult(step, run.stop_reason())
        with run.trained_model() as folder:
            (folder / "weights").write_text("trained")
        return TrainResult(step)


@hookimpl
def composer_backends():
    yield BackendPlugin(
        name="fake",
        summary="Trains nothing",
        target=f"{__name__}:FakeBackend",
        settings=FakeSettings,
        native_objectives=frozenset({"grpo"}),
        honours=frozenset({"limits.kl"}),
    )
