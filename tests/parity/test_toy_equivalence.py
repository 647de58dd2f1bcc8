"""The toy trainer's gradients do not depend on micro-batches, their raggedness, or the number of ranks.

The core's channels, two fakes and a third party's beside each aggregation; every parameter's gradient within 1e-5.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("fixed_rollouts.py")
_spec = importlib.util.spec_from_file_location("fixed_rollouts", PROGRAM)
fixed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fixed)


@pytest.fixture(scope="module", params=fixed.OBJECTIVES)
def objective(request):
    return request.param


@pytest.fixture(scope="module")
def whole(objective, tiny_model_folder):
    """In one micro-batch on one rank."""
    return fixed.gradients(tiny_model_folder, objective, splits=[range(7)])


@pytest.mark.parametrize(
    "splits",
    [
        [[0, 1], [2, 3], [4, 5], [6]],
        [[i] for i in range(7)],
        # one micro-batch without an action, one with most of the tokens, and another order
        [[5], [6, 4, 2, 0], [3, 1]],
    ],
    ids=["four", "one-by-one", "ragged"],
)
def test_micro_batches_change_nothing(objective, whole, tiny_model_folder, splits):
    _assert_equal(fixed.gradients(tiny_model_folder, objective, splits=splits), whole)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_model_folder):
    """Both ranks' gradients and metrics for every objective: unequal shares, the second one without a hint."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(PROGRAM)]
    arguments = [str(folder), str(tiny_model_folder)]
    ranks = [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_have_the_gradients_of_one(objective, whole, two_ranks, rank):
    found = load_file(two_ranks / f"{objective}-{rank}.safetensors")
    metrics = json.loads((two_ranks / f"{objective}-{rank}.json").read_text())
    _assert_equal((found, metrics), whole)


def test_every_channel_took_part(whole):
    _, metrics = whole
    for channel in ("fake-brevity", "hint-fake", "brevity", "sdpo", "replay"):
        assert metrics[f"loss/{channel}"] != 0
        assert metrics[f"grad_norm/{channel}"] > 0
    assert metrics["active/sdpo"] == pytest.approx(3 / 7)
    assert metrics["tokens/sdpo"] == 5 + 2 + 7
    assert metrics["active/replay"] == 1.0
    assert metrics["sdpo/hint_gain"] != 0
    assert metrics["active/hint-fake"] == pytest.approx(3 / 7)
    assert metrics["active/brevity"] == pytest.approx(4 / 7)  # lengths 5, 7, 9, 6 exceed 4
    assert metrics["tokens/hint-fake"] == 5 + 2 + 7
    assert metrics["tokens"] == 5 + 2 + 7 + 1 + 6 + 6  # the fifth has 3 of 9 from a tool, the sixth none


def _assert_equal(found, whole):
    gradients, metrics = found
    expected, expected_metrics = whole
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)
