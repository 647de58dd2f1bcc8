"""The README says what the code has: its spec can be planned, its tables are those of the code."""

import re
from pathlib import Path

import pytest

from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_verl.objectives import NATIVE
from composer_verl.settings import VerlSettings

ROOT = Path(__file__).parents[3]
README = (Path(__file__).parents[1] / "README.md").read_text()


def rows(heading):
    """The cells of the first table behind a heading."""
    behind = README.partition(f"## {heading}\n")[2]
    _, _, *lines = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_its_spec_can_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    spec = tmp_path / "spec.yaml"
    spec.write_text(text.replace("examples/data", f"{ROOT}/examples/data"))
    registry = Registry.discover()
    plan = make_plan(load_spec(spec, registry), registry)
    assert [channel.name for channel in plan.channels] == ["sdpo", "replay"]


def test_every_setting_has_a_row_with_its_default():
    defaults = {name: field.default for name, field in VerlSettings.model_fields.items() if name != "options"}
    said = dict(re.match(r"`(\w+)`(?: \(`?(\w+)`?\))?", setting).groups() for setting, _ in rows("Settings"))
    assert said.pop("options") is None
    assert said == {name: str(default) for name, default in defaults.items()}


def test_the_objectives_are_those_that_verl_computes(objective):
    table = {name: modes.split(", ") for name, modes, _ in rows("Objectives")}
    assert list(table) == list(NATIVE)
    for name, native in NATIVE.items():
        mode = native.fields(objective(name).settings)["policy_loss.loss_mode"]
        assert mode in table[name], name
    assert sorted(table["dppo"]) == ["dppo_kl", "dppo_tv"]


@pytest.mark.parametrize("name", ["gspo", "gspo-token", "luspo", "gmpo", "bnpo"])
def test_what_it_leaves_to_the_core_is_left(name):
    assert name not in NATIVE
    assert f"`{name}`" in README
