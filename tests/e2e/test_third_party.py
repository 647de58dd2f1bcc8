"""A stranger's package, installed with pip, brings an objective, a reward and a channel; a broken one does no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "third_party"
SPEC = """\
version: 1
name: stranger
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards:
    - {use: polite, weight: 0.5}
    - {use: regex, pattern: "[0-9]"}
loss:
  objective: {use: reinforce}
  channels: [{use: brevity, weight: 0.01, free: 2}]
train: {steps: 3, prompts_per_step: 2, group_size: 4, max_completion_tokens: 8, learning_rate: 1.0e-3}
backend: {use: toy}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with both packages and their metadata, as pip leaves them."""
    target = tmp_path_factory.mktemp("site")
    for package in ("acme-composer", "acme-broken"):
        options = ["--no-deps", "--no-build-isolation", "--quiet", "--no-index", "--target", str(target)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(PACKAGES / package)], check=True)
    return target


@pytest.fixture
def command(site, tmp_path):
    """`composer-run` in an environment where the packages are installed."""
    (tmp_path / "spec.yaml").write_text(SPEC)

    def run(*arguments):
        start = "from composer_core.cli.main import main; main()"
        return _python(site, tmp_path, "-c", start, *arguments)

    return run


def _python(site, cwd, *arguments):
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_plugins_list_shows_what_it_brings_and_one_line_for_the_broken_one(command):
    done = command("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    (acme,) = [plugin for plugin in listed["plugins"] if plugin["name"] == "acme-composer"]
    assert acme["version"] == "1.2.0"
    assert {(c["kind"], c["name"]) for c in acme["contributions"]} == {
        ("objective", "reinforce"),
        ("reward", "polite"),
        ("channel", "brevity"),
    }
    assert [problem for problem in listed["problems"] if problem["name"] == "acme-broken"] == [
        {
            "name": "acme-broken",
            "version": "0.0.1",
            "entry_point": "acme-broken",
            "stage": "import",
            "reason": "RuntimeError: acme_broken was made for another world",
            "fix": "pip install -U acme-broken",
        }
    ]


def test_the_plan_names_the_owner_of_each_part(command):
    done = command("plan", "spec.yaml", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    spec = plan["spec"]
    used = [spec["loss"]["objective"], spec["loss"]["channels"][0], spec["data"]["rewards"][0]]
    assert [(block["use"], block["owner"]) for block in used] == [
        ("reinforce", "acme-composer 1.2.0"),
        ("brevity", "acme-composer 1.2.0"),
        ("polite", "acme-composer 1.2.0"),
    ]
    assert plan["objective"] == "core"


def test_a_run_uses_all_three(command, tmp_path):
    done = command("run", "spec.yaml", "--runs", "runs", "--quiet")
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["loss/brevity"] != 0
        assert line["weight/brevity"] == 0.01
        assert 0 < line["active/brevity"] <= 1
        assert line["brevity/excess"] > 0
    samples = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert all(sample["rewards"].keys() == {"polite", "regex"} for sample in samples)


def test_its_own_tests_pass_on_the_suites_that_composer_ships(site, tmp_path):
    tests = PACKAGES / "acme-composer" / "tests"
    done = _python(
        site, tmp_path, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
