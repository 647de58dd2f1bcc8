"""`composer-run plugins show | check | new`."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.cli.main import main

PLUGIN = '''
from pydantic import Field
from composer_core.plugins.contributions import BackendPlugin, LossChannelPlugin, RewardPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.settings import Settings
from composer_core.protocols import Need

class Inner(Settings):
    at: str = "turn"
    """Where it goes."""

class PullSettings(Settings):
    """How hard it pulls."""
    force: float = Field(0.5, gt=0, lt=1)
    """At 1 nothing
    else counts."""
    hints: Inner = Inner()
    word: str | None

@hookimpl
def composer_loss_channels():
    yield LossChannelPlugin(name="pull", summary="Pulls", target="acme_code:Pull", settings=PullSettings,
                            needs=lambda settings: (frozenset({Need.LOGPS}),))

@hookimpl
def composer_rewards():
    yield RewardPlugin(name="pull", summary="Also pulls", target="acme_code:Reward")
    yield RewardPlugin(name="lost", summary="Lost", target="acme_code:Gone", install_hint="pip install acme-gone")
    yield RewardPlugin(name="explodes", summary="Bang", target="acme_code:Explodes")

@hookimpl
def composer_backends():
    yield BackendPlugin(name="old", summary="Outdated", target="acme_code:Old", native_objectives=frozenset({"grpo"}),
                        provides=lambda spec: frozenset({Need.LOGPS, Need.EMA}), install_hint="pip install acme==2")
'''
CODE = """
class Pull:
    def __init__(self, settings): pass

class Reward(Pull):
    def __call__(self, completions, **columns): return [1.0 for _ in completions]

class Explodes:
    def __init__(self, settings): 1 / 0

class Old(Pull):
    def check(self): return ["acme 1 has no Trainer", "acme 1 has no loss"]
"""


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("plugins show pull")` -> (exit code, stdout, stderr), with the package acme 1.2 installed."""
    site, work = tmp_path / "site", tmp_path / "work"
    info = site / "acme-1.2.dist-info"
    info.mkdir(parents=True)
    work.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[composer]\nacme = acme_plugin\n")
    (site / "acme_plugin.py").write_text(PLUGIN)
    (site / "acme_code.py").write_text(CODE)
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("COMPOSER_DISABLE_PLUGINS", "composer-trl,composer-verl,composer-prime-rl,composer-monarch")

    def run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    yield run
    for name in ("acme_plugin", "acme_code"):
        sys.modules.pop(name, None)


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_gives_every_kind_of_the_name_with_its_options(composer):
    assert composer("plugins show pull") == (
        0,
        """\
channel pull [acme 1.2]
  Pulls
  How hard it pulls.
  needs: depends on the settings
  options:
    force: number > 0, < 1, default 0.5
        At 1 nothing else counts.
    hints.at: text, default "turn"
        Where it goes.
    word: text | null, required

reward pull [acme 1.2]
  Also pulls
  no options
""",
        "",
    )


def test_show_a_backend_says_what_it_provides(composer):
    assert composer("plugins show acme/old") == (
        0,
        """\
backend old [acme 1.2]
  Outdated
  provides: ema, logps
  native objectives: grpo
  core objectives averaged by: none
  sections it has beyond the common ones: none
  install: pip install acme==2
  no options
""",
        "",
    )


def test_show_imports_no_code(composer):
    assert composer("plugins show pull")[0] == 0
    assert "acme_code" not in sys.modules


def test_show_json_is_a_list_of_descriptions(composer):
    code, out, err = composer("plugins show pull --json")
    assert (code, err) == (0, "")
    channel, reward = json.loads(out)
    assert (channel["kind"], channel["name"], channel["owner"]) == ("channel", "pull", "acme 1.2")
    assert channel["options"][0] == {
        "name": "force",
        "type": "number > 0, < 1",
        "default": 0.5,
        "has_default": True,
        "required": False,
        "doc": "At 1 nothing else counts.",
    }
    assert (reward["kind"], reward["options"], reward["target"]) == ("reward", [], "acme_code:Reward")


def test_a_plugin_s_name_shows_all_it_brings(composer):
    _, out, _ = composer("plugins show acme --json")
    assert [(one["kind"], one["name"]) for one in json.loads(out)] == [
        ("backend", "old"),
        ("channel", "pull"),
        ("reward", "explodes"),
        ("reward", "lost"),
        ("reward", "pull"),
    ]


