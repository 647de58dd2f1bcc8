"""The official vectors, each case a test; and that the runner would notice a wrong number."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "golden"
sys.path.insert(0, str(TESTS))
import golden  # noqa: E402 - it is a program and not a package

CASES = {case.id: case for case in golden.load_cases(DATA)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradient_are_the_official_ones(case):
    problems, _ = golden.check(case)
    assert problems == []


def test_the_report_counts_every_case_once_and_forms_of_plugins_apart():
    report = golden.run_folder(DATA).document()
    assert {name: report[name] for name in ("passed", "failed", "unsupported", "oracle")} == {
        "passed": 189,
        "failed": 0,
        "unsupported": 0,
        "oracle": 37,
    }
    assert sum(sum(counts.values()) for counts in report["by_family"].values()) == 226
    assert report["by_family"]["dpo"] == {"passed": 9, "failed": 0, "unsupported": 0, "oracle": 11}


@pytest.mark.parametrize(
    ("field", "problem"),
    [("outputs", "loss is off by 0.001"), ("grads", "gradient of student_logits is off by 0.001")],
)
def test_a_wrong_number_fails_its_case(field, problem):
    case = CASES["jsd.trl.beta0.5.labels"]
    wrong = {name: value + 1e-3 for name, value in getattr(case, field).items()}
    problems, _ = golden.check(replace(case, **{field: wrong}))
    assert problems == [problem]


def test_a_loss_rounded_to_bfloat16_on_the_way_fails(monkeypatch):
    case = CASES["jsd.trl.beta0.5.bf16"]
    exact = golden.FAMILIES["gen_jsd"]

    def rounding(case):
        answer = exact(case)
        rounds = case.inputs["student_logits"].dtype is torch.bfloat16
        return replace(answer, outputs={"loss": answer.outputs["loss"].bfloat16().float()}) if rounds else answer

    monkeypatch.setitem(golden.FAMILIES, "gen_jsd", rounding)
    problems, _ = golden.check(case)
    assert len(problems) == 1
    assert problems[0].startswith("loss is rounded on the way: ")


def test_an_input_named_otherwise_is_a_failure_and_not_a_crash():
    case = CASES["kl.verl.k3"]
    problems, _ = golden.check(replace(case, inputs={"log_probs": case.inputs["logps"]}))
    assert problems == ["KeyError: 'logps'"]


def test_an_unknown_family_is_counted_as_unsupported(tmp_path):
    manifest = json.loads((DATA / "golden_losses.json").read_text())
    case = dict(manifest["cases"][0], family="of-tomorrow")
    (tmp_path / "other.json").write_text(json.dumps({"cases": [case]}))
    (tmp_path / "other.npz").symlink_to(DATA / "golden_losses.npz")
    done = subprocess.run(
        [sys.executable, str(TESTS / "golden.py"), "--data", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "passed": 0,
        "failed": 0,
        "unsupported": 1,
        "oracle": 0,
        "by_family": {"of-tomorrow": {"passed": 0, "failed": 0, "unsupported": 1, "oracle": 0}},
    }
    assert done.stderr == "jsd.trl.beta0.labels: no entry for family 'of-tomorrow'\n"


def test_the_inputs_of_a_bfloat16_case_are_bfloat16():
    assert CASES["jsd.trl.beta0.bf16"].inputs["student_logits"].dtype is torch.bfloat16
