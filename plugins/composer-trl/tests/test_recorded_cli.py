"""What `check` and `plan` say of a spec without rollouts, prompts and objective."""

import json

import pytest

from composer_core.cli.main import main

SPEC = """\
version: 1
name: t
model: {builtin: tiny}
rollouts: none
data:
  traces: {path: sessions.jsonl}
loss:
  channels:
    - {use: sdpo, weight: 0.5}
train: {steps: 2, prompts_per_step: 4}
backend: {use: trl}
"""
SESSION = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "sessions.jsonl").write_text(json.dumps(SESSION) + "\n")

    def run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run


def test_check_names_no_objective(composer):
    assert composer("check spec.yaml") == (0, "spec.yaml: ok (backend trl, objective -, channels sdpo)\n", "")


def test_plan_shows_what_is_recorded_and_no_prompts_or_rewards(composer, tmp_path):
    code, out, err = composer("plan spec.yaml --data")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert {"traces", "objective none", "recorded rows per step 4", f"traces: {tmp_path}/sessions.jsonl"} <= set(lines)
    assert not {"rewards", "data", "prompts:"} & set(lines)


def test_plan_as_json_has_the_trainers_own_numbers(composer):
    code, out, _ = composer("plan spec.yaml --json")
    plan = json.loads(out)
    assert (code, plan["objective"], plan["upstream"]["per_device_train_batch_size"]) == (0, "", 4)
    assert "logits of a micro-batch" not in plan["memory"]["bytes"]  # nothing recorded is projected at once
    # fields of generation are no fields here
    assert not [name for name in plan["upstream"] if "generation" in name or name in ("beta", "temperature")]


def test_a_model_without_a_chat_template_reads_no_recorded_chats(composer, tmp_path):
    from composer_core.hf.tiny import make_tiny

    make_tiny(tmp_path / "tiny", seed=0)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = tmp_path / "tiny" / file
        if path.suffix == ".jinja" and path.exists():
            path.unlink()
        elif path.exists():
            config = json.loads(path.read_text())
            config.pop("chat_template", None)
            path.write_text(json.dumps(config))
    composer("check spec.yaml")  # what saving the model printed is read with it
    code, _, err = composer('run spec.yaml model={"path":"./tiny"}')
    said = "the tokenizer in this folder has no chat template, and recorded sessions and pairs are chats"
    assert (code, err) == (2, f"{tmp_path}/tiny: {said}\n  fix: take a model that is made for chats\n")
