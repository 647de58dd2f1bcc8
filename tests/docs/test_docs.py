"""Every code block of the README and the docs is run, loaded or found where something else runs it."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.plugins.contributions import CONTRIBUTIONS, Kind
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(page, match[2], id=f"{page.name}-{index}")
        for page in PAGES
        for index, match in enumerate(m for m in BLOCK.finditer(page.read_text()) if m[1] == language)
    ]


def commands():
    for param in blocks("bash"):
        for line in param.values[1].splitlines():
            yield line.partition("#")[0].strip()


COMPOSER_RUN = sorted({line for line in commands() if line.startswith("composer-run ")})
MAKE = sorted({line for line in commands() if line.startswith("make ")})
PIP = sorted({line for line in commands() if line.startswith(("pip ", "python3.11 -m venv "))})


def composer_run(line, tmp_path, *more):
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = os.environ | {"COMPOSER_RUNS": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*program, *line.split()[1:], *more], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_every_command_is_of_a_kind_that_is_tried_somewhere():
    assert {line for line in commands() if line} == {*COMPOSER_RUN, *MAKE, *PIP}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one short run in it, so that `latest` means something."""
    folder = tmp_path_factory.mktemp("runs")
    done = composer_run("composer-run examples/quickstart.yaml train.steps=2", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("line", COMPOSER_RUN)
def test_composer_run_lines_work(line, runs):
    steps = ["train.steps=2"] if line == "composer-run examples/quickstart.yaml" else []
    done = composer_run(line, runs, *steps)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", MAKE)
def test_make_lines_have_a_rule(line):
    target = line.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_pip_lines_are_those_that_make_runs():
    # CI runs them through make, in a new environment
    makefile = (ROOT / "Makefile").read_text()
    for line in PIP:
        if line.startswith("pip install "):
            assert f"$(PIP) {line.removeprefix('pip install ')}\n" in makefile, line


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_specs_can_be_planned(page, text, tmp_path):
    for local in re.findall(r"\./(\w+\.py)", text):
        (tmp_path / local).write_text(file_named(local, page))
    file = (ROOT if "examples/" in text else tmp_path) / f".docs-{os.getpid()}.yaml"
    file.write_text(text)
    try:
        registry = Registry.discover()
        make_plan(load_spec(file, registry), registry)
    finally:
        file.unlink()


def file_named(name, page):
    """The first Python block behind a sentence that names the file."""
    text = page.read_text()
    return BLOCK.search(text, text.index(f"`{name}`"))[2]


@pytest.mark.slow
def test_the_one_file_channel_trains(tmp_path):
    page = ROOT / "docs" / "plugins.md"
    (tmp_path / "my_channel.py").write_text(file_named("my_channel.py", page))
    (tmp_path / "spec.yaml").write_text(
        BLOCK.search(page.read_text(), page.read_text().index("name it in the spec"))[2]
    )
    done = composer_run(f"composer-run {tmp_path / 'spec.yaml'}", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert '"loss/certainty"' in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_blocks_run(page, text, tmp_path, monkeypatch):
    ast.parse(text)
    (tmp_path / "test_block.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_block.py"]
    if "class Test" not in text:
        command = [sys.executable, "test_block.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_hook_has_a_section():
    page = (ROOT / "docs" / "plugins.md").read_text()
    for contribution in CONTRIBUTIONS:
        assert f"### {contribution.hook}\n" in page
        section = page.partition(f"### {contribution.hook}\n")[2].partition("\n### ")[0]
        for field in dataclasses.fields(contribution):
            assert field.name in section or field.name == "install_hint", f"{contribution.hook}: {field.name}"


def test_the_readme_names_what_is_installed():
    readme = (ROOT / "README.md").read_text()
    shown = {Kind.OBJECTIVE, Kind.REWARD, Kind.CHANNEL, Kind.TEACHER, Kind.READER}
    for _, contribution in Registry.discover(third_party=False):
        name = contribution.name
        if contribution.kind in shown:
            assert f"`{name}`" in readme or f"use: {name}" in readme or f"**{name}**" in readme, name
