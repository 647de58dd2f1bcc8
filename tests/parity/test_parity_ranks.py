"""Two processes of TRL over gloo, under its own DDP, give the reference's losses and gradients, each the same.

The second one has no hint at all, and the three pairs of a step fall to them as two and one.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import parity_reference as reference  # noqa: E402
import parity_table as table  # noqa: E402
from test_parity_table import assert_same  # noqa: E402

NAMES = (
    "plain",
    "plain+own-head",
    "dapo-in-four",
    "teacher-ema-checkpointing",
    "lora-fresh",
    "core-composer2",
    "core-lm-ce",
)
CASES = {name: next(case for case in table.CASES if case.id == name.partition("+")[0]) for name in NAMES}
"""`+own-head`: see `join_trl.py`."""
PATIENCE_S = 240


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    reference.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def both(models, tmp_path_factory):
    """A folder with what each process found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    run_both([sys.executable, str(HERE / "join_trl.py")], [str(folder), str(models), *NAMES])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_references_losses_and_gradients(case, models, both):
    expected = reference.expected(CASES[case], models)
    for rank in (0, 1):
        losses = json.loads((both / f"{case}-{rank}.json").read_text())
        gradients = [load_file(both / f"{case}-{step}-{rank}.safetensors") for step in range(1, len(losses) + 1)]
        found = [table.Step(*step) for step in zip(losses, gradients, strict=True)]
        assert_same(found, expected, tolerance=CASES[case].tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loss_that_is_no_number_on_one_process_stops_both_with_its_text(models):
    run_both([sys.executable, str(HERE / "poisoned_rank.py")], [str(models)])
    first, second = (json.loads((models / f"{rank}.json").read_text()) for rank in (0, 1))
    # rollout 0 or 2, whichever came first; the first token that its hint stands before
    assert re.fullmatch(
        r"the loss of 'sdpo' is nan at step 1: the divergence of row [01] \((1-0-0\), token 3 \(id 30|1-1-0\), token 6 "
        r"\(id 59)\), is not finite",
        first["said"],
    )
    assert second == first
    assert first["unchanged"]


def run_both(program, arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in ("0", "1"):
        environment = {**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen([*program, rank, *arguments], env=environment))
    try:
        assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
