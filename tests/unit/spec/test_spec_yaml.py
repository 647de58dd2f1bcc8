"""The strict reader: YAML 1.1's traps, places, aliases, and everything it refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_core.errors import SpecError
from composer_core.spec.yaml import parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # YAML 1.1 wants a dot, PyYAML gives text
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1E3", 1000.0),
        ("5_000_000", 5_000_000),
        ("010", 10),  # octal in 1.1
        ("0x1F", 31),
        ("0o17", 15),
        ("+7", 7),
        ("-0", 0),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("12:30:00", "12:30:00"),  # 45000 in 1.1
        ("2024-01-31", "2024-01-31"),
        ("1.2.3", "1.2.3"),
        ("1_", "1_"),
        (".nan", ".nan"),
        (".inf", ".inf"),
        ("null", None),
        ("~", None),
        ("", None),
        ('"5"', "5"),
        ("'true'", "true"),
        ("=", "="),
    ],
)
def test_a_plain_scalar_reads_as_written(text, value):
    found = parse(f"key: {text}", "s.yaml").data["key"]
    assert (found, type(found)) == (value, type(value))


def test_keys_are_text_whatever_they_look_like():
    assert parse("on: 1\n2: 3\nnull: 4\n1e3: 5", "s.yaml").data == {"on": 1, "2": 3, "null": 4, "1e3": 5}


def test_every_key_and_item_has_its_place():
    document = parse("a:\n  b: [1, {c: 2}]\nd: 3\n", "s.yaml")
    assert {key: str(place) for key, place in document.places.items()} == {
        "": "s.yaml:1:1",
        "a": "s.yaml:1:1",
        "a.b": "s.yaml:2:3",
        "a.b[0]": "s.yaml:2:7",
        "a.b[1]": "s.yaml:2:10",
        "a.b[1].c": "s.yaml:2:11",
        "d": "s.yaml:3:1",
    }


def test_an_alias_is_a_copy_whose_places_are_the_anchors():
    document = parse("a: &x {b: [1]}\nc: *x\n", "s.yaml")
    document.data["a"]["b"].append(2)
    assert document.data["c"] == {"b": [1]}
    assert str(document.places["c"]) == "s.yaml:2:1"
    assert str(document.places["c.b[0]"]) == "s.yaml:1:12"


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # a0..a3 are 11, 111, 1111 and 11111 values, 12345 with the whole; one more a3 makes 23457
        (BOMB, "s.yaml:5:10: more than 20000 values, counting what aliases stand for"),
        ("a: &x [*x]", "s.yaml:1:8: a[0]: *x contains itself"),
        ("a: *x", "s.yaml:1:4: a: no anchor &x stands before this"),
        (
            "a:\n  b: 1\n  c: 2\n  b: 3",
            "s.yaml:4:3: a.b: this key stands twice (first at line 2)\n  fix: remove one of them",
        ),
        ('{"a": 1, "a": 2}', "s.yaml:1:10: a: this key stands twice (first at line 1)\n  fix: remove one of them"),
        (
            "a: !!python/object/apply:os.system [id]",
            "s.yaml:1:4: a: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not read in a spec\n"
            "  fix: write the plain value",
        ),
        ("<<: {a: 1}", "s.yaml:1:1: merge keys (<<) are not read in a spec\n  fix: write the keys out"),
        ("? [a]\n: 1", "s.yaml:1:3: a key must be plain text"),
        ("a: 1\n---\nb: 2", "s.yaml:2:1: a second document starts here\n  fix: keep one document in a file"),
        ("a: 1e999", "s.yaml:1:4: a: 1e999 is too large for a number"),
        ("a: " + "9" * 301, "s.yaml:1:4: a: this number has more than 300 digits"),
        ("b: 1\na: \x07", "s.yaml:2:4: character '\\x07' cannot stand in YAML"),
        (
            "a: 1\n\tb: 2",
            "s.yaml:2:1: a tab stands here, YAML is indented with spaces\n  fix: replace the tab by spaces",
        ),
        ("a: b: c", "s.yaml:1:5: not readable as YAML: mapping values are not allowed in this context"),
        ("x" * 1_000_001, "s.yaml: 1000001 characters are more than the 1000000 that a spec may have"),
    ],
    ids=lambda value: value[:20],
)
def test_refused_with_one_located_message(text, message):
    with pytest.raises(SpecError) as error:
        parse(text, "s.yaml")
    assert str(error.value) == message


def test_deep_nesting_is_refused_before_it_can_exhaust_the_stack():
    with pytest.raises(SpecError) as error:
        parse("a: " + "[" * 60 + "]" * 60, "s.yaml")
    assert error.value.problems[0].problem == "nested more than 50 deep"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc é\n\"'#:"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab-_ :#", min_size=1), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_json_reads_as_json(value):
    assert parse(json.dumps(value, ensure_ascii=False), "s.json").data == value


@given(st.text())
def test_any_text_is_data_or_one_located_problem(text):
    problems = []
    try:
        parse(text, "s.yaml")
    except SpecError as error:
        problems = error.problems
    assert len(problems) <= 1
    assert all(problem.line >= 1 and problem.problem for problem in problems)
