import json
import math
import re
from html.parser import HTMLParser

import pytest

from composer_core.run.charts import MOST_POINTS, Chart, Line, draw, thin
from composer_core.run.context import RolloutSample
from composer_core.run.directory import create_run
from composer_core.run.metrics import MetricsLog, RolloutLog
from composer_core.run.report import build_report, summarise

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Tags, and the text outside of style sheets."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.attributes = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def directory(tmp_path):
    return create_run(tmp_path, "fix-traces")


def page_of(directory):
    build_report(directory)
    return Page(directory.report.read_text(encoding="utf-8"))


def a_whole_run(directory):
    block = {"use": "sdpo", "weight": 0.1}
    spec = {
        "backend": {"use": "trl"},
        "loss": {"objective": {"use": "dr-grpo"}, "channels": [block]},
        "model": {"path": EVIL, "builtin": None},
        "train": {"steps": 20},
    }
    directory.write_json("plan.json", {"spec": spec})
    directory.write_json("resolved.json", {"model.path": {"value": EVIL, "source": EVIL}})
    directory.write_json("provenance.json", {"worker": {"versions": {"torch": "2.13.0"}, "seed": 0}})
    directory.event("started", pid=1)
    metrics, rollouts = MetricsLog(directory.metrics), RolloutLog(directory.rollouts)
    for step in range(1, 13):
        losses = {
            "loss/total": 0.5,
            "loss/policy": math.nan if step == 3 else 0.1,
            f"loss/{EVIL}": 0.4,
            "loss/$x$": 1.0,
        }
        speed = {"step_time": 0.5, "tokens_per_s": 100.0 * step}
        metrics.log(step, {"reward/mean": step / 10, "reward/std": 0.1, **losses, **speed, "grad_norm/sdpo": 0.0})
        rollouts.log(step, [RolloutSample([{"role": "user", "content": EVIL}], f"{EVIL} {step}", {EVIL: 1.0}, None)])
    directory.event("warning", reason=EVIL)
    directory.event("failed", reason=f"reward {EVIL}")


def test_the_figures_of_a_run(directory):
    a_whole_run(directory)
    summary = summarise(directory)
    assert summary.run == directory.name
    assert (summary.state, summary.reason) == ("failed", f"reward {EVIL}")
    assert (summary.steps, summary.total_steps) == (12, 20)
    assert summary.reward_first == pytest.approx(0.3)  # (0.1 + ... + 0.5) / 5
    assert summary.reward_last == pytest.approx(1.0)  # (0.8 + ... + 1.2) / 5
    assert summary.tokens_per_s == pytest.approx(1000)  # (800 + ... + 1200) / 5
    assert (summary.model, summary.checkpoints) == (None, [])


def test_nothing_of_a_run_can_become_a_tag_of_the_page(directory):
    a_whole_run(directory)
    page = page_of(directory)
    assert "script" not in page.tags
    text = "".join(page.text)
    # model, reason, warning, resolved value and source, events, samples
    assert text.count(EVIL) >= 10


def test_the_page_needs_nothing_from_outside(directory):
    a_whole_run(directory)
    page = page_of(directory)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert [link for link in links if not link.startswith("#")] == []
    html = directory.report.read_text()
    assert "@import" not in html
    assert [url for url in re.findall(r"url\(([^)]*)\)", html) if not url.startswith("#")] == []


def test_the_first_and_the_last_sampled_step_are_shown_with_their_white_space(directory):
    a_whole_run(directory)
    rollouts = RolloutLog(directory.rollouts)
    rollouts.log(13, [RolloutSample("prompt", "  two\n    lines", {}, 0.25)])
    text = "".join(page_of(directory).text)
    assert "  two\n    lines" in text
    assert f"{EVIL} 1" in text
    assert f"{EVIL} 5" not in text


def test_a_long_completion_is_folded_and_whole(directory):
    RolloutLog(directory.rollouts).log(1, [RolloutSample("p", "long " * 1000, {}, None)])
    page = page_of(directory)
    assert "long " * 1000 in page.text
    assert "5,000 characters" in page.text


