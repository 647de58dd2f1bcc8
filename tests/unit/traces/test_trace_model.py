"""The shape of traces: what is refused, and how results find their calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from composer_core.traces.model import Observation, Step, ToolCall, Trace


def test_token_ids_and_logprobs_of_different_number_are_refused():
    with pytest.raises(ValueError, match="3 token ids but 2 log-probs"):
        Step(source="agent", token_ids=(1, 2, 3), logprobs=(-0.1, -0.2))


def test_results_find_their_calls_by_id_whatever_the_order():
    first, second = ToolCall("a", "Read", {}), ToolCall("b", "Bash", {})
    late, early = Observation("a", "late"), Observation("b", "early")
    step = Step(source="agent", tool_calls=(first, second), observations=(early, late))
    assert step.answers() == [(second, early), (first, late)]


def test_results_without_ids_find_their_calls_by_position():
    calls = (ToolCall("", "f", {}), ToolCall("", "g", {}))
    seen = (Observation("", "1"), Observation("", "2"), Observation("", "3"))
    answers = Step(source="agent", tool_calls=calls, observations=seen).answers()
    assert [call.name if call else None for call, _ in answers] == ["f", "g", None]


def test_a_result_of_an_unknown_call_has_none():
    step = Step(source="agent", tool_calls=(ToolCall("a", "f", {}),), observations=(Observation("x", "?"),))
    assert step.answers() == [(None, step.observations[0])]


def test_turns_are_the_agents_steps():
    steps = [Step(source=source) for source in ("system", "agent", "user", "agent")]
    assert Trace(id="t", steps=steps).turns == [1, 3]


def test_reading_traces_imports_no_torch():
    code = (
        "import sys; import composer_core.cli.traces, composer_core.traces.ingest, composer_core.traces.convert; "
        "import composer_core.traces.show; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
