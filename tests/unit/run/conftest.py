from pathlib import Path

import pytest

from composer_core.plugins.registry import Registry
from composer_core.run.directory import create_run
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

SPEC = """\
version: 1
name: fake
plugins: [{plugin}]
model: {{builtin: tiny}}
data:
  prompts: {{builtin: digits}}
  rewards: [{{use: regex, pattern: "[0-9]"}}]
loss:
  objective: {{use: grpo}}
train: {{steps: 4}}
backend: {{use: fake, do: {do}}}
"""


@pytest.fixture
def write_spec(tmp_path):
    """A spec for the fake backend; `do` says how its run shall end."""

    def write(do):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.format(plugin=Path(__file__).with_name("fake_backend.py"), do=do))
        return path

    return write


@pytest.fixture
def planned(tmp_path, write_spec):
    """The directory of a run that is planned and not started."""

    def plan(do, *overrides):
        registry = Registry.discover()
        loaded = load_spec(write_spec(do), registry, overrides=overrides)
        directory = create_run(tmp_path / "runs", loaded.spec.name)
        directory.write_text("spec.yaml", loaded.text)
        directory.write_json("plan.json", make_plan(loaded, registry).to_json())
        return directory

    return plan
