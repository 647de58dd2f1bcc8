"""`composer-run init`: every template can be planned, the small ones train, nothing is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.cli.main import main
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.templates import recipes, write_recipe

SMALL = ("quickstart", "python-reward", "toy-channel")


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("init math")` -> (exit code, stdout, stderr), in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run


def test_the_list_shows_each_template_with_the_first_line_of_its_spec(composer, tmp_path):
    code, out, err = composer("init --list")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == [
        "quickstart     A tiny random model learns to answer in digits: offline, on a laptop, in under a minute.",
        "toy-channel    A loss channel of your own in one file, on the toy trainer: see loss/certainty move, then make "
        "it yours.",
    ]
    assert [line.split()[0] for line in out.splitlines()] == list(recipes())
    assert list(tmp_path.iterdir()) == []


def test_a_template_is_written_with_the_files_it_names(composer, tmp_path):
    assert composer("init python-reward --out mine/first.yaml") == (
        0,
        "wrote mine/first.yaml, mine/prompts.jsonl, mine/reward.py\n"
        "next: composer-run plan mine/first.yaml --data, then composer-run mine/first.yaml\n",
        "",
    )
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["first.yaml", "prompts.jsonl", "reward.py"]


def test_without_a_name_it_is_the_quickstart_in_spec_yaml(composer, tmp_path):
    assert composer("init")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]
    assert "\nname: quickstart " in (tmp_path / "spec.yaml").read_text()


def test_nothing_is_overwritten_and_nothing_written_when_one_file_is_there(composer, tmp_path):
    (tmp_path / "reward.py").write_text("mine")
    assert composer("init python-reward") == (
        2,
        "",
        "reward.py would be overwritten\n  fix: --out names another place\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_a_mistyped_template_gets_the_nearest(composer):
    expected = "no template is called 'quikstart'\n  fix: did you mean quickstart?\n"
    assert composer("init quikstart") == (2, "", expected)
    expected = f"no template is called 'zzz'\n  fix: there are {', '.join(recipes())}\n"
    assert composer("init zzz") == (2, "", expected)


def test_a_place_that_cannot_be_written_is_said(composer, tmp_path):
    (tmp_path / "file").write_text("")
    assert composer("init --out file/spec.yaml") == (2, "", "file: cannot be written: File exists\n")


@pytest.mark.parametrize("name", recipes())
def test_every_template_can_be_planned(name, tmp_path):
    write_recipe(recipes()[name], tmp_path / "spec.yaml")
    registry = Registry.discover()
    loaded = load_spec(tmp_path / "spec.yaml", registry)
    plan = make_plan(loaded, registry)
    assert loaded.spec.name == name
    assert plan.files


@pytest.mark.parametrize("name", recipes())
def test_a_template_writes_every_file_that_it_names_and_no_other(name):
    recipe = recipes()[name]
    text = (Path(sys.modules["composer_core.templates"].__file__).parent / "specs" / name / "spec.yaml").read_text()
    assert [file for file in recipe.files if file not in text] == []
    assert len(recipe.summary) <= 110
    assert recipe.summary.endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_small_templates_train(name, tmp_path):
    write_recipe(recipes()[name], tmp_path / "spec.yaml")
    command = [sys.executable, "-m", "composer_core.cli.main", "spec.yaml", "train.steps=2", "train.prompts_per_step=2"]
    command += ["train.group_size=4", "train.micro_batch=4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COMPOSER_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done: 2 of 2 steps")


@pytest.mark.slow
def test_templates_are_in_the_wheel(tmp_path):
    import zipfile

    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(root)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    here = {path.relative_to(root).as_posix() for path in (root / "composer_core").rglob("*") if path.is_file()}
    data = {path for path in here if path.startswith("composer_core/templates/") or path.endswith((".j2", ".css"))}
    assert {path for path in data if "__pycache__" not in path} <= packed
