import json
import math
import re

import pytest

from composer_core.errors import UsageError
from composer_core.run.compare import compare, spec_values
from composer_core.run.directory import create_run
from composer_core.run.metrics import MetricsLog

EVIL = "<script>alert('x')</script>"


@pytest.fixture
def make(tmp_path):
    """A run that is done, of a resolved spec, versions and metrics by step."""

    def run(name, spec, *, versions=None, git=None, plugins=(), metrics=()):
        directory = create_run(tmp_path, name)
        directory.write_json("plan.json", {})
        directory.write_json("resolved.json", {key: {"value": value, "source": "x"} for key, value in spec.items()})
        worker = {"versions": versions or {"torch": "2.13.0"}, "plugins": list(plugins)}
        directory.write_json("provenance.json", {"control": {"git": git}, "worker": worker})
        log = MetricsLog(directory.metrics)
        for step, line in enumerate(metrics, 1):
            log.log(step, line)
        log.close()
        directory.event("finished", reason="", exit_code=0)
        return directory

    return run


def rows(differences):
    return {row.key: dict(row.values) for row in differences}


def test_only_keys_that_differ_are_shown_and_an_absent_one_is_left_out(make, tmp_path):
    first = make("one", {"seed": 0, "train.steps": 5, "limits.hours": None})
    second = make("two", {"seed": 0, "train.steps": 6, "limits.hours": None, "loss.objective.epsilon": 0.2})
    made = compare([first, second], tmp_path / "page.html")
    assert [(run.letter, run.run, run.state, run.steps) for run in made.runs] == [
        ("A", first.name, "done", 0),
        ("B", second.name, "done", 0),
    ]
    assert rows(made.spec) == {"train.steps": {"A": 5, "B": 6}, "loss.objective.epsilon": {"B": 0.2}}
    assert made.versions == []


def test_a_number_and_a_truth_value_are_not_the_same(make, tmp_path):
    made = compare([make("one", {"a": 1, "b": 1}), make("two", {"a": True, "b": 1})], tmp_path / "page.html")
    assert rows(made.spec) == {"a": {"A": 1, "B": True}}


def test_a_block_that_moved_in_its_list_is_the_same_block(make, tmp_path):
    one = {"loss.channels[0].use": "sdpo", "loss.channels[0].weight": 0.1}
    two = {
        "loss.channels[0].use": "acme/replay",
        "loss.channels[0].weight": 0.1,
        "loss.channels[1].use": "sdpo",
        "loss.channels[1].weight": 0.2,
    }
    made = compare([make("one", one), make("two", two)], tmp_path / "page.html")
    assert rows(made.spec) == {
        "loss.channels.sdpo.weight": {"A": 0.1, "B": 0.2},
        "loss.channels.acme/replay.use": {"B": "acme/replay"},
        "loss.channels.acme/replay.weight": {"B": 0.1},
    }


def test_a_list_that_is_empty_in_one_run_is_no_line_of_its_own(make, tmp_path):
    one, two = {"plugins[0]": "a.py", "backend.device": "cpu"}, {"plugins": [], "backend.options": {}}
    made = compare([make("one", one), make("two", two)], tmp_path / "page.html")
    assert rows(made.spec) == {"plugins[0]": {"A": "a.py"}, "backend.device": {"A": "cpu"}}


def test_two_blocks_of_one_name_keep_their_numbers(make):
    spec = {"data.rewards[0].use": "regex", "data.rewards[0].pattern": "a", "data.rewards[1].use": "regex"}
    assert list(spec_values(make("one", spec))) == list(spec)


def test_versions_commits_and_plugin_files_that_differ(make, tmp_path):
    one = make(
        "one",
        {},
        versions={"torch": "2.13.0", "trl": "1.16.0"},
        git={"commit": "abc", "dirty": False, "diff": ""},
        plugins=[{"name": "mine.py", "sha256": "0123456789abcdef"}, {"name": "composer-trl", "sha256": ""}],
    )
    two = make("two", {}, versions={"torch": "2.12.0"}, git={"commit": "abc", "dirty": True, "diff": "+1"})
    assert rows(compare([one, two], tmp_path / "page.html").versions) == {
        "torch": {"A": "2.13.0", "B": "2.12.0"},
        "trl": {"A": "1.16.0"},
        "commit": {"A": "abc", "B": "abc with changes"},
        "mine.py": {"A": "sha256 0123456789ab"},
    }