def test_values_that_were_not_finite_are_pointed_out(directory):
    a_whole_run(directory)
    assert "loss/policy was not finite in 1 logged step, first in step 3" in page_of(directory).text


def test_a_run_of_which_nothing_is_there_has_a_page(directory):
    page = page_of(directory)
    assert "No step was logged." in page.text
    assert "new" in page.text


def test_a_run_that_is_being_written_has_a_page(directory):
    a_whole_run(directory)
    for path in (directory.metrics, directory.rollouts, directory.events):
        with path.open("a") as file:
            file.write('{"step": 13, "rew')
    assert build_report(directory).steps == 12


@pytest.mark.parametrize("missing", ["plan.json", "resolved.json", "provenance.json", "metrics.jsonl", "events.jsonl"])
def test_a_missing_file_leaves_only_its_part_out(directory, missing):
    a_whole_run(directory)
    (directory.path / missing).unlink()
    assert "svg" in page_of(directory).tags or missing == "metrics.jsonl"


def test_each_loss_has_a_picture_of_its_own(directory):
    a_whole_run(directory)
    page = page_of(directory)
    titles = ["Reward", "Loss: total", "Loss: policy", f"Loss: {EVIL}", "Loss: $x$", "Gradient norm", "Step time"]
    assert page.tags.count("svg") == len(titles)
    text = "".join(page.text)
    assert [title for title in titles if title not in text] == []


def test_a_policy_loss_that_is_the_total_has_no_picture_of_its_own(directory):
    log = MetricsLog(directory.metrics)
    for step, loss in enumerate((0.5, math.nan, 0.25), 1):
        log.log(step, {"loss/total": loss, "loss/policy": loss})
    page = page_of(directory)
    assert page.tags.count("svg") == 1
    assert "Loss: policy" not in "".join(page.text)
    log.log(4, {"loss/total": 0.5, "loss/policy": 0.4})
    assert page_of(directory).tags.count("svg") == 2


def test_the_page_of_a_long_run_says_that_points_are_averaged(directory):
    log = MetricsLog(directory.metrics)
    for step in range(1, MOST_POINTS + 1):
        log.log(step, {"reward/mean": 0.5})
    assert "The run is long" not in "".join(page_of(directory).text)
    log.log(MOST_POINTS + 1, {"reward/mean": 0.5})
    # 601 values in runs of ceil(601 / 600) = 2
    assert "The run is long: a point is the mean of 2 logged steps." in page_of(directory).text


def test_a_chart_takes_its_colours_from_the_page_and_names_no_font():
    svg = draw(Chart("Loss", [Line("a", [1, 2], [1.0, 2.0], [0.1, 0.1]), Line("b", [1, 2], [2.0, 1.0], colour=1)]))
    assert set(re.findall(r"var\(--(\w+)\)", svg)) == {"c0", "c1", "muted", "line"}
    assert re.findall(r"#0[0-9a-f]{5}\b", svg) == []
    assert "font-family" not in svg


def test_a_chart_of_nothing_finite_is_drawn():
    nan = math.nan
    assert draw(Chart("x", [Line("a", [1, 2], [nan, nan], [nan, nan])], log=True)).startswith("<svg")


def test_many_points_are_averaged_and_few_are_left_alone():
    assert thin([1.0, 2.0]) == [1.0, 2.0]
    # 1201 values, runs of ceil(1201 / 600) = 3: (0 + 1 + 2) / 3 = 1, then 4, ...; the last run is 1200 alone
    thinned = thin([float(i) for i in range(2 * MOST_POINTS + 1)])
    assert thinned[:2] == [1.0, 4.0]
    assert thinned[-1] == 1200.0
    assert len(thinned) <= MOST_POINTS
    # 1800 values, runs of 3; NaN is left out of its run's mean: (1 + 3) / 2
    assert thin([1.0, math.nan, 3.0] * MOST_POINTS) == [2.0] * MOST_POINTS


def test_the_summary_is_json(directory):
    a_whole_run(directory)
    assert json.loads(json.dumps(vars(summarise(directory)), allow_nan=False))["steps"] == 12
