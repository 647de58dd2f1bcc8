"""Run golden loss vectors against the package: `python tests/golden.py --data DIR [--json]`.

DIR holds a manifest `*.json` and its arrays `*.npz`, in the format of `tests/data/golden/README.md`. Each case is
computed by the function that `golden_table` names and compared in value and gradient within the case's own tolerance.
A case with bfloat16 inputs must also equal its float64 evaluation on the same rounded inputs to 1e-5: the official
result is rounded at every step, ours must not be. `oracle` counts cases of forms that the package does not ship, which
small references in `tests/oracles` computed; `unsupported`, cases that the table does not know.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from golden_table import FAMILIES
from golden_table.case import Answer, Case

GRADIENT = "d_loss/d_"
UPCAST_TOLERANCE = 1e-5
BF16_STEP = 2.0**-8
"""A gradient that reaches a bfloat16 input is rounded to it."""


@dataclass
class Report:
    """What a folder of cases gave."""

    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    oracle: int = 0
    by_family: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, family: str, verdict: str) -> None:
        """`oracle` cases are passed ones, counted apart."""
        setattr(self, verdict, getattr(self, verdict) + 1)
        counts = self.by_family.setdefault(family, {"passed": 0, "failed": 0, "unsupported": 0, "oracle": 0})
        counts[verdict] += 1

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {name: getattr(self, name) for name in ("passed", "failed", "unsupported", "oracle", "by_family")}


def run_folder(folder: Path) -> Report:
    """Compute and compare every case of a folder."""
    report = Report()
    for case in load_cases(folder):
        if case.family not in FAMILIES:
            report.add(case.family, "unsupported")
            report.problems.append(f"{case.id}: no entry for family {case.family!r}")
            continue
        problems, oracle = check(case)
        report.add(case.family, "failed" if problems else "oracle" if oracle else "passed")
        report.problems += [f"{case.id}: {problem}" for problem in problems]
    return report


def load_cases(folder: Path) -> Iterator[Case]:
    """The cases of every manifest in a folder."""
    for manifest in sorted(folder.glob("*.json")):
        document = json.loads(manifest.read_text(encoding="utf-8"))
        with np.load(manifest.with_suffix(".npz"), allow_pickle=False) as arrays:
            for raw in document["cases"]:
                yield _case(raw, arrays)


def _case(raw: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Case:
    def tensors(kind: str) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(arrays[what["array"]].copy()).to(getattr(torch, what["dtype"]))
            for name, what in raw[kind].items()
        }

    grads = {name.removeprefix(GRADIENT): value for name, value in tensors("grads").items()}
    return Case(
        id=raw["id"],
        family=raw["family"],
        source=raw["source"],
        function=raw["function"],
        args=raw["args"],
        inputs={name: value.requires_grad_(name in grads) for name, value in tensors("inputs").items()},
        outputs=tensors("outputs"),
        grads=grads,
        rtol=raw["tol"]["rtol"],
        atol=raw["tol"]["atol"],
        note=raw.get("note", ""),
    )


def check(case: Case) -> tuple[list[str], bool]:
    """What is wrong with a case, and whether an oracle computed it."""
    try:
        answer, grads = compute(case)
    except Exception as error:  # one broken case must not hide the others
        return [f"{type(error).__name__}: {error}"], False
    problems = list(_differences("", answer.outputs, case.outputs, answer.instead, case))
    problems += _differences("gradient of ", grads, case.grads, answer.instead_grads, case)
    if any(value.dtype is torch.bfloat16 for value in case.inputs.values()):
        problems += _rounding_problems(case, answer, grads)
    return problems, answer.oracle


def compute(case: Case) -> tuple[Answer, dict[str, Tensor]]:
    """The table's answer, and the gradient of the sum of its loss by input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some official forms are warned about: they are what is compared here
        answer = FAMILIES[case.family](case)
    names = list(case.grads)
    if not names:
        return answer, {}
    found = torch.autograd.grad(
        answer.outputs["loss"].sum(), [case.inputs[name] for name in names], allow_unused=True, materialize_grads=True
    )
    return answer, dict(zip(names, found, strict=True))


def _differences(
    what: str, ours: Mapping[str, Tensor], stored: Mapping[str, Tensor], instead: Mapping[str, Tensor], case: Case
) -> Iterator[str]:
    for name, expected in stored.items():
        if name not in ours:
            yield f"{what}{name} was not computed"
            continue
        wanted, got = expected.double(), ours[name].detach().double()
        if name in instead:
            decided = instead[name].detach().double().expand(wanted.shape)
            wanted = torch.where(decided.isnan(), wanted, decided)
        if got.shape != wanted.shape:
            yield f"{what}{name} has shape {tuple(got.shape)}, stored is {tuple(wanted.shape)}"
        elif not torch.allclose(got, wanted, rtol=case.rtol, atol=case.atol, equal_nan=True):
            yield f"{what}{name} is off by {float((got - wanted).abs().max()):.3g}"


def _rounding_problems(case: Case, answer: Answer, grads: Mapping[str, Tensor]) -> Iterator[str]:
    """Against the float64 evaluation of the same, already rounded, inputs."""
    exact_inputs = {
        name: (value.detach().double() if value.is_floating_point() else value).requires_grad_(name in case.grads)
        for name, value in case.inputs.items()
    }
    exact, exact_grads = compute(replace(case, inputs=exact_inputs))
    for name, value in answer.outputs.items():
        ours, wanted = value.detach().double(), exact.outputs[name].detach().double()
        if not torch.allclose(ours, wanted, rtol=UPCAST_TOLERANCE, atol=UPCAST_TOLERANCE):
            yield f"{name} is rounded on the way: {float((ours - wanted).abs().max()):.3g} off"
    for name, value in grads.items():
        if not torch.allclose(value.double(), exact_grads[name], rtol=BF16_STEP, atol=UPCAST_TOLERANCE):
            yield f"gradient of {name} is rounded on the way"


def main() -> int:
    """Exit code 0 when nothing failed and nothing is unknown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a manifest and its arrays")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    options = parser.parse_args()
    report = run_folder(options.data)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    if options.json:
        print(json.dumps(report.document()))
    else:
        for family, counts in sorted(report.by_family.items()):
            print(f"{family:24}" + "  ".join(f"{name} {count}" for name, count in counts.items() if count))
        totals = Counter({name: getattr(report, name) for name in ("passed", "failed", "unsupported", "oracle")})
        print("  ".join(f"{name} {count}" for name, count in totals.items()))
    if not report.by_family:
        print(f"no cases in {options.data}", file=sys.stderr)
        return 2
    return 1 if report.failed or report.unsupported else 0


if __name__ == "__main__":
    sys.exit(main())
