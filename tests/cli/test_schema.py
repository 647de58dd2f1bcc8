"""`composer-run schema`, and the two files under docs that come from the same models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from composer_core.cli.main import main
from composer_core.cli.reference import files, registry_of
from composer_core.spec.errors import Section, known_keys
from composer_core.spec.model import RunSpec

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("schema")` -> (exit code, stdout, stderr), in an empty folder, with the core's contributions alone."""
    monkeypatch.chdir(tmp_path)

    def _run(line):
        try:
            code = main(["--no-plugins", *line.split()])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return _run


def test_it_prints_one_json_document(composer):
    code, out, err = composer("schema")
    assert (code, err) == (0, "")
    schema = json.loads(out)
    jsonschema.Draft202012Validator.check_schema(schema)
    uses = [variant["properties"]["use"]["enum"] for variant in schema["$defs"]["backend"]["oneOf"]]
    assert uses == [["toy", "composer-core/toy"]]


def test_out_writes_the_same_to_a_file(composer, tmp_path):
    _, printed, _ = composer("schema")
    assert composer("schema --out made.json") == (0, "made.json: JSON Schema of a run spec\n", "")
    assert json.loads((tmp_path / "made.json").read_text()) == json.loads(printed)
    assert [path.name for path in tmp_path.iterdir()] == ["made.json"]


def test_a_file_that_cannot_be_written_is_said(composer):
    assert composer("schema --out no/such/folder/made.json") == (
        3,
        "",
        "no/such/folder/made.json: cannot be written: No such file or directory\n",
    )


@pytest.fixture(scope="module")
def registry():
    return registry_of(["composer-core", "composer-trl", "composer-verl", "composer-executors"])


@pytest.mark.parametrize("name", ["composer.schema.json", "spec.md"])
def test_the_generated_files_are_up_to_date(registry, name):
    assert (DOCS / name).read_text() == files(registry)[name], "make docs"


def test_every_key_of_the_spec_is_on_the_page_with_its_meaning():
    page = (DOCS / "spec.md").read_text()
    sections = page.partition("## Kind: ")[0]
    for name in known_keys([Section(RunSpec)]):
        rows = re.findall(rf"^\| `{name}` \|.*\| (.*) \|$", sections, re.MULTILINE)
        assert rows, name
        assert all(row.strip() for row in rows), f"{name} has no meaning"


def test_every_contribution_that_a_block_can_name_is_on_the_page(registry):
    page = (DOCS / "spec.md").read_text()
    for _, contribution in registry:
        if f"## Kind: {contribution.kind}\n" in page:
            assert f"### {contribution.kind} `{contribution.name}`\n" in page
