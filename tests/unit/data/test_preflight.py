from __future__ import annotations

import json
import subprocess
import sys

import pytest

from composer_core.data.preflight import preflight
from composer_core.errors import MissingError, UsageError
from composer_core.plugins.builtin_settings import ExactMatchSettings, PythonRewardSettings, RegexSettings
from composer_core.plugins.contributions import Kind, RewardPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import NoSettings
from composer_core.spec.model import (
    DataSpec,
    EvalSpec,
    LossSpec,
    ModelSpec,
    Plugged,
    PromptsSpec,
    RunSpec,
    TrainSpec,
)
from composer_core.spec.sections import EnvironmentSpec, PairsSpec, RolloutSpec, TracesSpec

REGISTRY = Registry.discover(third_party=False)


def plugged(use, settings, weight=1.0):
    return Plugged(kind=Kind.REWARD, use=use, owner="composer-core", settings=settings, weight=weight)


def spec(prompts, *rewards, model=None, **data):
    """A whole spec, of which preflight reads model, data and steps."""

    def block(kind, use):
        return Plugged(kind=kind, use=use, owner="composer-core", settings=NoSettings())

    return RunSpec(
        version=1,
        name="test",
        model=model or ModelSpec(builtin="tiny"),
        data=DataSpec(prompts=prompts, rewards=list(rewards), **data),
        loss=LossSpec(objective=block(Kind.OBJECTIVE, "grpo")),
        train=TrainSpec(steps=10),
        backend=block(Kind.BACKEND, "toy"),
        executor=block(Kind.EXECUTOR, "inline"),
    )


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    rows = [{"question": "16 - 3?", "answer": "<<16-3=13>>\n#### 13"}, {"question": "1 + 1?", "answer": "#### 2"}]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return PromptsSpec(path=str(file), column="question")


def test_it_says_what_the_run_starts_from(tasks):
    lines = preflight(
        spec(
            tasks, plugged("exact-match", ExactMatchSettings()), plugged("regex", RegexSettings(pattern="[0-9]"), 0.5)
        ),
        REGISTRY,
    )
    assert lines == [
        "model: built-in tiny",
        "prompts: 2 rows from tasks.jsonl, columns question, answer",
        "reward exact-match (weight 1): 0 for an empty completion, 1 for '<<16-3=13>>\\n#### 13'",
        "reward regex (weight 0.5): 0 for an empty completion, 1 for '1'",
    ]


def test_a_reward_is_tried_with_everything_a_trainer_gives_it(tasks, tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completions, prompts, completion_ids, answer, trainer_state, log_extra, log_metric, **columns):\n"
        "    log_extra('answer', answer)\n"
        "    log_metric('share', 0.5)\n"
        "    assert [c[0]['content'] for c in completions] == ['', answer[0]] and len(completion_ids) == 2\n"
        "    return [trainer_state.global_step, None]\n",
        encoding="utf-8",
    )
    lines = preflight(spec(tasks, plugged("python", PythonRewardSettings(function=f"{tmp_path}/r.py:f"))), REGISTRY)
    assert lines[2] == ("reward python (weight 1): 0 for an empty completion, no score for '<<16-3=13>>\\n#### 13'")


def test_a_reward_that_fails_on_the_first_prompt_is_the_users_error(tasks, tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "def f(completions, **columns):\n    return [1 / len(c[0]['content']) for c in completions]\n", "utf-8"
    )
    with pytest.raises(UsageError) as caught:
        preflight(spec(tasks, plugged("python", PythonRewardSettings(function=f"{file}:f"))), REGISTRY)
    assert str(caught.value) == (
        f"{file}:2: tried on the first prompt: reward 'python' raised ZeroDivisionError: division by zero"
        "\n  completion: ''"
    )


def test_a_reward_that_may_look_at_environments_is_left_to_the_run(tasks, tmp_path):
    (tmp_path / "own.py").write_text("def score(completions, environments, **c):\n    return [len(environments)]\n")
    settings = PythonRewardSettings(function=f"{tmp_path / 'own.py'}:score")
    environment = EnvironmentSpec(use="python", factory="./env.py:Shop")
    played = spec(tasks, plugged("python", settings)).model_copy(
        update={"rollout": RolloutSpec(environment=environment)}
    )
    assert preflight(played, REGISTRY)[-1] == "reward python (weight 1): tried when the run starts"


def test_any_row_without_a_rewards_column_is_found(tasks):
    from pathlib import Path

    with Path(tasks.path).open("a", encoding="utf-8") as file:
        file.write('\n{"question": "2 + 2?"}\n')
    with pytest.raises(UsageError) as caught:
        preflight(spec(tasks, plugged("exact-match", ExactMatchSettings())), REGISTRY)
    assert str(caught.value) == (
        f"{tasks.path}:3: no column 'answer', which reward 'exact-match' needs; there are: question"
    )


