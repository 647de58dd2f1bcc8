"""The light half of the command line: exit codes, whole output, and that it stays light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from composer_core.cli.main import VERBS, main

SPEC = """\
version: 1
name: test
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train: {steps: 5}
backend: {use: toy}
"""


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("check spec.yaml")` -> (exit code, stdout, stderr), in a folder of its own that holds spec.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER_DISABLE_PLUGINS", "*")
    (tmp_path / "spec.yaml").write_text(SPEC)

    def _run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return _run


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_says_what_a_right_spec_will_use(composer):
    assert composer("check spec.yaml") == (0, "spec.yaml: ok (backend toy, objective grpo, channels -)\n", "")


def test_check_reports_all_problems_on_stderr(composer):
    assert composer("check spec.yaml train.steps=0 seeed=1") == (
        2,
        "",
        "command line (seeed=1): seeed: unknown key\n  fix: did you mean seed?\n"
        "command line (train.steps=0): train.steps: must be >= 1, got 0\n",
    )


def test_check_ends_with_3_where_only_a_package_is_missing(composer):
    assert composer("check spec.yaml backend.use=hopper") == (
        3,
        "",
        "command line (backend.use=hopper): backend.use: no backend is called 'hopper'; installed: toy\n"
        "  fix: pip install composer-hopper, if that is the package which brings it\n",
    )


def test_check_json_is_one_document_on_stdout(composer):
    code, out, err = composer("check spec.yaml --json")
    assert (code, json.loads(out), err) == (0, {"ok": True, "problems": []}, "")
    code, out, err = composer("check --json spec.yaml train.steps=0")
    assert (code, err) == (2, "")
    assert json.loads(out) == {
        "ok": False,
        "problems": [
            {
                "key": "train.steps",
                "problem": "must be >= 1, got 0",
                "fix": "",
                "source": "command line (train.steps=0)",
                "line": 0,
                "column": 0,
                "missing": False,
            }
        ],
    }


def test_check_json_of_a_file_that_is_not_there(composer):
    code, out, err = composer("check --json nope.yaml")
    assert (code, err) == (2, "")
    (problem,) = json.loads(out)["problems"]
    assert (problem["source"], problem["problem"]) == ("nope.yaml", "no such spec")


def test_check_finds_what_only_the_plan_can_know(composer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from composer_core.plugins.contributions import LossChannelPlugin\n"
        "from composer_core.plugins.hookspecs import hookimpl\n"
        "from composer_core.protocols import Need\n"
        "@hookimpl\n"
        "def composer_loss_channels():\n"
        "    yield LossChannelPlugin(name='mine', summary='', target='x:Y',\n"
        "                            needs=lambda settings: (frozenset({Need.OUTER_SYNC}),))\n"
    )
    (tmp_path / "spec.yaml").write_text(SPEC.replace("use: grpo}", "use: grpo}\n  channels: [{use: mine}]"))
    assert composer("check spec.yaml plugins=[mine.py]") == (
        2,
        "",
        "spec.yaml:9:14: loss.channels[0]: backend 'toy' cannot run channel 'mine': it needs {outer-sync}, "
        "toy provides {divergence-full, logits, logps, pairs, reference, state}\n",
    )


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_shows_what_a_run_would_use_and_changes_nothing(composer, tmp_path):
    code, out, err = composer("plan spec.yaml")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    for title in ("run", "model", "data", "rewards", "loss", "plugins", "files in the run directory"):
        assert title in lines
    assert "  objective grpo    the core's code" in lines
    assert "  composer-core    0.1.0" in lines
    assert "  metrics.jsonl" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_plan_json_is_the_plan(composer):
    code, out, err = composer("plan spec.yaml train.steps=7 --json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["format"], plan["objective"], plan["spec"]["train"]["steps"]) == (1, "core", 7)


def test_plan_says_what_it_takes_of_memory_and_money(composer):
    code, out, err = composer("plan spec.yaml train.micro_batch=2 train.max_completion_tokens=10")
    assert (code, err) == (0, "")
    said = [" ".join(line.split()) for line in out.splitlines()]
    start = said.index("memory")
    assert said[start : said.index("plugins")] == [
        "memory",
        "parameters 80,704, of which 80,704 learn",
        "weights 323 kB",
        "gradients 323 kB",
        "optimiser (AdamW) 646 kB",
        "logits of a micro-batch 16 kB",  # 2 x 2 x 10 x 103 x 4 bytes
        "at least 1.3 MB per process, plus activations",
        "cost",
        "unknown executor 'inline' has no known price",
    ]
    plan = json.loads(composer("plan spec.yaml --json")[1])
    assert (plan["memory"]["parameters"], plan["cost"]) == (80704, {"unknown": "executor 'inline' has no known price"})


def test_plan_shows_every_section_that_the_spec_has(composer):
    code, out, err = composer(
        "plan spec.yaml data.eval.builtin=digits data.eval.every=7 limits.hours=2 checkpoint.every=3"
    )
    assert (code, err) == (0, "")
    said = [" ".join(line.split()) for line in out.splitlines()]
    for title, line in (("held-out prompts", "every 7"), ("limits", "hours 2.0"), ("checkpoints", "every 3")):
        assert line in said[said.index(title) :]
    assert "traces" not in said


def test_plan_names_the_environment_variables_and_needs_none_of_them(composer, monkeypatch):
    monkeypatch.delenv("MODEL", raising=False)
    line = "plan spec.yaml model.builtin=null model.path=${env:MODEL}/small"
    code, out, err = composer(line)
    assert (code, err) == (0, "")
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert said[said.index("memory") + 1] == "unknown model.path comes from the environment"
    assert said[said.index("environment variables that it reads") + 1] == "MODEL"
    plan = json.loads(composer(f"{line} --json")[1])
    assert (plan["required_env"], plan["spec"]["model"]["path"]) == (["MODEL"], "${env:MODEL}/small")
    assert composer(f"{line} --data") == (
        3,
        "",
        "model.path: the environment variable MODEL is not set\n  fix: export MODEL=...\n",
    )


@pytest.mark.slow
def test_plan_data_looks_at_prompts_rewards_and_tokenizer_and_changes_nothing(composer, tmp_path):
    code, out, err = composer("plan spec.yaml --data")
    assert (code, err) == (0, "")
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert "prompts: 64 rows from built-in digits, columns target" in said
    assert "prompt tokens min 5, median 5, max 5 (64 prompts)" in said
    plan = json.loads(composer("plan spec.yaml --data --json")[1])
    assert plan["data"][0] == "model: built-in tiny"
    assert plan["tokenizer"]["ends"] == ["<|end|> (1)"]
    assert plan["tokenizer"]["lengths"] == {"min": 5, "median": 5, "max": 5, "measured": 64, "of": 64}
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_mistake_in_a_base_is_shown_at_its_own_file(composer, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: spec.yaml\nname: mine\n")
    assert composer("check mine.yaml")[:2] == (0, "mine.yaml: ok (backend toy, objective grpo, channels -)\n")
    (tmp_path / "spec.yaml").write_text(SPEC.replace("steps: 5", "steps: five"))
    assert composer("check mine.yaml") == (2, "", "spec.yaml:9:9: train.steps: must be a whole number, got 'five'\n")


def test_plan_refuses_a_wrong_spec_like_check(composer):
    assert composer("plan --json spec.yaml seed=-1") == (
        2,
        "",
        "command line (seed=-1): seed: must be >= 0, got -1\n",
    )


# -- plugins -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_plugin(tmp_path, monkeypatch):
    """An installed plugin, composer-broken 0.3, that raises at import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    info = tmp_path / "composer_broken-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: composer-broken\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[composer]\nbroken = broken_plugin\n")