def test_last_figures_are_means_of_five_and_what_upstream_logged_is_left_out(make, tmp_path):
    lines = [
        {"loss/total": float(step), "reward/mean": 0.5, "upstream/kl": 9.0, "loss/sdpo": math.nan}
        for step in range(1, 8)
    ]
    made = compare(
        [make("one", {}, metrics=lines), make("two", {}, metrics=[{"loss/total": 1.0}])], tmp_path / "p.html"
    )
    # (3 + 4 + 5 + 6 + 7) / 5 = 5; a metric that was never finite has no mean
    assert [row.key for row in made.metrics] == ["reward/mean", "loss/total", "loss/sdpo"]
    assert rows(made.metrics) == {
        "reward/mean": {"A": 0.5},
        "loss/total": {"A": 5.0, "B": 1.0},
        "loss/sdpo": {"A": None},
    }
    assert [run.steps for run in made.runs] == [7, 1]


def test_the_page_overlays_each_curve_in_the_run_s_colour_and_needs_nothing_from_outside(make, tmp_path):
    lines = [{"reward/mean": 0.1 * step, "loss/total": 1.0, "loss/sdpo": 0.5, "step_time": 0.2} for step in range(9)]
    one = make("one", {"model.path": EVIL}, metrics=lines)
    two = make("two", {"model.path": "x"}, metrics=[{**line, f"loss/{EVIL}": 1.0} for line in lines])
    compare([one, two], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    titles = ["Reward", "Loss: total", "Loss: sdpo", "Loss: &lt;script&gt;", "Step time"]
    assert [title for title in titles if title not in html] == []
    assert html.count("<svg") == len(titles)
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert [{"c0", "c1"} <= set(re.findall(r"stroke: var\(--(c\d)\)", picture)) for picture in pictures] == [
        True,
        True,
        True,
        False,  # only B has it ...
        True,
    ]
    assert set(re.findall(r"stroke: var\(--(c\d)\)", pictures[3])) == {"c1"}  # ... in B's colour
    assert "<script" not in html
    assert re.findall(r"<(?:link|img|iframe|object)\b", html) == []
    assert [link for link in re.findall(r'(?:src|href)="([^"]*)"', html) if not link.startswith("#")] == []


def test_runs_of_which_nothing_is_there_have_a_page(tmp_path):
    runs = [create_run(tmp_path, name) for name in ("one", "two")]
    made = compare(runs, tmp_path / "page.html")
    assert (made.spec, made.versions, made.metrics) == ([], [], [])
    html = (tmp_path / "page.html").read_text()
    assert "No step was logged." in html
    assert "They are the same, defaults included." in html


def test_more_runs_than_colours_are_told_apart_by_dashes(make, tmp_path):
    lines = [{"reward/mean": 0.1}, {"reward/mean": 0.2}, {"reward/mean": 0.3}]
    compare([make(f"run{i}", {}, metrics=lines) for i in range(7)], tmp_path / "page.html")
    curves = re.findall(r'<path[^>]*style="fill: none;([^"]*var\(--c0\)[^"]*)"', (tmp_path / "page.html").read_text())
    # the first run and the seventh, each in the chart and in its legend
    assert sorted("stroke-dasharray" in curve for curve in curves) == [False, False, True, True]


def test_a_long_run_s_page_says_that_points_are_averaged(make, tmp_path):
    lines = [{"reward/mean": 0.1}] * 1201
    compare([make("long", {}, metrics=lines), make("short", {}, metrics=lines[:3])], tmp_path / "page.html")
    assert "a point of it is the mean of up to 3 logged steps." in (tmp_path / "page.html").read_text()


def test_one_run_or_the_same_twice_is_no_comparison(make, tmp_path):
    one = make("one", {})
    with pytest.raises(UsageError, match=r"^two runs at least make a comparison$"):
        compare([one], tmp_path / "page.html")
    with pytest.raises(UsageError, match=rf"^run {one.name} stands twice$"):
        compare([one, make("two", {}), one], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_comparison_is_json(make, tmp_path):
    from dataclasses import asdict

    made = compare([make("one", {"a": [1]}), make("two", {"a": None})], tmp_path / "page.html")
    assert json.loads(json.dumps(asdict(made), allow_nan=False))["spec"] == [
        {"key": "a", "values": {"A": [1], "B": None}}
    ]
