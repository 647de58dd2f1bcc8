"""What each hint says, when it has nothing to say, and where templates come from."""

import pytest

from composer_core.errors import UsageError
from composer_core.plugins.builtin import composer_hints
from composer_core.plugins.contributions import HintPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.traces import hints
from composer_core.traces.error_sites import ErrorSite
from composer_core.traces.hints import BUILTIN, HintBook, default_book, dispatch, register, user_template
from composer_core.traces.templates import UserTemplate

SCHEMA = {"type": "object", "required": ["path"]}


@pytest.fixture(autouse=True)
def _own_default_book():
    default_book.cache_clear()
    yield
    default_book.cache_clear()


# -- the texts ---------------------------------------------------------------------------------------------------------

TEXTS = [
    (
        "tool_not_found",
        {"available_tools": ["read", "write"], "tool_name": "serch"},
        "Hint: There is no tool serch. The tools are: read, write.",
    ),
    (
        "json_decode",
        {"tool_name": "read", "tool_schema": SCHEMA, "error_message": "Expecting value"},
        "Hint: the arguments of read must be one valid JSON object. They follow this schema: "
        '{"type": "object", "required": ["path"]} Otherwise it fails with: Expecting value',
    ),
    (
        "type_error",
        {"tool_name": "read", "tool_schema": SCHEMA, "error_message": "`path` is missing"},
        'Hint: mind the arguments of read. They follow this schema: {"type": "object", "required": ["path"]} '
        "With wrong ones it fails with: `path` is missing",
    ),
    (
        "runtime_error",
        {"tool_name": "bash", "arguments": {"command": "cat b"}, "error_message": "cat: b: No such file"},
        'Hint: calling bash with {"command": "cat b"} fails with: cat: b: No such file\nDo what avoids this.',
    ),
    (
        "repeated_failure",
        {"tool_name": "Edit", "error_message": "File has not been read yet."},
        "Hint: Edit has failed here before, and fails the same way again: File has not been read yet.\n"
        "Do not repeat it: find out the cause first, or go another way.",
    ),
    (
        "failed_test",
        {"error_message": "FAILED test_a - assert 1 == 2", "expected_output": "2"},
        "Hint: a careless change here breaks the tests, which then say: FAILED test_a - assert 1 == 2\nExpected: 2",
    ),
    (
        "timeout",
        {"tool_name": "bash", "arguments": {"command": "find /"}},
        'Hint: calling bash with {"command": "find /"} does not end in time. Make it smaller, give it a limit of its '
        "own, or run it in the background and look at its output.",
    ),
    (
        "low_reward",
        {"expected_output": "42", "feedback": "off by one"},
        "Hint: A correct answer comes to: 42 An earlier answer got this feedback: off by one",
    ),
]


@pytest.mark.parametrize(("kind", "context", "text"), TEXTS, ids=[case[0] for case in TEXTS])
def test_a_hint_says_what_its_context_knows(kind, context, text):
    assert HintBook().dispatch(kind, context) == text


@pytest.mark.parametrize("kind", sorted(set(BUILTIN) - {"json_decode"}))
def test_without_a_context_there_is_nothing_to_say(kind):
    assert HintBook().dispatch(kind) is None


def test_that_arguments_are_json_is_worth_saying_without_a_context():
    assert dispatch("json_decode") == "Hint: the arguments of the tool must be one valid JSON object."


def test_long_arguments_are_cut():
    text = HintBook().dispatch("timeout", {"tool_name": "w", "arguments": "x" * 1000})
    assert "x" * 300 + " ... does not end" in text


# -- the book ----------------------------------------------------------------------------------------------------------


def test_an_unknown_kind_has_no_hint():
    assert HintBook().dispatch("wrong_unit", {"unit": "km"}) is None


def test_a_kind_that_is_only_recorded_has_no_hint_even_with_a_template():
    book = HintBook({"rejection": lambda context: "never"})
    assert book.hint(ErrorSite(0, "rejection", "no")) is None


