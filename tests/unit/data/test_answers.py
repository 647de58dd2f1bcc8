from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_core.data import answers

# Alphabet of the formats themselves, so that random texts reach the branches that plain random text would miss.
tricky = st.text(alphabet=st.sampled_from(list("\\boxed{}#### -$%,.0123456789/\n −٣²")), max_size=60)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        # braces inside are part of the content
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        # an escaped brace opens nothing
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        # a completion cut off at the length limit: the last complete one counts
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{8", None),
        (r"stray } before \boxed {9}", "9"),
        (r"open { before \boxed{9}", "9"),
        ("42", None),
    ],
)
def test_last_boxed_takes_the_last_complete_box(text, found):
    assert answers.last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Work.\n#### 18", "18"),
        ("#### 1\nno, #### 2\nDone.", "2"),
        ("####\n18", "18"),
        ("18", None),
        ("#### ", None),
    ],
)
def test_after_mark_takes_the_line_behind_the_last_mark(text, found):
    assert answers.after_mark(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It costs $1,234.50.", "$1,234.50"),
        ("The answer is 18.", "18"),
        ("3 apples and -4 pears", "-4"),
        # a subtraction is not a negative number, a hyphen neither
        ("5-3", "3"),
        ("GPT-4", "4"),
        ("it fell to −7 degrees", "-7"),
        # two numbers, not one of 34
        ("3,4", "4"),
        ("1,2345", "2345"),
        ("about 50%", "50"),
        ("0.5", "0.5"),
        ("x = .5", ".5"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_reads_prose(text, found):
    assert answers.last_number(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),
        ("$ 1,000.00", 1000),
        ("12.", 12),
        ("-0.1", Fraction(-1, 10)),
        ("50%", 50),
        (r"50\%", 50),
        (r"\$1{,}000", 1000),
        ("1/2", Fraction(1, 2)),
        ("1/0", None),
        ("1,00", None),
        ("18 eggs", None),
        ("nan", None),
        ("1e5", None),
        ("", None),
    ],
)
def test_as_number_is_exact(text, value):
    assert answers.as_number(text) == value


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1,000", "1000.0", True),
        # 0.1 + 0.2 has no place here: decimals are compared as they are written
        ("0.30000000000000004", "0.3", False),
        ("1/2", "0.5", True),
        ("two  words\n", "two words", True),
        ("Paris", "paris", False),
        ("18", "eighteen", False),
        (None, "18", False),
        # beyond the longest number, equal digits are still equal as text
        ("9" * 500, "9" * 500, True),
    ],
)
def test_same_answer_compares_numbers_as_numbers_and_the_rest_as_text(found, expected, same):
    assert answers.same_answer(found, expected) is same


def test_expected_answer_of_a_gsm8k_row_is_the_number_behind_the_mark():
    assert answers.expected_answer("She sells <<16-3=13>>13.\n#### 2,125") == "2,125"
    assert answers.expected_answer(18) == "18"
    with pytest.raises(TypeError, match=r"^the expected answer must be text or a number, this row has \['18'\]$"):
        answers.expected_answer(["18"])


def test_completion_text_is_what_the_assistant_said_last():
    chat = [
        {"role": "assistant", "content": "first"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "last"},
        {"role": "tool", "content": "4"},
    ]
    assert answers.completion_text(chat) == "last"
    assert answers.completion_text([{"role": "assistant", "content": None}]) == ""
    assert answers.completion_text([]) == ""
    assert answers.completion_text("plain") == "plain"
    with pytest.raises(TypeError, match=r"^a completion is a text or a list of chat messages, got int$"):
        answers.completion_text(3)


@given(text=st.one_of(st.text(), tricky))
def test_no_text_makes_extraction_raise(text):
    for find in (
        answers.last_boxed,
        answers.after_mark,
        answers.last_number,
        answers.whole,
        answers.last_group("(a)?"),
    ):
        found = find(text)
        assert found is None or isinstance(found, str)
        answers.same_answer(found, text)
    answers.expected_answer(text)


@given(number=st.integers(-(10**12), 10**12), before=st.sampled_from(["", "about ", "= ", "$"]))
def test_any_integer_written_with_commas_is_found_again(number, before):
    # the sign stands before the dollar: -$5
    written = f"-{before}{-number:,}" if before == "$" and number < 0 else f"{before}{number:,}"
    assert answers.same_answer(answers.last_number(f"It is {written}."), str(number))


@pytest.mark.parametrize("text", [r"\boxed{" * 100_000, "1," * 200_000, "1,234" * 80_000, "#" * 400_000, "-" * 400_000])
def test_a_long_hostile_completion_takes_no_longer_than_its_length(text):
    start = time.perf_counter()
    for find in (answers.last_boxed, answers.after_mark, answers.last_number):
        find(text)
    assert time.perf_counter() - start < 5  # quadratic code needs minutes for these