def test_an_unknown_name_is_the_user_s_mistake(composer):
    expected = "no contribution and no plugin is called 'zzz'\n  fix: composer-run plugins list shows all\n"
    assert composer("plugins show zzz") == (2, "", expected)
    expected = "no contribution and no plugin is called 'exact-mach'\n  fix: did you mean 'exact-match'?\n"
    assert composer("plugins show exact-mach") == (2, "", expected)


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_says_what_works_and_ends_with_3_where_something_does_not(composer):
    assert composer("plugins check acme") == (
        3,
        """\
backend old [acme 1.2]: acme 1 has no Trainer; acme 1 has no loss
  fix: pip install acme==2
channel pull [acme 1.2]: ok, but not made: its settings have no defaults
reward explodes [acme 1.2]: acme_code:Explodes: ZeroDivisionError: division by zero
reward lost [acme 1.2]: reward 'lost' cannot be loaded from acme_code:Gone: module 'acme_code' has no attribute 'Gone'
  fix: pip install acme-gone
reward pull [acme 1.2]: ok
""",
        "",
    )


def test_check_of_what_works_ends_with_0(composer):
    out = "channel pull [acme 1.2]: ok, but not made: its settings have no defaults\nreward pull [acme 1.2]: ok\n"
    assert composer("plugins check pull") == (0, out, "")
    code, out, err = composer("plugins check pull --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(one["ok"], one["made"]) for one in found["contributions"]] == [(True, False), (True, True)]
    assert found["problems"] == []


def test_check_refuses_a_contribution_whose_package_lacks_a_requirement(composer, tmp_path):
    metadata = tmp_path / "site" / "acme-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: acme-engine>=3\n")
    code, out, _ = composer("plugins check acme/pull")
    assert code == 3
    assert out.splitlines()[2:] == [
        "reward pull [acme 1.2]: reward 'pull' comes from acme 1.2, which needs acme-engine>=3, which is not installed",
        "  fix: pip install -U acme",
    ]


def test_check_of_a_plugin_that_does_not_load_gives_the_reason(composer, tmp_path):
    (tmp_path / "site" / "acme_plugin.py").write_text("1 / 0")
    expected = "acme 1.2 (import): ZeroDivisionError: division by zero\n  fix: pip install -U acme\n"
    assert composer("plugins check acme") == (3, "", expected)
    code, out, _ = composer("--no-plugins plugins check regex")
    assert (code, out) == (0, "reward regex [composer-core 0.1.0]: ok, but not made: its settings have no defaults\n")


def test_check_of_everything_names_plugins_that_could_not_be_used(composer, tmp_path):
    (tmp_path / "site" / "acme_plugin.py").write_text("1 / 0")
    code, out, _ = composer("plugins check")
    assert code == 3
    assert out.endswith("plugin acme 1.2 (import): ZeroDivisionError: division by zero\n  fix: pip install -U acme\n")
    lines = [line for line in out.splitlines() if line.startswith("objective ")]
    assert lines
    assert [line for line in lines if not line.endswith(": ok")] == []


# -- new ---------------------------------------------------------------------------------------------------------------


def test_new_refuses_a_folder_that_is_there_and_a_name_that_cannot_be_one(composer, tmp_path):
    (tmp_path / "work" / "mine").mkdir()
    fix = "  fix: another name, or --out DIR\n"
    assert composer("plugins new mine") == (2, "", f"mine: this is there already\n{fix}")
    fix = "  fix: lower case letters, digits and hyphens: acme-brevity\n"
    assert composer("plugins new My_Plugin") == (2, "", f"'My_Plugin' cannot name a plugin\n{fix}")
    assert composer("plugins new class") == (2, "", f"'class' cannot name a plugin\n{fix}")


def test_new_says_what_it_wrote(composer):
    files = ["README.md", "example.yaml", "my_words/__init__.py", "my_words/plugin.py", "my_words/reward.py"]
    code, out, err = composer("plugins new my-words --kind reward --out there")
    assert (code, err) == (0, "")
    *written, last = out.splitlines()
    assert sorted(written) == sorted(f"there/{name}" for name in [*files, "pyproject.toml", "tests/test_contract.py"])
    assert last == "next: cd there && pip install -e . && pytest && composer-run check example.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["channel", "reward", "objective"])
def test_a_new_package_installs_passes_its_tests_and_runs_its_example(composer, tmp_path, kind):
    name = f"acme-new-{kind}"
    assert composer(f"plugins new {name} --kind {kind}")[0] == 0
    package, target = tmp_path / "work" / name, tmp_path / "target"
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(target)}

    def python(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", "--rootdir", str(package))
    command = ["-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    assert python(*command, "plugins", "check", name) == f"{kind} {name} [{name} 0.1.0]: ok\n"
    out = python(*command, "example.yaml", "train.steps=2", "train.prompts_per_step=2", "train.group_size=4")
    assert out.startswith("done: 2 of 2 steps")
    for tool in (
        ["ruff", "check", "--isolated", "--line-length=120"],
        ["ruff", "format", "--check", "--line-length=120"],
    ):
        python("-m", *tool, str(package))
