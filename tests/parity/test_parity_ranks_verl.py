"""Two ranks of verl's engine over gloo, each with its shard of the model, give the reference's losses and gradients."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import parity_reference as reference  # noqa: E402
import parity_table as table  # noqa: E402
from test_parity_ranks import run_both  # noqa: E402
from test_parity_table import assert_same  # noqa: E402

NAMES = (
    "plain",
    "plain+packed",
    "top-k",
    "top-k-of-the-teacher+ahead",
    "top-k-of-the-frozen-teacher+ahead",
    "dapo-in-four",
    "teacher-live",
    "teacher-frozen",
    "teacher-ema-checkpointing",
    "lora-fresh",
    "lora-trained-ema",
    "reference-of-pairs-from-the-model",
    "core-composer2",
    "core-lm-ce",
)
"""`+packed`, `+ahead`: see `join_verl.py`."""
CASES = {name: next(case for case in table.CASES if case.id == name.partition("+")[0]) for name in NAMES}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    reference.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def both(models, tmp_path_factory):
    """A folder with what each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    run_both([sys.executable, str(HERE / "join_verl.py")], [str(folder), str(models), *NAMES])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_references_losses_and_gradients(case, models, both):
    expected = reference.expected(CASES[case], models)
    for rank in (0, 1):
        losses = json.loads((both / f"{case}-{rank}.json").read_text())
        gradients = [load_file(both / f"{case}-{step}-{rank}.safetensors") for step in range(1, len(losses) + 1)]
        found = [table.Step(*step) for step in zip(losses, gradients, strict=True)]
        assert_same(found, expected, tolerance=CASES[case].tolerance)
