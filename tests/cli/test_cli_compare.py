"""`composer-run compare` as a command; what it finds is tested in tests/unit/run/test_run_compare.py."""

import json

import pytest

from composer_core.cli.main import main
from composer_core.run.directory import create_run
from composer_core.run.metrics import MetricsLog


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("compare one two")` -> (exit code, stdout, stderr), in a folder with two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPOSER_RUNS", raising=False)
    for name, steps in (("one", 5), ("two", 50)):
        directory = create_run(tmp_path / "runs", name)
        resolved = {"train.steps": {"value": steps, "source": "spec.yaml:1:1"}}
        if name == "two":
            resolved["loss.objective.use"] = {"value": "grpo", "source": "default"}
        directory.write_json("resolved.json", resolved)
        directory.write_json("plan.json", {})
        log = MetricsLog(directory.metrics)
        log.log(1, {"reward/mean": steps / 8, "loss/total": 0.5} if name == "one" else {"reward/mean": 0.5})
        log.close()
        directory.event("stopped", reason="limits.hours", exit_code=5)

    def run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run


def names(folder):
    return sorted(path.name for path in folder.glob("*-*"))


def test_differences_are_tables_with_a_column_per_run(composer, tmp_path):
    one, two = names(tmp_path / "runs")
    assert composer("compare one two") == (
        0,
        f"""\
A  {one}  stopped, 1 steps
B  {two}  stopped, 1 steps
spec                  A  B
  train.steps         5  50
  loss.objective.use  -  grpo
versions: the same
last figures (means of five)  A      B
  reward/mean                 0.625  0.5
  loss/total                  0.5    -
page: runs/compare.html
""",
        "",
    )
    assert (tmp_path / "runs" / "compare.html").is_file()


def test_json_is_one_document_and_the_page_goes_where_it_is_sent(composer, tmp_path):
    code, out, err = composer("compare one latest --json --out page.html")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert [run["letter"] for run in made["runs"]] == ["A", "B"]
    assert made["spec"][0] == {"key": "train.steps", "values": {"A": 5, "B": 50}}
    assert made["page"] == "page.html"
    assert (tmp_path / "page.html").is_file()
    assert not (tmp_path / "runs" / "compare.html").exists()


def test_one_run_is_not_enough(composer):
    assert composer("compare one") == (2, "", "two runs at least make a comparison\n")


def test_a_place_that_cannot_be_written_is_said(composer):
    expected = "nowhere/page.html: cannot be written: No such file or directory\n  fix: --out names another place\n"
    assert composer("compare one two --out nowhere/page.html") == (2, "", expected)
