# ruff: noqa: D102 - the name of a test is its sentence
"""What every backend must do, seen from outside: a run of the command, and what it leaves on disk.

Each class runs the command twice, in child processes: once for three steps, once to be stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import RolloutText
from composer_core.testing.accumulate import Window, accumulate_gradients
from composer_core.testing.fakes import Brevity, HintFake

MANY = 5_000
PATIENCE_S = 120.0
STOPPED = 5
_NUMPY = [
    numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType, numpy._core.multiarray._reconstruct,  # type: ignore[attr-defined]
]  # fmt: skip
"""What a stored state of numpy's generator is made of."""
EVERY_LINE = {
    "step", "time", "reward/mean", "reward/std", "loss/total", "loss/policy", "step_time", "tokens_per_s"
}  # fmt: skip


class BackendContract:
    """Give the class-scoped fixture `spec_text` (a class method): a whole run spec, on a model small enough for CPU.

    Override `channels` with the names of the spec's channels, `environment` where the command needs more of it, and
    `gradients` where the backend can compute the channels' gradients on rollouts it is handed.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def channels(cls) -> Sequence[str]:
        """Names of the channels in the spec."""
        return ()

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls) -> Mapping[str, str]:
        """Environment variables for the command, beyond this process's own."""
        return {}

    def gradients(self, folder: Path, loss: CompositeLoss, window: Window) -> Mapping[str, Tensor] | None:
        """Parameter name -> gradient of policy loss and channels on this window, from the backend's own adapter.

        `folder` is the model. None: the backend has no way to feed fixed rollouts, and the comparison is skipped.
        """
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, spec_text: str, environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The run directory of three steps with a checkpoint after the second."""
        folder = tmp_path_factory.mktemp("finished")
        command = _command(folder, spec_text, "train.steps=3", "train.log_every=1", "checkpoint.every=2")
        done = subprocess.run(command, cwd=folder, env=_environment(environment), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return _only_run(folder)

    def test_every_step_is_a_line_with_the_names_that_scripts_rely_on(
        self, finished: Path, channels: Sequence[str]
    ) -> None:
        lines = _metrics(finished)
        assert [line["step"] for line in lines] == [1, 2, 3]
        per_channel = {f"{kind}/{name}" for name in channels for kind in ("loss", "weight", "active", "tokens")}
        for line in lines:
            assert line.keys() >= EVERY_LINE | per_channel
            assert "nonfinite" not in line

    def test_completions_are_kept_for_reading(self, finished: Path) -> None:
        samples = [json.loads(line) for line in (finished / "rollouts.jsonl").read_text().splitlines()]
        assert {sample["step"] for sample in samples} == {1, 2, 3}
        assert all(isinstance(sample["completion"], str) and sample["rewards"] for sample in samples)

    def test_the_checkpoint_is_complete_and_nothing_half_written_stands_beside_it(self, finished: Path) -> None:
        names = {path.name for path in (finished / "checkpoints").iterdir()}
        assert names - {"step_3"} == {"step_2"}  # a backend may keep the end as well
        assert (finished / "checkpoints" / "step_2" / "COMPLETE").is_file()
        assert [path for path in finished.rglob("*") if path.suffix in (".pkl", ".pickle", ".bin")] == []
        with torch.serialization.safe_globals(_NUMPY):
            for path in (path for path in finished.rglob("*") if path.suffix in (".pt", ".pth")):
                torch.load(path, weights_only=True)  # an upstream's own file: tensors and numbers, no code

    def test_the_trained_model_loads_and_has_learnt(self, finished: Path) -> None:
        from composer_core.hf.models import load_policy

        trained = load_policy(finished / "model", dtype="float32").state_dict()
        start = load_policy(_start(finished), dtype="float32").state_dict()
        assert trained.keys() == start.keys()
        assert any(not torch.equal(trained[name], start[name]) for name in start)
        assert all(value.isfinite().all() for value in trained.values())

    def test_a_stop_request_ends_the_run_after_a_step_with_what_it_had_saved(
        self, spec_text: str, environment: Mapping[str, str], tmp_path: Path
    ) -> None:
        command = _command(tmp_path, spec_text, f"train.steps={MANY}", "train.log_every=1")
        with subprocess.Popen(command, cwd=tmp_path, env=_environment(environment), stderr=subprocess.PIPE) as process:
            try:
                _wait_for_a_step(process, tmp_path)
                process.send_signal(signal.SIGTERM)
                _, stderr = process.communicate(timeout=PATIENCE_S)
            finally:
                process.terminate()  # nothing where it has ended; else its worker must end with it
        assert process.returncode == STOPPED, stderr.decode()
        run = _only_run(tmp_path)
        steps = _metrics(run)[-1]["step"]
        assert steps < MANY
        saved = [run / "model" / "COMPLETE", run / "checkpoints" / f"step_{steps}" / "COMPLETE"]
        assert any(path.is_file() for path in saved)

    def test_a_resumed_run_ends_as_if_it_had_never_stopped(
        self, spec_text: str, environment: Mapping[str, str], finished: Path, tmp_path: Path
    ) -> None:
        first = _command(tmp_path, spec_text, "train.steps=2", "train.log_every=1", "checkpoint.every=2")
        resume = [*first[: first.index("run")], "resume", "latest", "train.steps=3", "--runs", "runs", "--quiet"]
        for command in (first, resume):
            done = subprocess.run(command, cwd=tmp_path, env=_environment(environment), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        run = _only_run(tmp_path)
        assert [_without_times(line) for line in _metrics(run)] == [_without_times(line) for line in _metrics(finished)]
        saved = [
            {file.name: file.read_bytes() for file in (r / "model").glob("*.safetensors")} for r in (run, finished)
        ]
        assert saved[0]
        assert saved[0] == saved[1]

    def test_its_channels_have_the_cores_gradients(self, tiny_model_folder: Path) -> None:
        from composer_core.hf.models import load_policy

        loss, whole = _two_channels(), [[0, 1, 2, 3]]
        found = self.gradients(tiny_model_folder, loss, _window(loss, [[2], [0, 1], [3]]))
        if found is None:
            pytest.skip("this backend has no way to feed fixed rollouts")
        reference = load_policy(tiny_model_folder, dtype="float32").train()
        accumulate_gradients(reference, loss, _window(loss, whole), base=Batch())
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def _command(folder: Path, spec_text: str, *overrides: str) -> list[str]:
    (folder / "spec.yaml").write_text(spec_text, encoding="utf-8")
    start = "from composer_core.cli.main import main; main()"
    return [sys.executable, "-c", start, "run", "spec.yaml", *overrides, "--runs", "runs", "--quiet"]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, **more}


def _only_run(folder: Path) -> Path:
    (run,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    return run


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    timed = ("time", "tokens_per_s")
    return {name: value for name, value in line.items() if name not in timed and "step_time" not in name}


def _start(run: Path) -> Path:
    """The folder of the model that the run began with."""
    from composer_core.hf.models import model_folder
    from composer_core.spec.model import ModelSpec

    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    return model_folder(ModelSpec(**plan["spec"]["model"]), seed=plan["spec"]["seed"])


def _wait_for_a_step(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        if any(path.stat().st_size for path in folder.glob("runs/*/metrics.jsonl")):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step within {PATIENCE_S:g} s")


def _two_channels() -> CompositeLoss:
    objective = PolicyObjective(PRESETS["grpo"], OBJECTIVE_SETTINGS["grpo"]())
    channels = [ActiveChannel("brevity", 0.1, Brevity()), ActiveChannel("hint-fake", 2.0, HintFake())]
    return CompositeLoss(channels, objective)


def _window(loss: CompositeLoss, splits: Sequence[Sequence[int]]) -> Window:
    """Four ragged rollouts in the tiny model's vocabulary; the last one is good and gets no hint."""
    prompts, lengths = [[10, 11, 12], [13], [14, 15], [16, 17]], [5, 2, 7, 3]
    completions = [[20 + (5 * i + j) % 40 for j in range(n)] for i, n in enumerate(lengths)]
    seqs = Seqs.from_lists([p + c for p, c in zip(prompts, completions, strict=True)])
    rewards = [0.0, 0.5, 0.25, 1.0]
    flags = [f for p, c in zip(prompts, completions, strict=True) for f in [False] * len(p) + [True] * len(c)]
    rollouts = Rollouts(
        seqs=seqs,
        action=torch.tensor(flags),
        advantages=torch.tensor([-1.0, 0.25, -0.5, 1.25])[seqs.owner],
        rewards=torch.tensor(rewards),
        group=torch.zeros(4, dtype=torch.int64),
        uid=("0", "1", "2", "3"),
    )
    texts = [
        RolloutText(str(i), prompts[i], completions[i], [True] * lengths[i], rewards[i]) for i in range(len(prompts))
    ]
    prepared = [loss.prepare(text) for text in texts]
    rows = {active.name: [row[active.name] for row in prepared] for active in loss.active}
    return Window(rollouts=rollouts, rows=rows, splits=splits, longest=max(lengths))
