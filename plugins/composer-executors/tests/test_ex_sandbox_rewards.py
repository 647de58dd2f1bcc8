"""Rewards in real sandboxes, from the spec's block to the score."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from composer_core.data.rewards import build_rewards
from composer_core.errors import SpecError
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

sys.path.insert(0, str(Path(__file__).with_name("services")))
from docker_service import IMAGE, docker_daemon, missing  # type: ignore[import-not-found]

SPEC = """\
version: 1
name: graded
model: {{builtin: tiny}}
data:
  prompts: {{builtin: digits}}
  rewards:
    - {{use: python, function: ./grade.py:runs, sandbox: {sandbox}, unanswered: 0}}
    - {{use: command, command: [python3, answer.py], files: {{answer.py: completion}}, sandbox: {sandbox}}}
loss: {{objective: {{use: grpo}}}}
train: {{steps: 1, prompts_per_step: 2, group_size: 2}}
backend: {{use: toy}}
"""
GRADE = """\
def runs(completions, **columns):
    exec(completions[0])
    return [1]
"""
COMPLETIONS = [
    "x = 1",
    "import os; os._exit(0)",
    "bytearray(1 << 33)",
    "while True: pass",
    "import os\ntry: os.kill(OURS, 9)\nexcept OSError: pass",
]


@pytest.fixture
def load(tmp_path):
    (tmp_path / "grade.py").write_text(GRADE)

    def load(sandbox):
        (tmp_path / "spec.yaml").write_text(SPEC.format(sandbox=sandbox))
        registry = Registry.discover()
        return load_spec(tmp_path / "spec.yaml", registry), registry

    return load


@pytest.fixture
def bubblewrap_block():
    if shutil.which("bwrap") is None:
        missing("bwrap is not installed (apt-get install bubblewrap)")
    return "{use: bubblewrap, seconds: 8, memory_mb: 64}"


@pytest.fixture(scope="module")
def docker_block():
    with docker_daemon() as host, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host)
        yield f"{{use: docker, image: '{IMAGE}', readable: [/usr], seconds: 8, memory_mb: 64}}"


@pytest.fixture(params=["bubblewrap", "docker"])
def block(request):
    return request.getfixturevalue(f"{request.param}_block")


def test_what_a_completion_does_costs_its_own_score_alone(load, block):
    loaded, registry = load(block)
    function, program = build_rewards(loaded.spec, registry)
    completions = [text.replace("OURS", str(os.getpid())) for text in COMPLETIONS]
    assert function.score(completions, answer=["1"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    # as a program of its own, an end is no score where a limit made it, and else its exit code
    scores = program.score(completions)
    assert [scores[0], scores[1], scores[3], scores[4]] == [1.0, 1.0, None, 1.0]
    assert scores[2] in (None, 0.0)


def test_an_unknown_sandbox_is_refused_with_its_line(load, tmp_path):
    spec, registry = load("bubblewarp")
    with pytest.raises(SpecError) as caught:
        make_plan(spec, registry)
    assert str(caught.value).splitlines()[:2] == [
        f"{tmp_path}/spec.yaml:7:48: data.rewards[0].sandbox: no sandbox is called 'bubblewarp'",
        "  fix: did you mean 'bubblewrap'?",
    ]