def test_a_dataset_and_a_hub_model_are_left_to_the_worker():
    lines = preflight(
        spec(
            PromptsSpec(dataset="acme/tasks"),
            plugged("exact-match", ExactMatchSettings()),
            model=ModelSpec(path="acme/model"),
        ),
        REGISTRY,
    )
    assert lines == [
        "model: acme/model, from the Hugging Face Hub when the run starts",
        "prompts: dataset acme/tasks, read when the run starts",
        "reward exact-match (weight 1): tried when the run starts",
    ]


def test_a_third_partys_reward_is_not_imported():
    class ThirdParty:
        @hookimpl
        def composer_rewards(self):
            yield RewardPlugin(name="heavy", summary="", target="no_such_module_anywhere:Reward")

    registry = Registry()
    registry.add(ThirdParty(), Owner("acme-rewards", "2.1"))
    lines = preflight(spec(PromptsSpec(builtin="digits"), plugged("heavy", NoSettings())), registry)
    assert lines == [
        "model: built-in tiny",
        "prompts: 64 rows from built-in digits, columns target",
        "reward heavy (weight 1): from acme-rewards 2.1, tried when the run starts",
    ]


def test_a_chat_needs_a_chat_template(tmp_path, tasks):
    for name, text in {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    model = ModelSpec(path=str(tmp_path))
    regex = plugged("regex", RegexSettings(pattern="a"))
    with pytest.raises(UsageError) as caught:
        preflight(spec(tasks, regex, model=model), REGISTRY)
    assert str(caught.value) == (
        f"{tmp_path}: the tokenizer in this folder has no chat template, and prompts are chats"
        "\n  fix: data.prompts.chat: false continues prompts as raw text"
    )
    raw = tasks.model_copy(update={"chat": False})
    assert preflight(spec(raw, regex, model=model), REGISTRY)[0] == f"model: {tmp_path}"


def test_held_out_prompts_and_recordings_are_looked_at_too(tasks, tmp_path):
    regex = plugged("regex", RegexSettings(pattern="a"))
    (tmp_path / "pairs.jsonl").write_text("{}", "utf-8")
    more = {"pairs": PairsSpec(path=str(tmp_path / "pairs.jsonl")), "traces": TracesSpec(path=str(tmp_path))}
    lines = preflight(spec(tasks, regex, eval=EvalSpec(builtin="digits", limit=5), **more), REGISTRY)
    assert lines[2:5] == [
        "held-out prompts: 5 rows from built-in digits, columns target",
        f"traces: {tmp_path}",
        f"pairs: {tmp_path / 'pairs.jsonl'}",
    ]
    with pytest.raises(UsageError) as caught:
        preflight(spec(tasks, regex, pairs=PairsSpec(path="/nowhere/pairs.jsonl")), REGISTRY)
    assert str(caught.value) == (
        "/nowhere/pairs.jsonl: no such file, which data.pairs names\n  fix: paths are relative to the spec"
    )
    to_be = spec(tasks, regex, pairs=PairsSpec(path="/nowhere/pairs.jsonl"))
    teacher = Plugged(kind=Kind.TEACHER, use="wise", owner="x", settings=NoSettings())
    assert preflight(to_be.model_copy(update={"teachers": {"strong": teacher}}), REGISTRY)[2] == (
        "pairs: /nowhere/pairs.jsonl, not there yet; composer-run replay writes it"
    )


def test_held_out_rows_need_the_columns_of_the_rewards(tasks, tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "1 + 1?"}', "utf-8")
    with pytest.raises(UsageError) as caught:
        preflight(spec(tasks, plugged("exact-match", ExactMatchSettings()), eval=EvalSpec(path=str(file))), REGISTRY)
    assert str(caught.value).startswith(f"{file}:1: no column 'answer'")


def test_the_environment_is_filled_in_for_the_look(tasks, monkeypatch):
    from pathlib import Path

    monkeypatch.setenv("TASKS", str(Path(tasks.path).parent))
    placed = tasks.model_copy(update={"path": "${env:TASKS}/tasks.jsonl"})
    regex = plugged("regex", RegexSettings(pattern="a"))
    assert preflight(spec(placed, regex), REGISTRY)[1] == "prompts: 2 rows from tasks.jsonl, columns question, answer"
    monkeypatch.delenv("TASKS")
    with pytest.raises(MissingError) as caught:
        preflight(spec(placed, regex), REGISTRY)
    assert str(caught.value) == (
        "data.prompts.path: the environment variable TASKS is not set\n  fix: export TASKS=..."
    )


def test_it_needs_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from composer_core.data.preflight import preflight\n"
        "from composer_core.data.rewards import ExactMatch, PythonReward\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
