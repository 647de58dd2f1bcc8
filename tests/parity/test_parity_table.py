"""Each backend gives, in each circumstance of the table, the reference's losses and every parameter's gradient.

A backend joins with a file `join_<name>.py` in this folder; see `parity_table.py`.
"""

import importlib
import math
import os
import sys
from functools import cache
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import parity_reference as reference  # noqa: E402
import parity_table as table  # noqa: E402

JOINERS = sorted(path.stem.removeprefix("join_") for path in HERE.glob("join_*.py"))
CASES = {case.id: case for case in table.CASES}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    reference.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def expected(models):
    """The reference's steps of a case, computed once."""
    return cache(lambda case: reference.expected(CASES[case], models))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", JOINERS)
def test_losses_and_every_gradient_are_the_references(name, case, models, expected, tmp_path):
    joiner = importlib.import_module(f"join_{name}").joiner
    refused = joiner.refuses(CASES[case])
    if refused:
        pytest.skip(refused)
    found = joiner.run(CASES[case], models, tmp_path)
    assert_same(found, expected(case), tolerance=CASES[case].tolerance)


# a row that is what it says differs from its neighbour; else a circumstance would be tested that never came about
DIFFERENT = [
    ("teacher-live", "teacher-frozen"),
    ("teacher-live", "teacher-ema"),
    ("teacher-frozen", "teacher-ema"),
    ("lora-fresh", "lora-fresh-live"),
    ("lora-trained", "lora-trained-ema"),
    ("lora-fresh", "lora-trained"),
    ("capped-ratios", "no-cap"),
    ("plain", "temperature-one"),
    ("plain", "forward-kl-clipped"),
    ("plain", "gate"),
    ("plain", "top-k"),
    ("teacher-frozen", "top-k-of-the-frozen-teacher"),
    ("teacher-frozen", "taid"),
    ("dapo-in-four", "dapo-without-truncated"),
    ("core-gmpo", "core-k3"),
    ("core-gmpo", "core-dppo"),
    ("core-gmpo", "core-gspo-token"),
    ("capped-ratios", "gspo"),
    ("capped-ratios", "sapo"),
    ("capped-ratios", "kl-in-the-loss"),
    ("core-lm-ce", "core-lm-ce-smoothed"),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=" ".join)
def test_a_circumstance_is_seen_in_the_gradient(pair, expected):
    # of the last step: of several the first ones may be alike
    one, other = (expected(case)[-1].gradients for case in pair)
    assert one.keys() == other.keys()
    apart = math.sqrt(sum(float((one[name] - other[name]).norm()) ** 2 for name in one))
    assert apart > 1e-2 * math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in one.values()))


def test_hints_stand_in_the_middle_of_a_trace_and_most_rollouts_have_none():
    case = CASES["plain"]
    rows = [table.Hinted(table.SdpoSettings(success=table.SUCCESS)).prepare(table.rollout(i, case)) for i in range(8)]
    assert [row is not None for row in rows] == [True, False, True] + 5 * [False]
    # rollout 2 has two hints, each before a later turn than the first
    assert (rows[0]["student"], rows[2]["student"]) == ([3, 4, 5, 6, 7], [6, 7, 9, 10, 11])
    assert rows[2]["teacher"] == [9, 10, 15 + 12, 15 + 13, 15 + 14]


def assert_same(found, expected, *, tolerance):
    assert len(found) == len(expected)
    for number, (mine, its) in enumerate(zip(found, expected, strict=True), start=1):
        assert mine.losses.keys() >= its.losses.keys()
        for name, value in its.losses.items():
            # abs: terms of size 1 to 5 nearly cancel in a policy loss
            assert mine.losses[name] == pytest.approx(value, rel=tolerance, abs=tolerance / 2), (number, name)
        assert mine.gradients.keys() == its.gradients.keys()
        whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in its.gradients.values()))
        assert whole > 0
        for name, gradient in its.gradients.items():
            # a parameter that has next to no gradient is compared with the others'
            size = max(float(gradient.norm()), 1e-3 * whole)
            assert float((mine.gradients[name] - gradient).norm()) <= tolerance * size, (number, name)
