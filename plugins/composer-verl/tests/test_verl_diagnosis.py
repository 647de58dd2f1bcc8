"""What `composer-run doctor --deep` says about verl: how a tried step is judged, and one that is really made."""

import json
import os
import sys

import pytest

from composer_core.run.doctor import Diagnoses, Finding, Level
from composer_verl import diagnosis
from composer_verl.backend import VerlBackend
from composer_verl.settings import VerlSettings

OTHER = "do not train here; report it with what `composer-run doctor --deep --json` prints"
GOOD = {
    "layout": "packed",
    "device": "cuda",
    "dtype": "bfloat16",
    "losses": {"loss/full": [0.0801, 0.08], "loss/policy": [-0.25, -0.25]},
    "gradient": 0.014,
}


@pytest.fixture
def found(monkeypatch):
    """`found(program)`: what is said when this Python program is the step that is tried."""

    def look(program, **environment):
        monkeypatch.setattr(diagnosis, "PROGRAM", (sys.executable, "-c", program))
        packages, *steps = diagnosis.findings(environment)
        assert packages.name == "verl packages"
        return steps

    return look


def printing(*outcomes):
    return f"print('verl says something'); print({json.dumps(outcomes)!r})"


def test_the_packages_that_matter_are_named_with_their_versions(found, monkeypatch):
    monkeypatch.setattr(diagnosis, "PACKAGES", ("pytest", "no-such-package"))
    packages, *_ = diagnosis.findings({})
    assert packages == Finding("verl packages", Level.OK, f"pytest {pytest.__version__}, no no-such-package")


def test_a_step_that_agrees_is_well(found):
    assert found(printing(GOOD, {**GOOD, "layout": "padded", "dtype": "float32", "gradient": 2e-7, "losses": {}})) == [
        Finding(
            "verl engine, packed",
            Level.OK,
            "packed sequences, bfloat16 on cuda: the core's losses, and its gradient within 0.01",
        ),
        Finding(
            "verl engine, padded",
            Level.OK,
            "padded sequences, float32 on cuda: the core's losses, and its gradient within 2e-07",
        ),
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 0.08 within 5 % ends at 0.084
        ({"losses": {"loss/full": [0.0841, 0.08]}}, "loss/full is 0.0841, by the core 0.08"),
        # the same in float32: within 1e-3
        ({"losses": {"loss/full": [0.0801, 0.08]}, "dtype": "float32"}, "loss/full is 0.0801, by the core 0.08"),
        ({"losses": {"loss/full": [float("nan"), 0.08]}}, "loss/full is nan, by the core 0.08"),
        ({"gradient": 0.11}, "the gradient is off by 0.11 of its norm"),
        ({"gradient": float("nan")}, "the gradient is off by nan of its norm"),
    ],
    ids=["loss", "loss-in-float32", "loss-not-a-number", "gradient", "gradient-not-a-number"],
)
def test_a_step_that_differs_fails_with_both_numbers(found, changed, said):
    outcome = {**GOOD, **changed}
    where = f"packed sequences, {outcome['dtype']} on cuda"
    assert found(printing(outcome)) == [Finding("verl engine, packed", Level.FAIL, f"{where}: {said}", OTHER)]


def test_a_step_that_ends_the_process_is_told_with_its_last_word(found):
    program = "import sys; print('working'); sys.exit('CUDA error: an illegal memory access was encountered')"
    assert found(program) == [
        Finding(
            "verl engine",
            Level.FAIL,
            "a step of its engine ended with 1: CUDA error: an illegal memory access was encountered",
            "python -m composer_verl.probe shows all of it",
        )
    ]


def test_a_step_that_hangs_is_ended(found, monkeypatch):
    monkeypatch.setattr(diagnosis, "LIMIT_SECONDS", 0.2)
    (said,) = found("import time; time.sleep(60)")
    assert (said.level, said.found) == (Level.FAIL, "a step of its engine did not end within 0.2 s")


def test_the_step_has_a_run_s_variables(found):
    program = f"import json, os; print(json.dumps([{GOOD!r} | {{'device': os.environ['WHERE']}}]))"
    (said,) = found(program, WHERE="cpu")
    assert said.found.startswith("packed sequences, bfloat16 on cpu:")


@pytest.mark.slow
def test_on_this_machine_the_engine_gives_the_core_s_losses_and_gradient(monkeypatch):
    monkeypatch.setitem(os.environ, "VERL_USE_EXTERNAL_PLUGINS", "auto")
    backend = VerlBackend(VerlSettings())
    assert isinstance(backend, Diagnoses)
    _, padded, packed = backend.diagnose()
    assert (padded.name, padded.level, padded.fix) == ("verl engine, padded", Level.OK, "")
    assert (packed.name, packed.level, packed.fix) == ("verl engine, packed", Level.OK, "")
    assert padded.found.startswith("padded sequences, float32 on cpu: the core's losses, and its gradient within ")
    assert float(padded.found.rpartition(" ")[2]) < 1e-5


@pytest.mark.slow
def test_an_engine_that_leaves_out_a_hint_is_found_out(monkeypatch, tmp_path):
    """The step is real: one hinted rollout fewer on verl's side alone, and it fails."""
    program = (
        "import composer_verl.probe as probe\n"
        "from dataclasses import asdict; import json\n"
        "from composer_verl.external import leave_trl_alone; leave_trl_alone()\n"
        "encode = probe.encode\n"
        "def without(samples):\n"
        "    samples[0].rows['full'] = None\n"
        "    return encode(samples)\n"
        "probe.encode = without\n"
        "print(json.dumps([asdict(one) for one in probe.outcomes()]))\n"
    )
    monkeypatch.setattr(diagnosis, "PROGRAM", (sys.executable, "-c", program))
    _, padded, packed = VerlBackend(VerlSettings()).diagnose()
    assert (padded.level, packed.level) == (Level.FAIL, Level.FAIL)
    assert padded.found.startswith("padded sequences, float32 on cpu: loss/full is ")
