"""`composer-run replay` on a hand-made session where the right answer is known."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.testing.chat_server import ChatServer, Reply, answer

PROGRAM = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
SESSION = [
    {"role": "user", "content": "How many files are here?"},
    {"role": "assistant", "content": "I guess five."},
    {"role": "user", "content": "And what is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Tell me a joke."},
    {"role": "assistant", "content": "No."},
]
SPEC = """\
version: 1
name: replay
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
  traces: {path: session.jsonl}
  pairs: {path: pairs.jsonl}
loss: {objective: {use: grpo}}
train: {steps: 1}
backend: {use: toy}
teachers:
TEACHERS
replay: {agreement: 2}
LIMITS
"""
SCRIPTED = """\
  one: {use: scripted, rules: {"files": "Let me look: ls", "2 . 2": "4", "joke": "A"}}
  two: {use: scripted, rules: {"files": "Let me  look: ls", "2 . 2": "4", "joke": "B"}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "session.jsonl").write_text(json.dumps({"messages": SESSION}) + "\n")
    return tmp_path


@pytest.fixture
def composer(folder):
    def run(teachers, *arguments, limits="", env=()):
        (folder / "spec.yaml").write_text(SPEC.replace("TEACHERS\n", teachers).replace("LIMITS", limits))
        environment = os.environ | {"COMPOSER_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"} | dict(env)
        done = subprocess.run(
            [*PROGRAM, "replay", "spec.yaml", *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def pairs(folder):
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def test_the_one_step_where_both_teachers_agree_against_the_agent_becomes_a_pair(composer, folder):
    code, out, err = composer(SCRIPTED)
    assert code == 0, err
    (pair,) = pairs(folder)
    assert pair["chosen"] == {"role": "assistant", "content": "Let me look: ls"}
    assert pair["rejected"]["content"] == "I guess five."
    assert pair["messages"] == SESSION[:1]
    assert (pair["n_agreeing"], pair["teachers"], pair["ref"]) == (2, ["one", "two"], None)
    assert out.splitlines() == [
        "1 pairs of 3 states: 1 like the agent, 1 without agreement, 0 tied, 0 unanswered",
        "spent: $0.0000, 0 tokens",
        f"pairs: {folder / 'pairs.jsonl'}",
    ]
    assert "3 states, 6 questions, 0 answered already; likely cost $0.00" in err


def test_a_replay_without_a_pair_leaves_an_earlier_file_alone(composer, folder):
    assert composer(SCRIPTED)[0] == 0
    before = (folder / "pairs.jsonl").read_text()
    silent = "  one: {use: scripted, rules: {zzz: a}}\n  two: {use: scripted, rules: {zzz: a}}\n"
    code, out, _ = composer(silent)
    assert code == 0
    assert out.endswith("(no pair arose; what was there before is left as it was)\n")
    assert (folder / "pairs.jsonl").read_text() == before


def test_json_is_one_document(composer, folder):
    code, out, err = composer(SCRIPTED, "--json", "--limit", "1", "--out", "other.jsonl")
    assert code == 0, err
    result = json.loads(out)
    assert (result["pairs"], result["agreement"]["states"]) == (1, 1)
    assert (folder / "other.jsonl").is_file()
    assert not (folder / "pairs.jsonl").exists()


def test_reference_log_probs_are_stored_with_each_pair(composer, folder):
    from composer_core.hf.tiny import make_tiny

    make_tiny(folder / "tiny", seed=0)
    code, _, err = composer(SCRIPTED, "--ref-model", "tiny")
    assert code == 0, err
    (pair,) = pairs(folder)
    assert pair["ref"]["model"] == "tiny"
    assert pair["ref"]["chosen"] < 0
    assert pair["ref"]["rejected"] < 0


def remote(url, key='"${env:TEACHER_KEY}"', more=""):
    block = f"use: openai, base_url: '{url}', model: m, key: {key}{more}"
    return f"  one: {{{block}}}\n  two: {{{block}, temperature: 1.0}}\n"


def test_a_server_is_asked_once_per_question_and_a_second_run_pays_nothing(composer, folder):
    price = ", price: {input: 1, output: 1}"
    env = {"TEACHER_KEY": "sk-very-secret-1"}
    with ChatServer(lambda body: Reply(answer("ls", cost=0.01))) as server:
        first = composer(remote(server.url, more=price), limits="limits: {teacher_usd: 1}", env=env)
        second = composer(remote(server.url, more=price), limits="limits: {teacher_usd: 1}", env=env)
        assert len(server.requests) == 6
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "spent: $0.0600" in first[1]
    assert "6 answered already" in second[2]
    assert len(pairs(folder)) == 3
    for path in folder.rglob("*"):
        assert not path.is_file() or b"sk-very-secret-1" not in path.read_bytes(), path


BAD = {
    "no-key": (remote("http://127.0.0.1:9/v1"), "", 3, "TEACHER_KEY"),
    "no-price": (
        remote("http://127.0.0.1:9/v1", key="x"), "limits: {teacher_usd: 1}", 2,
        "teachers.one.price: limits.teacher_usd cannot be kept without this teacher's price",
    ),
    "too-dear": (
        remote("http://127.0.0.1:9/v1", key="x", more=", price: {input: 10, output: 1000}"),
        "limits: {teacher_usd: 0.1}", 2, "above the limit of $0.10",
    ),
    "one-teacher": (
        "  one: {use: scripted, rules: {a: b}}\n", "", 2, "1 teachers cannot agree by 2",
    ),
    "no-teachers": ("  {}\n", "", 2, "this spec has no teachers"),
    "unknown-kind": ("  one: {use: opnai}\n", "", 2, "did you mean 'openai'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_said_before_anything_is_sent(name, composer, folder):
    teachers, limits, expected, said = BAD[name]
    code, out, err = composer(teachers, limits=limits)
    assert (code, out) == (expected, ""), err
    assert said in err
    assert "Traceback" not in err
    assert not (folder / "pairs.jsonl").exists()


def test_a_wrong_model_stops_with_what_the_server_said(composer):
    with ChatServer(lambda body: Reply({"error": {"message": "model m does not exist"}}, status=404)) as server:
        code, _, err = composer(remote(server.url, key="x"))
    assert code == 3
    assert "there is no such model or address (HTTP 404" in err
    assert "model m does not exist" in err


def test_an_estimate_sends_nothing(composer, folder):
    code, _, err = composer(remote("http://127.0.0.1:9/v1", key="x"), "--estimate")
    assert code == 0, err
    assert err.startswith("3 states, 6 questions, 0 answered already")
    assert not (folder / "pairs.jsonl").exists()


def test_a_scripted_teachers_file_lies_beside_the_spec_wherever_the_command_is_run(folder):
    answers = [{"state_id": "session#1::0000", "message": {"role": "assistant", "content": "Let me look: ls"}}]
    (folder / "answers.jsonl").write_text(json.dumps(answers[0]) + "\n\n")
    teachers = (
        '  one: {use: scripted, path: answers.jsonl}\n  two: {use: scripted, rules: {"files": "Let me look: ls"}}\n'
    )
    (folder / "spec.yaml").write_text(SPEC.replace("TEACHERS\n", teachers).replace("LIMITS", ""))
    (folder / "elsewhere").mkdir()
    done = subprocess.run(
        [*PROGRAM, "replay", "../spec.yaml"], cwd=folder / "elsewhere",
        env=os.environ | {"COMPOSER_CACHE": str(folder / "cache")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [pair["teachers"] for pair in pairs(folder)] == [["one", "two"]]


def test_what_went_wrong_with_a_teacher_is_said_once_with_how_often(composer):
    with ChatServer(lambda body: Reply({"error": "m is not a valid model ID"}, status=400)) as server:
        code, out, err = composer(remote(server.url, key="x"))
    assert code == 0, err
    assert "answers left out: failed 6" in out
    assert 'teacher one: HTTP 400: {"error": "m is not a valid model ID"} (3 x)' in err


def test_answers_of_another_model_are_dropped_and_counted(composer, folder):
    with ChatServer(lambda body: Reply(answer("ls", model="quite-another"))) as server:
        code, out, err = composer(remote(server.url, key="x"))
    assert code == 0, err
    assert "answers left out: other model 6" in out
    assert pairs(folder) == []


def test_what_is_spent_already_counts_against_the_limit_before_the_start(composer):
    price = ", price: {input: 1, output: 100}"
    with ChatServer(lambda body: Reply(answer("ls", cost=0.11))) as server:
        first = composer(remote(server.url, key="x", more=price), "--limit", "1", limits="limits: {teacher_usd: 0.3}")
        second = composer(remote(server.url, key="x", more=price), limits="limits: {teacher_usd: 0.3}")
    assert first[0] == 0, first[2]
    assert second[0] == 2
    assert "this is likely to cost $0.12 beside the $0.22 already spent, above the limit of $0.30" in second[2]


def test_a_reference_model_that_is_not_there_is_said_before_anybody_is_asked(composer):
    with ChatServer(lambda body: Reply(answer("ls"))) as server:
        code, _, err = composer(remote(server.url, key="x"), "--ref-model", "./nowhere")
        assert server.requests == []
    assert code == 2
    assert "./nowhere" in err


def test_scores_are_refused_at_check_where_no_server_gives_them(composer):
    teachers = SCRIPTED + "  far: {use: openai, preset: gpt, scores: true}\n"
    code, _, err = composer(teachers)
    assert code == 2
    assert "scores: openrouter.ai gives no log-probs of a text it is handed; a vLLM server does" in err


def test_presets_are_teachers_of_a_spec(composer):
    teachers = "  a: {use: openai, preset: opus}\n  b: {use: openai, preset: gpt, max_tokens: 9}\n"
    key = {"OPENROUTER_API_KEY": "sk-secret-value"}
    code, _, err = composer(teachers, "--estimate", limits="limits: {teacher_usd: 5}", env=key)
    assert code == 0, err
    assert err.startswith("3 states, 6 questions, 0 answered already; likely cost $0.0")
    code, _, err = composer(teachers, "--estimate")
    assert (code, "teachers.a.key: the environment variable OPENROUTER_API_KEY is not set" in err) == (3, True), err