def test_books_do_not_share_what_is_registered():
    one, other = HintBook(), HintBook()
    one.register("wrong_unit", lambda context: f"in {context['unit']}")
    assert one.dispatch("wrong_unit", {"unit": "km"}) == "in km"
    assert other.dispatch("wrong_unit", {"unit": "km"}) is None
    assert dispatch("wrong_unit", {"unit": "km"}) is None


def test_register_adds_to_the_scripts_book_and_to_no_runs():
    register("my_error", lambda context: "try this")
    register("timeout", lambda context: "wait")
    assert (dispatch("my_error"), dispatch("timeout")) == ("try this", "wait")
    assert "my_error" not in HintBook.of(Registry())
    assert HintBook().dispatch("timeout") is None


# -- plugins -----------------------------------------------------------------------------------------------------------


class WrongUnit:
    """A third party's hint."""

    def __init__(self, settings):
        pass

    def __call__(self, context):
        return f"Hint: the unit is {context['unit']}."


class Acme:
    """A third party's plugin: one kind of its own."""

    @hookimpl
    def composer_hints(self):
        yield HintPlugin(name="wrong-unit", summary="Which unit was meant", target=f"{__name__}:WrongUnit")


class Core:
    """The core's hints, as its own plugin offers them."""

    @hookimpl
    def composer_hints(self):
        return composer_hints()


@pytest.fixture
def registry():
    made = Registry()
    made.add(Core(), Owner("composer-core", "1"))
    made.add(Acme(), Owner("acme", "1"))
    assert made.problems == []
    return made


def test_the_core_contributes_a_hint_for_each_of_its_kinds(registry):
    book = HintBook.of(registry)
    assert set(book) == {*BUILTIN, "wrong_unit"}
    for kind, context, text in TEXTS:
        assert book.dispatch(kind, context) == text


def test_a_plugins_hint_is_for_the_kind_that_its_name_spells_with_hyphens(registry):
    assert HintBook.of(registry).hint(ErrorSite(0, "wrong_unit", "", {"unit": "km"})) == "Hint: the unit is km."


def test_a_template_in_the_spec_comes_before_a_plugins(registry):
    book = HintBook.of(registry, {"wrong_unit": "Use $unit, for $$5."})
    assert book.dispatch("wrong_unit", {"unit": "km"}) == "Use km, for $5."


# -- templates in a spec -----------------------------------------------------------------------------------------------


def test_a_written_template_is_filled_from_the_context():
    template = UserTemplate("Use ${tool_name}: $available_tools. $tool_schema")
    context = {"tool_name": "read", "available_tools": ["read", "ls"], "tool_schema": SCHEMA}
    assert template(context) == 'Use read: read, ls. {"type": "object", "required": ["path"]}'


def test_a_written_template_with_a_gap_says_nothing():
    assert UserTemplate("Expected $expected_output")({"error_message": "no"}) is None


def test_a_written_template_reaches_no_attribute():
    assert UserTemplate("$tool_name.__class__ ${error_kind}")({"tool_name": "a", "error_kind": "b"}) == "a.__class__ b"


@pytest.mark.parametrize("text", ["costs $5", "$", "${tool_name.__class__}", "${a b}"])
def test_a_lone_dollar_in_a_written_template_says_what_to_write(text):
    with pytest.raises(UsageError) as caught:
        user_template("timeout", text)
    assert str(caught.value) == (
        "hints.templates.timeout: a $ stands alone in this template: write $name, ${name}, or $$ for a dollar sign"
    )


def test_an_empty_template_is_refused():
    with pytest.raises(UsageError, match=r"^hints\.templates\.timeout: this template is empty$"):
        user_template("timeout", " \n")


def test_a_template_for_a_kind_that_is_never_hinted_is_refused():
    with pytest.raises(UsageError) as caught:
        user_template("rejection", "no")
    assert str(caught.value) == (
        "hints.templates.rejection: errors of kind 'rejection' are not the agent's fault and get no hint"
    )


def test_the_module_has_no_book_of_its_own():
    assert not [name for name, value in vars(hints).items() if isinstance(value, HintBook)]
