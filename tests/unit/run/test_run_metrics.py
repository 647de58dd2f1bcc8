import json
import math
import time

import pytest
import torch

from composer_core.run.context import RolloutSample
from composer_core.run.files import read_jsonl
from composer_core.run.metrics import MetricsLog, RolloutLog, ends, series

NAN, INF = math.nan, math.inf


def logged(path, *lines):
    log = MetricsLog(path)
    for step, metrics in lines:
        log.log(step, metrics)
    log.close()
    return read_jsonl(path)


def test_a_line_holds_step_time_and_the_metrics_unrounded(tmp_path):
    before = time.time()
    (line,) = logged(tmp_path / "m", (3, {"reward/mean": 1 / 3, "tokens/sdpo": 7, "loss/total": torch.tensor(0.5)}))
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 3, "reward/mean": 1 / 3, "tokens/sdpo": 7, "loss/total": 0.5}


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
    (line,) = logged(tmp_path / "m", (1, {"a": NAN, "b": 1.0, "c": -INF}))
    del line["time"]
    assert line == {"step": 1, "a": None, "b": 1.0, "c": None, "nonfinite": ["a", "c"]}


def test_every_line_is_strict_json(tmp_path):
    logged(tmp_path / "m", (1, {"a": NAN}))

    def refuse(word):
        raise AssertionError(word)

    json.loads((tmp_path / "m").read_text(), parse_constant=refuse)


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path):
    log = MetricsLog(tmp_path / "m")
    log.log(1, {"a": 1.0})
    assert [line["a"] for line in read_jsonl(tmp_path / "m")] == [1.0]
    log.close()


def test_a_series_has_the_steps_that_logged_it_and_gaps_where_it_was_not_finite():
    lines = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}]
    steps, values = series(lines, "a")
    assert steps == [1, 3]
    assert values[0] == 1.0
    assert math.isnan(values[1])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None)),
        ([None], (None, None)),
        ([2.0], (2.0, 2.0)),
        # (1+2+3+4+5)/5 = 3, (3+4+5+6+7)/5 = 5
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], (3.0, 5.0)),
        # the null counts for nothing: (1+3)/2
        ([1.0, None, 3.0], (2.0, 2.0)),
    ],
    ids=["none", "null", "one", "seven", "gap"],
)
def test_the_ends_are_means_of_at_most_five_finite_values(values, expected):
    assert ends([{"step": i, "r": value} for i, value in enumerate(values)], "r") == expected


def test_a_sample_keeps_its_text_and_a_score_that_is_not_finite_is_null(tmp_path):
    prompt = [{"role": "user", "content": "2+2?\n"}]
    log = RolloutLog(tmp_path / "r")
    log.log(4, [RolloutSample(prompt, "  4 <b>\n\ud800", {"exact": 1.0, "other": None, "bad": NAN}, INF)])
    log.close()
    (line,) = read_jsonl(tmp_path / "r")
    del line["time"]
    assert line == {
        "step": 4,
        "prompt": prompt,
        "completion": "  4 <b>\n?",  # half a surrogate pair cannot be written
        "rewards": {"exact": 1.0, "other": None, "bad": None},
        "advantage": None,
    }