def test_plugins_list_shows_contributions_with_owner_and_summary(composer):
    code, out, err = composer("--no-plugins plugins list")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "backends"
    line = "regex How much of the completion matches a pattern [composer-core 0.1.0]"
    assert line in [" ".join(line.split()) for line in out.splitlines()]
    assert "composer-trl 0.1.0 (disabled): by --no-plugins, --disable-plugin or COMPOSER_DISABLE_PLUGINS" in out


def test_a_broken_plugin_is_one_line_and_disturbs_nothing(composer, broken_plugin, monkeypatch):
    monkeypatch.delenv("COMPOSER_DISABLE_PLUGINS")
    code, out, err = composer("--disable-plugin composer-trl plugins list")
    assert (code, err) == (0, "")
    assert (
        "  composer-broken 0.3 (import): ZeroDivisionError: division by zero; fix: pip install -U composer-broken"
    ) in out.splitlines()
    assert composer("--disable-plugin composer-trl check spec.yaml")[0] == 0


def test_plugins_list_json(composer, broken_plugin, monkeypatch):
    monkeypatch.delenv("COMPOSER_DISABLE_PLUGINS")
    code, out, err = composer("plugins list --json")
    assert (code, err) == (0, "")
    listed = json.loads(out)
    (core,) = [plugin for plugin in listed["plugins"] if plugin["name"] == "composer-core"]
    assert (core["version"], core["entry_point"]) == ("0.1.0", "core")
    assert {
        "kind": "reward",
        "name": "length",
        "summary": "Nearness to a target length",
    } in core["contributions"]
    (problem,) = [problem for problem in listed["problems"] if problem["name"] == "composer-broken"]
    assert problem == {
        "name": "composer-broken",
        "version": "0.3",
        "entry_point": "broken",
        "stage": "import",
        "reason": "ZeroDivisionError: division by zero",
        "fix": "pip install -U composer-broken",
    }


