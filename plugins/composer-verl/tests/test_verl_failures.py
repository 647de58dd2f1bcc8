"""What goes wrong in a run on verl: one message, the right exit code, and no process left."""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
SPEC = """\
version: 1
name: t
model: {builtin: tiny}
data: {prompts: {builtin: digits}, rewards: [{use: regex, pattern: "[0-9]"}]}
loss:
  objective: {use: grpo}
train: {steps: 4, prompts_per_step: 2, group_size: 2, max_completion_tokens: 4}
checkpoint: {every: 100}
backend: {use: verl}
executor: {use: inline, threads: 1}
"""
BROKEN = """\
import torch

from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.protocols import Need, Term


class Broken(ChannelDefaults):
    def __init__(self, settings):
        pass

    def loss(self, view, batch):
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        total = masked_sum(logps, batch.rollouts.action)
        return Term(total * (float("nan") if batch.step == 2 else 1.0), "tokens")


@hookimpl
def composer_loss_channels():
    yield LossChannelPlugin(
        name="broken", summary="NaN in the second step", target=f"{__name__}:Broken",
        needs=lambda settings: (frozenset({Need.LOGPS}),),
    )
"""


@contextlib.contextmanager
def started(folder, *arguments):
    (folder / "spec.yaml").write_text(SPEC)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*PROGRAM, "spec.yaml", *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_loss_that_is_not_finite_ends_the_run_with_the_step_before_it(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    with started(tmp_path, "plugins=[./broken.py]", "loss.channels=[{use: broken, weight: 0.01}]") as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 5, err
    run = tmp_path / "runs" / "latest"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_1"]
    assert not (run / "model").exists()
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["reason"]) == ("stopped", "the loss of 'broken' is nan at step 2")
    assert out.startswith("stopped (the loss of 'broken' is nan at step 2): 1 of 4 steps")


def test_a_process_of_verls_that_dies_during_generation_ends_the_run(tmp_path):
    with started(tmp_path, "train.steps=10000") as process:
        run = tmp_path / "runs" / "latest"
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        worker = psutil.Process(json.loads((run / "lock.json").read_text())["pid"])
        processes = worker.children(recursive=True)
        (loop,) = [own for own in processes if "AgentLoopWorker" in " ".join(own.cmdline())]
        loop.kill()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert err.splitlines()[-2:] == [
        f"one of verl's processes is gone: AgentLoopWorkerTQ, process {loop.pid}",
        "  fix: logs/ray/ says what its processes did last",
    ]
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [own.name() for own in alive] == []
    assert list((run / "logs" / "ray").iterdir())


def test_a_ray_cluster_that_does_not_answer_is_named(tmp_path):
    with started(tmp_path, "backend.ray=127.0.0.1:1") as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 3
    assert err.splitlines()[-2:] == [
        "backend.ray: no Ray cluster answers at 127.0.0.1:1: Connection refused",
        "  fix: ray: local",
    ]
