"""What holds for the messages of all wrong specs; each message itself stands in tests/golden_specs."""

from __future__ import annotations

import pytest

from composer_core.errors import SpecError


def test_all_mistakes_come_at_once_in_the_order_of_their_lines(load, spec_text):
    text = spec_text.replace("steps: 5", "steps: 0").replace("use: toy", "use: hopper").replace("tiny}", "tiny, x: 1}")
    with pytest.raises(SpecError) as error:
        load(text)
    assert [(problem.key, problem.line) for problem in error.value.problems] == [
        ("model.x", 3),
        ("train.steps", 13),
        ("backend.use", 14),
    ]


def test_only_missing_packages_end_with_code_3(load, spec_text):
    with pytest.raises(SpecError) as error:
        load(spec_text.replace("use: toy", "use: hopper"))
    assert error.value.exit_code == 3
    with pytest.raises(SpecError) as error:
        load(spec_text.replace("use: toy", "use: hopper").replace("steps: 5", "steps: 0"))
    assert error.value.exit_code == 2