# -- the program -------------------------------------------------------------------------------------------------------


def test_a_mistyped_verb_is_a_mistyped_verb(composer):
    assert composer("chekc spec.yaml") == (2, "", "no such command 'chekc', did you mean 'check'?\n")


def test_an_unknown_verb_gets_the_list(composer):
    assert composer("frobnicate") == (2, "", f"no such command 'frobnicate'; there are {', '.join(VERBS)}\n")


@pytest.mark.parametrize("argument", ["spec.yaml", "missing.yml", "missing.json", "plain"])
def test_a_spec_in_a_verbs_place_is_run(composer, monkeypatch, tmp_path, argument):
    (tmp_path / "plain").write_text(SPEC)
    seen = []

    def run(spec: str, overrides: list[str] | None = None) -> None:
        seen.append(spec)

    monkeypatch.setitem(VERBS, "run", VERBS["run"]._replace(module="fake_run"))
    monkeypatch.setitem(sys.modules, "fake_run", type("fake_run", (), {"run": staticmethod(run)}))
    assert composer(argument) == (0, "", "")
    assert seen == [argument]


def test_a_folder_named_like_nothing_is_no_spec(composer, tmp_path):
    (tmp_path / "specs").mkdir()
    assert composer("specs")[0] == 2


def _breaks(monkeypatch):
    def check() -> None:
        raise RuntimeError("boom")

    monkeypatch.setitem(VERBS, "check", VERBS["check"]._replace(module="fake_check"))
    monkeypatch.setitem(sys.modules, "fake_check", type("fake_check", (), {"check": staticmethod(check)}))


def test_a_mistake_of_ours_is_one_line_and_code_4(composer, monkeypatch):
    _breaks(monkeypatch)
    assert composer("check") == (
        4,
        "",
        "internal error, please report: RuntimeError: boom; --debug shows the traceback\n",
    )


def test_debug_shows_the_traceback(composer, monkeypatch):
    _breaks(monkeypatch)
    code, _, err = composer("--debug check")
    assert code == 4
    assert err.startswith("Traceback (most recent call last):\n")
    code, _, err = composer("--debug plan nope.yaml")
    assert "Traceback" in err


def test_version(composer):
    assert composer("--version") == (0, "composer-core 0.1.0\n", "")


def test_an_unknown_option_is_a_usage_error(composer):
    code, out, err = composer("check spec.yaml --jsonn")
    assert (code, out) == (2, "")
    assert "No such option: --jsonn" in err


def test_the_console_script_ends_with_the_exit_code(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC.replace("steps: 5", "steps: five"))
    done = subprocess.run(
        [sys.executable, "-m", "composer_core.cli.main", "check", "spec.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spec.yaml:9:9: train.steps: must be a whole number, got 'five'\n"


HEAVY = ("torch", "transformers", "trl", "datasets", "numpy", "matplotlib")

PROBE = """
import sys
from composer_core.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
assert not code, code
print("heavy:", *[name for name in {heavy!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "line", ["--help", "check spec.yaml", "plan spec.yaml", "schema", "plugins list", "check --help"]
)
def test_it_imports_nothing_heavy(tmp_path, line):
    (tmp_path / "spec.yaml").write_text(SPEC)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]
