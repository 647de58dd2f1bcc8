"""Specs through the whole program, with verl and Ray underneath: they learn, sync, stop and resume."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_PROGRAM = "import sys; from composer_core.cli.main import main; sys.exit(main())"
SPEC = """\
version: 1
name: t
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: regex, pattern: "[0-9]"}]
  pairs: {path: pairs.jsonl}
loss:
  objective: {use: dr-grpo}
  channels:
    - {use: sdpo, weight: 0.1, success: 2.0, hints: {column: tip, at: prompt-end},
       teacher: self-ema, target: {use: taid}}
    - {use: replay, weight: 0.02, variant: simpo, pairs_per_step: 4}
train:
  {steps: 12, prompts_per_step: 4, group_size: 8, micro_batch: 16, max_completion_tokens: 8, learning_rate: 1.0e-2}
checkpoint: {every: 4}
backend: {use: verl}
executor: {use: inline, threads: 1}
"""
PROMPTS = [{"prompt": f"n{i}", "tip": "Answer in digits."} for i in range(10)]
PAIRS = [
    {"state_id": f"s{i}", "messages": [{"role": "user", "content": f"n{i}"}], "n_agreeing": 1, "teachers": ["t"],
     "meta": {}, "chosen": {"role": "assistant", "content": str(100 + i)},
     "rejected": {"role": "assistant", "content": "none"}, "ref": None}
    for i in range(6)
]  # fmt: skip
DIFFERENCE = "upstream/training/rollout_probs_diff_max"


def lay_out(folder, spec=SPEC):
    (folder / "spec.yaml").write_text(spec)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return folder


@contextlib.contextmanager
def started(folder, *arguments, program=START_PROGRAM, **environment):
    """The program while it runs, in a session of its own; nothing of it is left afterwards."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], cwd=folder, env=os.environ | quiet | environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def composer_run(folder, *arguments, **options):
    with started(folder, *arguments, **options) as process:
        out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def latest(folder):
    return folder / "runs" / "latest"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(folder, process, step):
    """The run, as soon as it has logged this step."""
    run = latest(folder)
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < step:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return run


def worker_of(run):
    return psutil.Process(json.loads((run / "lock.json").read_text())["pid"])


def ray_folder(processes):
    """The temporary folder that Ray's processes among these were told to use."""
    words = " ".join(word for process in processes for word in process.cmdline())
    (folder,) = [path for path in Path(tempfile.gettempdir()).glob("composer-ray-*") if path.name in words]
    return folder


