"""Which turns are sites, of which kind, and what decided. Most results are the wording of real sessions' files."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_core.errors import UsageError
from composer_core.protocols import RolloutText
from composer_core.traces.error_sites import HINTED, RECORDED, ErrorSite, find_sites, rollout_sites
from composer_core.traces.failures import Failure, Result, classify
from composer_core.traces.hints import BUILTIN
from composer_core.traces.model import Observation, Step, ToolCall, Trace

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"


def turn(name, arguments, result, **facts):
    return Step("agent", "", None, (ToolCall("c", name, arguments),), (Observation("c", result, **facts),))


def kinds(*steps, tools=()):
    return [(site.turn, site.kind) for site in find_sites(Trace("t", (Step("user", "do it"), *steps), tools=tools))]


# -- one result --------------------------------------------------------------------------------------------------------

FLAGGED = [
    # (result, kind, the line that decided)
    ("<tool_use_error>Sibling tool call errored</tool_use_error>", "sibling", "Sibling tool call errored"),
    ("No tools needed for suggestion", "rejection", "No tools needed for suggestion"),
    (
        "The user doesn't want to proceed with this tool use. STOP what you are doing.",
        "rejection",
        "The user doesn't want to proceed with this tool use. STOP what you are doing.",
    ),
    (
        "Claude requested permissions to write to /a/b.md, but you haven't granted it yet.",
        "permission",
        "Claude requested permissions to write to /a/b.md, but you haven't granted it yet.",
    ),
    ("Error: No such tool available: serch", "tool_not_found", "Error: No such tool available: serch"),
    ("Tool 'grep_all' not found", "tool_not_found", "Tool 'grep_all' not found"),
    ("Request timed out after 30s", "timeout", "Request timed out after 30s"),
    (
        "Failed to parse arguments as JSON: Expecting value: line 1 column 9",
        "json_decode",
        "Failed to parse arguments as JSON: Expecting value: line 1 column 9",
    ),
    (
        "<tool_use_error>InputValidationError: Task failed due to the following issue:\n"
        "The required parameter `prompt` is missing</tool_use_error>",
        "type_error",
        "InputValidationError: Task failed due to the following issue: The required parameter `prompt` is missing",
    ),
    (
        "Parameter 'command' is expected to be one of ['view', 'create'].",
        "type_error",
        "Parameter 'command' is expected to be one of ['view', 'create'].",
    ),
    (
        "ERROR:\nInvalid `view_range` parameter: [100, 150].",
        "type_error",
        "Invalid `view_range` parameter: [100, 150].",
    ),
    ("ERROR:\nNo replacement was made.\nThe end.", "runtime_error", "ERROR: No replacement was made."),
    (NOT_READ, "runtime_error", "File has not been read yet. Read it first before writing to it."),
    ("Error: gift card balance is not enough", "runtime_error", "Error: gift card balance is not enough"),
]


@pytest.mark.parametrize(("text", "kind", "evidence"), FLAGGED)
def test_a_result_that_its_format_flags_gets_the_kind_its_text_says(text, kind, evidence):
    assert classify(Result(text, is_error=True)) == Failure(kind, evidence)


def test_the_format_has_the_last_word_over_the_text():
    assert classify(Result("Error: no such key", is_error=False)) is None
    assert classify(Result("Error: no such key", exit_code=0)) is None
    assert classify(Result("bash: x: command not found", exit_code=-1, shell=True)) is None  # still running


@pytest.mark.parametrize(
    "text",
    [
        "Error: not enough seats on flight HAT229",
        "Your proposed edit has introduced new syntax error(s). Please retry.",
        "<returncode>1</returncode>\n<output>\ncat: a.py: No such file or directory\n</output>",
        "cat: a.py: No such file or directory\n[The command completed with exit code 1.]",
    ],
)
def test_without_a_flag_a_result_that_is_an_error_message_is_a_failure(text):
    failure = classify(Result(text))
    assert failure is not None
    assert failure.kind == "runtime_error"


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('Error: bad')",
        "3 errors were fixed",
        "<returncode>0</returncode>\n<output>\nno error\n</output>",
        "",
    ],
)
def test_without_a_flag_a_result_that_only_mentions_errors_is_none(text):
    assert classify(Result(text)) is None


@pytest.mark.parametrize(
    "text",
    ["", "Exit code 1\nOn branch master\nnothing to commit, working tree clean", "Exit code 1\nLint\tfail\t26s"],
    ids=["grep-without-match", "nothing-to-commit", "status-of-a-check"],
)
def test_an_exit_code_alone_is_no_failure_since_nothing_could_be_said_about_it(text):
    assert classify(Result(text, is_error=True, exit_code=1, shell=True)) is None


def test_in_a_commands_output_a_type_error_is_the_programs_and_not_the_calls():
    text = 'Traceback (most recent call last):\n  File "a.py", line 1\nTypeError: f() missing 1 required argument: "x"'
    assert classify(Result(text, exit_code=1, shell=True)) == Failure(
        "runtime_error", 'TypeError: f() missing 1 required argument: "x"'
    )


def test_exit_code_124_is_a_timeout():
    assert classify(Result("", exit_code=124, shell=True)) == Failure("timeout", "exit code 124")


@pytest.mark.parametrize(
    "report",
    [
        "===== 1 failed, 3 passed in 0.1s =====",
        "FAILED tests/test_a.py::test_b - assert 1 == 2",
        "\x1b[41m Failed Tests 1 \x1b[49m",
        "--- FAIL: TestA (0.00s)",
        "test result: FAILED. 1 passed; 1 failed",
        "  2 failing",
        "Tests:       1 failed, 2 passed, 3 total",
        "FAILED (failures=1)",
    ],
)
def test_a_test_report_counts_whatever_the_exit_code_since_tests_run_in_pipes(report):
    failure = classify(Result(report, exit_code=0, shell=True))
    assert failure is not None
    assert failure.kind == "failed_test"


@pytest.mark.parametrize("report", ["===== 4 passed in 0.1s =====", "0 failing", "Tests: 0 failed, 3 passed"])
def test_a_report_without_failures_is_none(report):
    assert classify(Result(report, exit_code=0, shell=True)) is None


@pytest.mark.parametrize(
    ("named", "kind"), [("parsing", "json_decode"), ("timeout", "timeout"), ("approval", "rejection")]
)
def test_an_error_that_the_format_names_needs_no_text(named, kind):
    assert classify(Result("...", is_error=True, error_type=named)) == Failure(kind, f"{named}: ...")


@pytest.mark.parametrize("filling", ["x", "1", "/", "=", "error ", '"', "\n"])
def test_a_huge_result_is_classified_in_no_time(filling):
    for shell in (True, False):
        start = time.process_time()
        failure = classify(Result("= " + filling * 1_000_000, is_error=True, shell=shell))
        assert time.process_time() - start < 1
        assert failure is None or len(failure.evidence) <= 300


@given(
    text=st.text(max_size=200),
    is_error=st.sampled_from([None, True, False]),
    exit_code=st.sampled_from([None, -1, 0, 1, 124]),
    shell=st.booleans(),
)
def test_any_result_is_classified_as_a_known_kind_or_none(text, is_error, exit_code, shell):
    failure = classify(Result(text, is_error=is_error, exit_code=exit_code, shell=shell))
    assert failure is None or failure.kind in HINTED | RECORDED
    if is_error is False and failure is not None:
        assert failure.kind == "failed_test"


# -- a whole trace -----------------------------------------------------------------------------------------------------


def test_a_site_names_the_turn_of_the_failed_call_with_what_a_hint_needs():
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = ({"type": "function", "function": {"name": "read", "parameters": schema}},)
    steps = [
        Step("user", "go"),
        turn("read", {"path": "a"}, "fine", is_error=False),
        turn("read", {"file": "b"}, "required parameter `path` is missing", is_error=True),
    ]
    [site] = find_sites(Trace("t", steps, tools=tools))
    assert site == ErrorSite(
        turn=1,
        kind="type_error",
        evidence="required parameter `path` is missing",
        context={
            "error_kind": "type_error",
            "error_message": "required parameter `path` is missing",
            "tool_name": "read",
            "arguments": {"file": "b"},
            "tool_schema": schema,
            "available_tools": ["read"],
        },
    )
    assert site.hinted


def test_where_the_trace_defines_no_tools_those_that_worked_are_available():
    steps = [
        turn("read", {}, "fine"),
        turn("bash", {}, "fine"),
        turn("serch", {}, "No such tool available: serch", is_error=True),
    ]
    [site] = find_sites(Trace("t", steps))
    assert site.context["available_tools"] == ["bash", "read"]


def test_a_failure_that_comes_again_at_a_later_turn_is_repeated():
    # Another path, the same message: that is the same mistake.
    steps = [
        turn("Edit", {"path": "a"}, NOT_READ, is_error=True),
        turn("Edit", {"path": "b"}, NOT_READ, is_error=True),
        turn("Write", {"path": "b"}, NOT_READ, is_error=True),
    ]
    assert kinds(*steps) == [(0, "runtime_error"), (1, "repeated_failure"), (2, "runtime_error")]
    [_, again, _] = find_sites(Trace("t", steps))
    assert (again.context["first_kind"], again.context["first_turn"]) == ("runtime_error", 0)


def test_another_message_of_the_same_tool_is_not_repeated():
    steps = [
        turn("bash", {}, "bash: ponyc: command not found", exit_code=127),
        turn("bash", {}, "make: *** [build] Error", exit_code=2),
    ]
    assert kinds(*steps) == [(0, "runtime_error"), (1, "runtime_error")]


REPORT = "FAILED tests/test_a.py::test_b - assert 1 == 2"


def test_a_failing_test_blames_the_last_turn_that_changed_a_file():
    steps = [
        turn("Edit", {"path": "a.py"}, "ok", is_error=False),
        turn("Read", {"path": "a.py"}, "code", is_error=False),
        turn("Bash", {"command": "pytest"}, REPORT, is_error=True),
    ]
    assert kinds(*steps) == [(0, "failed_test")]


@pytest.mark.parametrize(
    ("command", "blamed"),
    [
        ("sed -i s/a/b/ a.py", True),
        ("cat > a.py << 'EOF'\nx\nEOF", True),
        ("echo x >> a.py", True),
        ("pytest 2>&1 | tail", False),
        ("python a.py 2> /dev/null", False),
        ("grep a > /dev/null", False),
        ("cat a.py", False),
    ],
)
def test_a_command_that_writes_a_file_can_be_blamed(command, blamed):
    steps = [turn("Bash", {"command": command}, "", exit_code=0), turn("Bash", {"command": "pytest"}, REPORT)]
    assert kinds(*steps) == ([(0, "failed_test")] if blamed else [])


def test_a_test_that_fails_before_any_change_shows_the_bug_and_is_no_site():
    assert kinds(turn("Bash", {"command": "pytest"}, REPORT, is_error=True)) == []


def test_several_failures_of_one_kind_in_one_turn_are_one_site():
    calls = (ToolCall("a", "read", {}), ToolCall("b", "read", {}))
    seen = (Observation("a", "Error: no x", is_error=True), Observation("b", "Error: no y", is_error=True))
    assert kinds(Step("agent", "", None, calls, seen)) == [(0, "runtime_error")]


def test_copied_and_synthetic_turns_are_counted_but_have_no_sites():
    failed = turn("read", {}, "Error: no", is_error=True)
    copied = Step("agent", "", None, failed.tool_calls, failed.observations, copied=True)
    synthetic = Step("agent", "", None, failed.tool_calls, failed.observations, synthetic=True)
    assert kinds(copied, synthetic, failed) == [(2, "runtime_error")]


def test_sites_that_are_no_fault_of_the_call_are_recorded_and_not_hinted():
    steps = [turn("Write", {}, "The user doesn't want to proceed with this tool use.", is_error=True)]
    [site] = find_sites(Trace("t", steps))
    assert (site.kind, site.hinted) == ("rejection", False)
    assert RECORDED.isdisjoint(HINTED)


def test_every_hinted_kind_has_a_template():
    assert set(BUILTIN) == HINTED


def test_a_long_message_keeps_the_line_that_decided():
    text = "x" * 900 + "\nbash: ponyc: command not found\n" + "y" * 900
    [site] = find_sites(Trace("t", [turn("bash", {}, text, exit_code=127)]))
    assert site.context["error_message"].startswith("bash: ponyc: command not found\nyyy")
    assert site.context["error_message"].endswith("y ...")
    assert len(site.context["error_message"]) == 604


def test_an_exception_of_a_tool_that_runs_commands_is_about_its_arguments():
    said = "bash() missing 1 required positional argument: 'command'"
    flags = {"is_error": True, "extra": {"message": {"raised": True}}}
    assert kinds(turn("bash", {}, said, **flags)) == [(0, "type_error")]
    assert kinds(turn("bash", {}, said, is_error=True)) == []  # what a program wrote does not say so


# -- rollouts ----------------------------------------------------------------------------------------------------------


def rollout(reward, **columns):
    return RolloutText("r7", [1], [2], [True], reward, columns)


def test_a_low_reward_is_a_site_of_the_whole_answer_with_the_rows_columns():
    [site] = rollout_sites(rollout(0.25, answer=42, topic="sums"), below=1.0)
    assert (site.turn, site.kind, site.evidence) == (-1, "low_reward", "reward 0.25 < 1")
    assert site.context == {
        "answer": 42,
        "topic": "sums",
        "expected_output": "42",
        "error_kind": "low_reward",
        "reward": 0.25,
    }


@pytest.mark.parametrize("reward", [1.0, 2.0, None], ids=["enough", "more", "not-rewarded"])
def test_a_rollout_that_did_not_fail_has_no_site(reward):
    assert rollout_sites(rollout(reward)) == []


def test_sites_that_a_rollout_names_come_before_its_reward():
    named = [{"turn": 1, "kind": "wrong_unit", "evidence": "5 miles", "context": {"unit": "km"}}]
    assert rollout_sites(rollout(0.0, error_sites=named)) == [
        ErrorSite(1, "wrong_unit", "5 miles", {"error_message": "5 miles", "unit": "km", "error_kind": "wrong_unit"})
    ]


@pytest.mark.parametrize(
    "named", ["oops", [{"turn": 1}], [{"kind": "a,b"}], [{"kind": "a", "turn": "x"}], [{"kind": "a", "context": 1}]]
)
def test_a_column_that_holds_no_sites_says_what_it_should_hold(named):
    with pytest.raises(UsageError) as caught:
        rollout_sites(rollout(0.0, error_sites=named))
    item = named if isinstance(named, str) else named[0]
    assert str(caught.value) == (
        f"error_sites: rollout r7: no error site: {item!r}\n"
        '  fix: a list of {"turn": 0, "kind": "runtime_error", "evidence": "what was said", "context": {}}'
    )
