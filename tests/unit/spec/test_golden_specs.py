"""Wrong specs, each with its whole message; see tests/golden_specs/README.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_core.errors import ComposerError
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

FOLDER = Path(__file__).parents[2] / "golden_specs"
SPECS = sorted(FOLDER.glob("*.yaml"))
HEADER = "# overrides: "


@pytest.mark.parametrize("spec", SPECS, ids=[spec.stem for spec in SPECS])
def test_a_wrong_spec_gets_exactly_this_message(spec, registry, monkeypatch):
    monkeypatch.chdir(FOLDER)
    first = spec.read_text().partition("\n")[0]
    overrides = first.removeprefix(HEADER).split() if first.startswith(HEADER) else []
    with pytest.raises(ComposerError) as error:
        make_plan(load_spec(spec.name, registry, overrides=overrides), registry)
    said = f"{error.value}\nexit code {error.value.exit_code}\n"
    expected = spec.with_suffix(".txt")
    if os.environ.get("COMPOSER_REWRITE_GOLDEN") == "1":
        expected.write_text(said)
    assert said == expected.read_text()


def test_there_are_sixty_and_none_is_left_over():
    assert len(SPECS) >= 60
    assert [text.stem for text in sorted(FOLDER.glob("*.txt"))] == [spec.stem for spec in SPECS]