def timeless(run):
    """Metrics without the clock and the machine's memory."""
    dropped = ("time", "tokens_per_s", "step_time", "upstream/timing", "upstream/perf", "upstream/actor/perf")
    dropped += ("upstream/training/rollout_",)  # which rollouts were sampled side by side rounds them
    return [{name: value for name, value in line.items() if not name.startswith(dropped)} for line in metrics(run)]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The spec on verl, undisturbed: the folder of the run, stdout, stderr."""
    folder = lay_out(tmp_path_factory.mktemp("learnt"))
    code, out, err = composer_run(folder, "spec.yaml")
    assert code == 0, err
    return latest(folder), out, err


def test_the_policy_learns_as_the_same_spec_does_on_trl(learnt, tmp_path):
    run, *_ = learnt
    code, _, err = composer_run(lay_out(tmp_path), "spec.yaml", "backend.use=trl")
    assert code == 0, err
    ours, theirs = metrics(run), metrics(latest(tmp_path))
    for lines in (ours, theirs):
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert lines[0]["reward/mean"] < 0.2
        assert sum(line["reward/mean"] for line in lines[-3:]) / 3 > 0.6
    # what does not depend on what was sampled is the same
    assert ours[0]["loss/replay"] == pytest.approx(theirs[0]["loss/replay"], rel=1e-5)
    shared = {name for name in theirs[0] if not name.startswith(("upstream/", "policy/"))}
    assert shared <= set(ours[0])


def test_rollouts_come_from_the_weights_that_are_trained(learnt):
    assert all(line[DIFFERENCE] < 1e-6 for line in metrics(learnt[0]))


def test_a_policy_whose_weights_stay_behind_is_seen(tmp_path):
    """Negative control of the test above: only the first weights reach the servers."""
    (tmp_path / "unsynced.py").write_text(
        "from composer_verl import external, rollout\n"
        "stock = rollout.ServerAdapter.update_weights\n"
        "async def once(self, weights, *args, **kwargs):\n"
        "    if getattr(self, 'came', False):\n"
        "        return [None for _ in weights]\n"
        "    self.came = True\n"
        "    await stock(self, weights, *args, **kwargs)\n"
        "rollout.ServerAdapter.update_weights = once\n"
    )
    program = f"import composer_verl.config as c; c.EXTERNAL = 'unsynced'; {START_PROGRAM}"
    code, _, err = composer_run(
        lay_out(tmp_path), "spec.yaml", "train.steps=3", program=program, PYTHONPATH=str(tmp_path)
    )
    assert code == 0, err
    first, *others = [line[DIFFERENCE] for line in metrics(latest(tmp_path))]
    assert first < 1e-6
    assert min(others) > 1e-4


def test_the_console_has_the_runs_own_lines_only(learnt):
    run, out, err = learnt
    first, *_ = out.splitlines()
    assert first.startswith("done: 12 of 12 steps, reward ")
    begins = ("model: ", "prompts: ", "pairs: ", "reward ", "run: ", "note: ", "step ")
    assert [line for line in err.splitlines() if not line.startswith(begins)] == []
    assert "composer_hf_server_0_0" in (run / "logs" / "verl.log").read_text()
    assert not (run / "logs" / "ray").exists()


def test_the_trained_model_is_a_folder_that_transformers_reads(learnt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, *_ = learnt
    model, tokenizer = (kind.from_pretrained(run / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "n0"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    ids = model.generate(**prompt, do_sample=True, max_new_tokens=8, num_return_sequences=32)
    texts = tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    # as in training: the share of digits, which was 0.1 at the start
    assert sum(character.isdigit() for text in texts for character in text) / sum(map(len, texts)) > 0.5
    assert not [path for path in run.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")]


def test_a_run_that_was_killed_in_a_step_and_resumed_ends_as_the_undisturbed_one(learnt, tmp_path):
    """TAID's state, the moving average, the optimiser, the place among prompts and pairs; and nothing is left over."""
    whole, *_ = learnt
    with started(lay_out(tmp_path), "spec.yaml") as process:
        run = wait_for_step(tmp_path, process, 6)
        worker = worker_of(run)
        processes = [worker, *worker.children(recursive=True)]
        folder = ray_folder(processes)
        worker.kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    said = "the worker was killed by SIGKILL (by the system when memory runs out); last complete checkpoint: "
    assert err.splitlines()[-1] == f"{said}checkpoints/step_4"
    code, _, err = composer_run(tmp_path, "resume", "latest")
    assert code == 0, err
    _, alive = psutil.wait_procs(processes, timeout=90)  # Ray's agents look for the rest for a minute
    assert [process.name() for process in alive] == []
    assert not folder.exists()
    assert timeless(run) == timeless(whole)
    assert (run / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


LORA = """\
version: 1
name: lora
model: {builtin: tiny, lora: {rank: 4}}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: dr-grpo, kl_coef: 0.05}
  channels:
    - {use: sdpo, weight: 0.1, success: 2.0, hints: {column: tip, at: prompt-end}, teacher: self-frozen}
train: {steps: 60, prompts_per_step: 2, group_size: 4, max_completion_tokens: 8, learning_rate: 5.0e-2}
checkpoint: {every: 100}
backend: {use: verl}
executor: {use: inline, threads: 1}
"""


def test_an_adapter_stopped_by_ctrl_c_goes_on_and_is_saved_alone(tmp_path):
    lay_out(tmp_path, LORA)
    with started(tmp_path, "spec.yaml") as process:
        run = wait_for_step(tmp_path, process, 2)
        worker = worker_of(run)
        processes = [worker, *worker.children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of the session
        out, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process.name() for process in alive] == []
    steps = len(metrics(run))
    assert out.splitlines()[0].startswith(f"stopped (received SIGINT): {steps} of 60 steps")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{steps}"]
    code, _, err = composer_run(tmp_path, "resume", "latest", f"train.steps={steps + 2}")
    assert code == 0, err
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 3))
    assert all(line[DIFFERENCE] < 1e-6 for line in lines)
    assert_adapter_acts(run / "model")


def assert_adapter_acts(folder):
    """peft reads it, and it changes the built-in model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from composer_core.hf.models import model_folder
    from composer_core.spec.model import ModelSpec

    assert sorted(path.name for path in folder.glob("adapter_*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained(model_folder(ModelSpec(builtin="tiny"), seed=0))
    ids = torch.arange(20).view(1, -1)
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder)
        assert json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 8  # twice the rank
        assert (adapted(ids).logits - before).abs().max() > 1e-3
